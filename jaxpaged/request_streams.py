"""From a task's call to the outputs that it reads: tokenized elsewhere, queued with the engine's driver, read from a mailbox."""

import asyncio
import concurrent.futures
import functools
from collections.abc import AsyncIterator, Callable

import msgspec

from jaxpaged.engine_driver import Arrival, EngineDriver
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.intake import Intake, Prompt
from jaxpaged.mailbox import Mailbox
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import Request, RequestOutput, RequestOutputKind, SamplingParams


class RequestStreams:
    """Opens the streams of outputs of requests.

    Args:
        driver: of the engine.
        intake: makes requests of prompts.
        tokenizer_pool: where it does so, off the event loop.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, driver: EngineDriver, intake: Intake, tokenizer_pool: concurrent.futures.Executor, clock: Callable[[], float]
    ) -> None:
        self._driver, self._intake, self._tokenizer_pool, self._clock = driver, intake, tokenizer_pool, clock

    def outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        kind: RequestOutputKind | None,
        group: QueueGroup | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the outputs of one request.

        Args:
            prompt: what to continue.
            params: None takes the model's defaults.
            request_id: None makes one.
            priority: lower goes first.
            kind: which outputs are made; None: as `params` say.
            group: requests that the limits of the queue are asked for once.

        Raises:
            InvalidRequestError: a bad prompt, parameter or id.
            QueueFullError: too much waits already.
            EngineDeadError: the engine stopped, or was closed.
        """
        params = params or self._intake.default_params
        if kind is not None and isinstance(params, SamplingParams):
            params = msgspec.structs.replace(params, output_kind=kind)
        make = functools.partial(self._intake.request, prompt, params, request_id=request_id, priority=priority)
        return self.outputs_of(make, request_id, group)

    async def outputs_of(
        self, make: Callable[..., Request], request_id: str | None, group: QueueGroup | None = None
    ) -> AsyncIterator[RequestOutput]:
        """As `outputs`, of the request that `make` gives, which is told the time as `arrival_s`."""
        with self._driver.arriving(request_id) as arrival:
            request = await self.made(make, request_id)
            mailbox = Mailbox(asyncio.get_running_loop(), is_delta=request.params.output_kind is RequestOutputKind.DELTA)
            self._driver.add(request, mailbox, arrival, group)
        is_finished = False
        try:
            while not is_finished:
                output = await mailbox.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                self._driver.forget(request.request_id, mailbox)

    async def made(self, make: Callable[..., Request], request_id: str | None) -> Request:
        """The request that `make` gives, which is not queued yet; that it was refused is noted. Raises as `outputs`."""
        making = self._start(functools.partial(make, arrival_s=self._clock()))
        try:
            return await making
        except JaxpagedError as error:
            self._driver.reject(self._intake.usable_id(request_id), error)
            raise

    async def beside[T](self, make: Callable[[], T]) -> T:
        """What `make` gives, made in the tokenizer pool. Raises what it raises, and EngineDeadError when nothing is served any more."""
        return await self._start(make)

    def _start[T](self, make: Callable[[], T]) -> "asyncio.Future[T]":
        self._driver.check_health()
        try:
            return asyncio.get_running_loop().run_in_executor(self._tokenizer_pool, make)
        except RuntimeError:  # another thread has closed the engine since the check
            raise EngineDeadError("the engine is closed") from None

    async def last_output_of(self, request: Request, search: Arrival, group: QueueGroup | None = None) -> RequestOutput:
        """Queues a request that gives one output, a step of a search, and waits for it. Raises as `outputs`."""
        mailbox = Mailbox(asyncio.get_running_loop(), is_delta=False)
        with self._driver.arriving(request.request_id) as arrival:
            self._driver.add(request, mailbox, arrival, None if request.is_let_in else group, search)
        output = None
        try:
            output = await mailbox.get()
        finally:
            if output is None:
                self._driver.forget(request.request_id, mailbox)
        return output
