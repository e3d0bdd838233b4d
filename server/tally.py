"""The counts of one request while its outputs come, and the beginning of its stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from litestar import Request, Response

from jaxpaged.engine_client import EngineClient
from jaxpaged.request import FinishReason, RequestMetrics
from server.errors import ClientLeftError
from server.generation import Job, Outputs, client_has_left, deltas, end_tasks
from server.ledger import End, RequestRecord
from server.protocol.generation import Usage, make_usage
from server.requests import Asked
from server.service import Service
from server.streaming import EventStream, Telling


class Tally:
    """Counts tokens for the usage, the timings and the books.

    Args:
        record: of the request.
        job: what the engine was asked for.
        is_streamed: outputs come token by token, if nothing lags.
    """

    def __init__(self, record: RequestRecord, job: Job, *, is_streamed: bool) -> None:
        self._record, self._job, self._is_streamed = record, job, is_streamed
        self._num_prompt = sum(map(len, job.prompts))
        self._num_output = 0
        self._num_cached = [0] * len(job.prompts)
        self._metrics: dict[int, RequestMetrics] = {}
        self._is_cut = False
        record.num_prompt_tokens = self._num_prompt

    def take(self, outputs: Outputs) -> None:
        """Counts what came."""
        record = self._record
        for index, output in outputs:
            for completion in output.outputs:
                number = len(completion.token_ids)
                self._num_output += number
                if number > 1 and self._is_streamed:
                    record.num_merged += number - 1
                if completion.finish_reason is FinishReason.LENGTH:
                    self._is_cut = True
            self._num_cached[index] = output.num_cached_tokens
            self._metrics[index] = output.metrics
            if record.first_token_s is None:
                record.first_token_s = output.metrics.first_token_s
        record.num_output_tokens = self._num_output

    def finish(self, end: End | None = None) -> None:
        """All answers are there, and were told."""
        self._record.end = end or (End.LENGTH if self._is_cut else End.STOP)

    def usage(self) -> Usage:
        """The counts so far."""
        return make_usage(self._num_prompt, self._num_output, sum(self._num_cached))

    def timing_values(self) -> tuple[list[RequestMetrics], int, int, int]:
        """Arguments of `make_timings`."""
        return list(self._metrics.values()), self._num_prompt, self._num_output, sum(self._num_cached)


async def started_stream(
    request: Request[Any, Any, Any],
    engine: EngineClient,
    job: Job,
    asked: Asked[Any],
    telling: Telling,
    service: Service,
    at_end: Callable[[], None] = lambda: None,
) -> Response[bytes]:
    """A stream whose first output is there, or that has waited so long that its client is to see a sign of life.

    What the engine refuses is so an answer with its own status, and no stream with an error in it. Once there is a stream, `at_end` is
    called when it is over.

    Raises:
        JaxpagedError: the engine refuses a prompt, or one of them failed.
        ClientLeftError: the client has left.
    """
    outputs = deltas(engine, job)
    first = asyncio.ensure_future(_first(outputs))
    leaving = asyncio.ensure_future(client_has_left(request.receive))
    is_handed_on = False
    try:
        await asyncio.wait((first, leaving), timeout=service.config.server.ping_interval_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()
        elif leaving.done():
            raise ClientLeftError
        is_handed_on = True
    finally:
        await end_tasks(leaving)
        if not is_handed_on:
            await end_tasks(first)
            await outputs.aclose()  # type: ignore[attr-defined]

    async def release() -> None:
        await end_tasks(first)
        await outputs.aclose()  # type: ignore[attr-defined]
        at_end()

    return EventStream(telling, _Resumed(first, outputs), service.config.server, asked.headers, release)


async def _first(outputs: AsyncIterator[Outputs]) -> Outputs:
    return await anext(outputs)


class _Resumed:
    """An iteration whose first step has been begun already; after it, the iteration itself goes on."""

    def __init__(self, first: "asyncio.Future[Outputs]", outputs: AsyncIterator[Outputs]) -> None:
        self._first: asyncio.Future[Outputs] | None = first
        self._outputs = outputs

    def __aiter__(self) -> "_Resumed":
        return self

    def __anext__(self) -> Awaitable[Outputs]:
        first, self._first = self._first, None
        return anext(self._outputs) if first is None else first
