"""One HTTP request as one or many requests to the engine, which end together: with their answers, an error, or when the client leaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec
from litestar.types import Receive

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import (
    ContextLengthError,
    InvalidRequestError,
    JaxpagedError,
    QueueTimeoutError,
    RequestAbortedError,
    RequestFailedError,
    RequestTimeoutError,
)
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from server.errors import ClientLeftError
from server.ledger import End

_ERRORS: Final[Mapping[str, type[JaxpagedError]]] = {
    QueueTimeoutError.code: QueueTimeoutError,
    RequestTimeoutError.code: RequestTimeoutError,
}

type Outputs = list[tuple[int, RequestOutput]]
"""What came at the same time: the index of the prompt, and what is new of its answers."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request asks the engine for.

    Attributes:
        request_id: of the whole; each prompt's has its index behind it.
        prompts: token ids of each.
        params: of all.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


def check_length(field: str, prompts: Sequence[Sequence[int]], name: str, max_tokens: int | None, max_model_len: int) -> None:
    """A prompt has to fit in the context, and an answer that was asked for beside it.

    Args:
        field: where the prompts came from.
        name: where `max_tokens` came from.

    Raises:
        ContextLengthError: they do not; naming the field.
    """
    longest = max(map(len, prompts), default=0)
    if longest >= max_model_len:
        raise ContextLengthError(
            f"The prompt has {longest} tokens and the context {max_model_len}, which leaves no room for an answer: "
            f"shorten {field} to at most {max_model_len - 1} tokens",
            param=field,
        )
    if max_tokens is not None and max_model_len < longest + max_tokens:
        raise ContextLengthError(
            f"The prompt has {longest} tokens and {name} is {max_tokens}, together {longest + max_tokens}, and the context has "
            f"{max_model_len}: lower {name} to at most {max_model_len - longest}, or leave it out",
            param=name,
        )


def cut_prompt(ids: list[int], limit: int | None, most: int) -> list[int]:
    """The last `limit` ids; -1 stands for `most`. Raises InvalidRequestError for another number under 1."""
    if limit is None:
        return ids
    if limit != -1 and not 1 <= limit < 2**31:
        raise InvalidRequestError(f"truncate_prompt_tokens is -1 or from 1 to {2**31 - 1}, got {limit}", param="truncate_prompt_tokens")
    return ids[-max(1, most if limit == -1 else limit) :]


async def deltas(engine: EngineClient, job: Job) -> AsyncIterator[Outputs]:
    """What is new of all answers, as often as there is something; closing the iterator aborts what is unfinished.

    Raises:
        JaxpagedError: one of the prompts was refused or failed, which ends the others.
    """
    params = msgspec.structs.replace(job.params, output_kind=RequestOutputKind.DELTA)
    group = QueueGroup()
    streams = [_start(engine, job, index, params, group) for index in range(len(job.prompts))]
    try:
        if len(streams) == 1:
            async for output in streams[0]:
                check_output(output)
                yield [(0, output)]
        else:
            async for outputs in _together(streams):
                for _, output in outputs:
                    check_output(output)
                yield outputs
    finally:
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]


async def last_outputs(engine: EngineClient, job: Job) -> list[RequestOutput]:
    """The last output of each prompt. Being cancelled aborts them. Raises as `deltas`."""
    params, group = msgspec.structs.replace(job.params, output_kind=RequestOutputKind.FINAL_ONLY), QueueGroup()

    async def last(index: int) -> RequestOutput:
        async with contextlib.aclosing(_start(engine, job, index, params, group)) as stream:  # type: ignore[type-var]
            async for output in stream:
                check_output(output)
                if output.finished:
                    return output
        raise AssertionError("a request ended without a last output")

    return await all_or_none([last(index) for index in range(len(job.prompts))])


async def all_or_none[T](works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, at the same time; the first that raises ends the others. Being cancelled ends them all."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless_client_leaves[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection.

    Args:
        receive: of a request whose body was read.
        work: what the client waits for.

    Raises:
        ClientLeftError: the client has left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(client_has_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        await end_tasks(working, leaving)


async def client_has_left(receive: Receive) -> None:
    """Returns when the client closes the connection, or its answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs, and returns when all has ended; what they raise is nobody's."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def end_of(outputs: Sequence[RequestOutput]) -> End:
    """How a request with these last outputs ended."""
    reasons = {completion.finish_reason for output in outputs for completion in output.outputs}
    return End.LENGTH if FinishReason.LENGTH in reasons else End.STOP


def request_name(job_id: str, index: int) -> str:
    """What the engine knows the request of one prompt by."""
    return f"{job_id}-{index}"


def prompt_of(job: Job, index: int) -> dict[str, Any]:
    """A prompt as the engine takes it."""
    prompt: dict[str, Any] = {"prompt_token_ids": job.prompts[index]}
    return prompt if job.cache_salt is None else {**prompt, "cache_salt": job.cache_salt}


def _start(engine: EngineClient, job: Job, index: int, params: SamplingParams, group: QueueGroup) -> AsyncIterator[RequestOutput]:
    return aiter(engine.generate(prompt_of(job, index), params, request_name(job.request_id, index), priority=job.priority, group=group))


async def _together(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncIterator[Outputs]:
    """What comes at the same time, together. An engine tells all prompts of a step at once, so that is one list for each step."""
    waiting = {asyncio.ensure_future(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            outputs = []
            for task in done:
                index = waiting.pop(task)
                output = task.result()
                outputs.append((index, output))
                if not output.finished:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
            outputs.sort(key=lambda pair: pair[0])
            yield outputs
    finally:
        await end_tasks(*waiting)


async def _next(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return await anext(stream)


def check_output(output: RequestOutput) -> None:
    """Raises what a request that ended without all its answers is to be told."""
    if not output.finished:
        return
    if output.error is not None:
        raise _ERRORS.get(output.error_code or "", RequestFailedError)(output.error)
    if any(completion.finish_reason is FinishReason.ABORT for completion in output.outputs):
        raise RequestAbortedError("The request was ended by an operator, or because the server stops: ask again a little later")
