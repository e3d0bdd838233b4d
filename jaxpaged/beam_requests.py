"""A beam search as requests: at each step each beam asks for one token, with the likeliest ids beside it.

The request of a beam has the whole beginning for its prompt, and finds the full pages of it in the prefix cache: those that
the beam shares with others, and its own from the step before.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxpaged.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from jaxpaged.errors import InvalidRequestError
from jaxpaged.interrupts import Interrupt
from jaxpaged.request import FinishReason, Request, RequestOutput
from jaxpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxpaged.engine import Engine
    from jaxpaged.engine_turns import EngineTurns


class BeamRequests:
    """The requests of one search.

    Args:
        request: what the beams' requests are made from, with the prompt (`Intake.beam_request`).
        params: how to search.
        most_prompt_tokens: the longest prompt that the engine takes; beams that become longer end there.

    Attributes:
        is_let_in: the limits of the queue are not asked, or not again.
    """

    def __init__(self, request: Request, params: BeamSearchParams, most_prompt_tokens: int) -> None:
        num_prompt = len(request.prompt_token_ids)
        # A prompt that is too long is for the engine to refuse.
        max_tokens = max(1, min(params.max_tokens, most_prompt_tokens + 1 - num_prompt))
        self._request = request
        self._search = BeamSearch(request.prompt_token_ids, params, request.eos_token_ids, max_tokens)
        self._broken: RequestOutput | None = None
        self._num_cached_tokens: int | None = None
        self.is_let_in = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to ask."""
        return self._search.is_done or self._broken is not None

    def next_requests(self) -> list[Request]:
        """One for each beam."""
        step, now, is_let_in = self._search.num_tokens, time.monotonic(), self.is_let_in
        self.is_let_in = True
        return [
            msgspec.structs.replace(
                self._request,
                request_id=f"{self._request.request_id}#{step}.{index}",
                prompt_token_ids=history,
                arrival_s=now,
                is_let_in=is_let_in,
            )
            for index, history in enumerate(self._search.histories)
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """The last outputs of `next_requests`, in that order. One that was aborted or has failed ends the search."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = outputs[0].num_cached_tokens
        for output in outputs:
            if output.error is not None or output.outputs[0].finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                self._broken = output
                return
        told = []
        for output in outputs:
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            told.append(logprobs[0])
        self._search.advance(told)

    def output(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        """What was found."""
        broken = self._broken
        if broken is None:
            found = self._search.output(tokenizer)
        else:
            found = self._search.output(tokenizer, given_up=broken.outputs[0].finish_reason, error=broken.error)
        return msgspec.structs.replace(
            found, error_code=None if broken is None else broken.error_code, num_cached_tokens=self._num_cached_tokens or 0
        )


def check_concurrency(limit: Any) -> None:
    """Raises InvalidRequestError for a number of prompts at the same time that is none, or less than one; None is fine."""
    if limit is not None and (limit.__class__ is not int or limit < 1):
        raise InvalidRequestError(f"concurrency_limit must be an integer of at least 1, got {limit!r:.40}", param="concurrency_limit")


def run_searches(
    searches: Sequence[BeamRequests],
    engine: "Engine",
    turns: "EngineTurns",
    *,
    limit: int,
    interrupt: Interrupt,
    bar: Callable[[int | None, float], None] | None,
) -> None:
    """Runs searches to their ends, within a turn; none waits for another, unless there are more than `limit`.

    Raises:
        QueueFullError: too much waits already for those that begin at once.
        EngineDeadError: the engine stopped.
    """
    waiting, mail = deque(searches), list[RequestOutput]()
    asked: dict[str, BeamRequests] = {}
    answers: dict[BeamRequests, dict[str, RequestOutput | None]] = {}
    num_done, num_tokens, begun = 0, 0, time.monotonic()

    def ask(search: BeamRequests) -> None:
        requests = search.next_requests()
        answers[search] = dict.fromkeys(request.request_id for request in requests)
        for request in requests:
            engine.add(request)
            asked[request.request_id] = search
            turns.mail[request.request_id] = mail

    try:
        while waiting or answers:
            while waiting and len(answers) < limit:
                ask(waiting.popleft())
            for search in waiting:  # once the first ones have been let in, the rest will not be turned away halfway
                search.is_let_in = True
            interrupt.check()
            turns.step()
            outputs, mail[:] = list(mail), []
            for output in outputs:
                search = asked.pop(output.request_id)
                del turns.mail[output.request_id]
                answers[search][output.request_id] = output
                taken = [answer for answer in answers[search].values() if answer is not None]
                if len(taken) < len(answers[search]):
                    continue
                del answers[search]
                search.take(taken)
                num_tokens += len(taken)
                if search.is_done:
                    num_done += 1
                else:
                    ask(search)
            if outputs and bar is not None:
                bar(num_done, num_tokens / (time.monotonic() - begun))
    finally:
        for request_id in asked:
            del turns.mail[request_id]
            engine.abort(request_id)
        if bar is not None:
            bar(None, 0.0)


async def all_or_none[T](awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all. When one raises, or the task is cancelled, the others are cancelled first."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
