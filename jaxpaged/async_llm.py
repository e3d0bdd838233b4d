"""The Python API for programs with an event loop: one engine thread steps, any number of tasks wait.

Who owns what: the engine belongs to its thread and is reached by commands alone; a `_Mailbox` belongs to the task that waits for
one request, and the engine thread fills it through the task's loop.
"""

import asyncio
import concurrent.futures
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from jaxpaged.api import open_own_sinks, settle_config
from jaxpaged.config import Config
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.events import Sink
from jaxpaged.host_limits import prepare_process
from jaxpaged.intake import Messages, Prompt
from jaxpaged.metrics import EngineMetrics, Metric
from jaxpaged.request import RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.start import start_engine
from jaxpaged.tokenizer import Tokenizer

NUM_TOKENIZER_THREADS = 2


@runtime_checkable
class EngineClient(Protocol):
    """What a server needs of an engine."""

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None) -> "Generation": ...

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]: ...

    def abort(self, request_id: str) -> None: ...

    def check_health(self) -> None: ...

    def get_tokenizer(self) -> Tokenizer: ...


class _Mailbox:
    """Outputs of one request on their way from the engine thread to a task; what is not read yet is merged, so it stays small."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: JaxpagedError | None = None

    def put(self, output: RequestOutput, *, is_delta: bool) -> None:
        """Called on the loop."""
        waiting = self._output
        self._output = _merge(waiting, output) if is_delta and waiting is not None else output
        self._arrived.set()

    def fail(self, error: JaxpagedError) -> None:
        """Called on the loop."""
        self._error = error
        self._arrived.set()

    async def get(self) -> RequestOutput:
        """Waits for what is new. Raises what the request failed with."""
        await self._arrived.wait()
        self._arrived.clear()
        output, self._output = self._output, None
        if output is not None:
            if self._error is not None:
                self._arrived.set()
            return output
        assert self._error is not None
        raise self._error


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas of one request as one."""
    before, after = first.outputs[0], second.outputs[0]
    joined = msgspec.structs.replace(after, text=before.text + after.text, token_ids=before.token_ids + after.token_ids)
    return msgspec.structs.replace(second, outputs=[joined])


class Generation:
    """A request that has not begun: await it for the last output, or iterate over all of them. Each use is a request of its own."""

    def __init__(self, start: Callable[[bool], AsyncIterator[RequestOutput]]) -> None:
        self._start = start

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._last().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._start(False)

    async def _last(self) -> RequestOutput:
        async for output in self._start(True):
            if output.finished:
                return output
        raise AssertionError("a request ended without a last output")


class AsyncLLM:
    """A model that serves many tasks at once, in this process; options as for `LLM`.

    Loading blocks the caller. Requests may come from several event loops. `close()` ends what is unfinished with `abort`.

    Raises:
        JaxpagedError: the options, the model or the memory; one sentence.
    """

    def __init__(
        self, model: str | None = None, *, config: Config | None = None, sinks: Sequence[Sink] | None = None, **kwargs: Any
    ) -> None:
        self.config = settle_config(model, config, kwargs)
        prepare_process(self.config)
        self._own_sinks = open_own_sinks(self.config, is_quiet=False) if sinks is None else []
        self._metrics = EngineMetrics()
        try:
            self._engine, self._intake = start_engine(self.config, (*self._own_sinks, *(sinks or ()), self._metrics))
        except BaseException:
            self._close_sinks()
            raise
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mailboxes: dict[str, tuple[_Mailbox, bool]] = {}
        self._is_closing = False
        self._close_lock = threading.Lock()
        self._death: str | None = None
        self._tokenizer_pool = concurrent.futures.ThreadPoolExecutor(NUM_TOKENIZER_THREADS, "jaxpaged-tokenizer")
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None) -> Generation:
        """Completes a prompt: `await` gives the last output, `async for` all of them as `output_kind` says.

        Cancelling the task, or closing the iteration, aborts the request.

        Raises:
            InvalidRequestError: a bad prompt or parameter, when awaited.
            EngineDeadError: the engine stopped.
        """

        def start(is_awaited: bool) -> AsyncIterator[RequestOutput]:
            kind = RequestOutputKind.FINAL_ONLY if is_awaited else None
            return self._outputs(prompt, sampling_params, request_id, kind)

        return Generation(start)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields what is new as it comes; a slow reader gets several tokens at once. Raises as `generate` does."""
        return self._outputs(prompt, sampling_params, request_id, RequestOutputKind.DELTA)

    async def chat_prompt(
        self, messages: Messages, *, add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> list[int]:
        """Token ids of a conversation, for `generate` and `stream`. Raises ChatTemplateError, or EngineDeadError when closed."""
        self.check_health()
        make = functools.partial(
            self._intake.chat_prompt, messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_pool, make)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; nothing happens when it is not there."""

        def command() -> None:
            output = self._engine.abort(request_id)
            if output is not None:
                self._deliver([output])

        self._commands.put(command)

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine no longer serves."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._is_closing or not self._thread.is_alive():
            raise EngineDeadError("the engine is closed")

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What unset sampling fields take."""
        return self._intake.default_params

    def get_metrics(self) -> list[Metric]:
        """Counters and gauges so far, by name."""
        return self._metrics.snapshot()

    def close(self) -> None:
        """Aborts what is unfinished, stops the thread and gives weights and page pool back; a second call does nothing."""
        with self._close_lock:
            if not self._is_closing:
                self._is_closing = True
                self._commands.put(lambda: None)
                self._thread.join()
                self._tokenizer_pool.shutdown(wait=True)
                self._close_sinks()

    def shutdown(self) -> None:
        """vLLM's name for `close`."""
        self.close()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    async def _outputs(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, kind: RequestOutputKind | None
    ) -> AsyncIterator[RequestOutput]:
        arrival_s = time.monotonic()
        self.check_health()
        params = params or self._intake.default_params
        if kind is not None and isinstance(params, SamplingParams):
            params = msgspec.structs.replace(params, output_kind=kind)
        loop = asyncio.get_running_loop()
        make = functools.partial(self._intake.request, prompt, params, arrival_s=arrival_s, request_id=request_id)
        try:
            making = loop.run_in_executor(self._tokenizer_pool, make)
        except RuntimeError:  # another thread has closed the engine since the check
            raise EngineDeadError("the engine is closed") from None
        request = await making
        mailbox = _Mailbox(loop)
        is_delta = request.params.output_kind is RequestOutputKind.DELTA

        def command() -> None:
            try:
                self._engine.add(request)
            except JaxpagedError as error:
                self._on_loop(loop, functools.partial(mailbox.fail, error))
            except Exception as error:
                self._on_loop(loop, functools.partial(mailbox.fail, EngineDeadError(str(error))))
                raise
            else:
                self._mailboxes[request.request_id] = (mailbox, is_delta)

        self._commands.put(command)
        if self._is_closing:  # the thread may have passed its last look at the commands
            raise EngineDeadError("the engine is closed")
        is_finished = False
        try:
            while not is_finished:
                output = await mailbox.get()
                is_finished = output.finished
                yield output
        finally:
            if not is_finished:
                self._forget(request.request_id, mailbox)

    def _forget(self, request_id: str, mailbox: _Mailbox) -> None:
        """Aborts a request whose task has left, unless the id has come to belong to another one."""

        def command() -> None:
            if self._mailboxes.get(request_id, (None, False))[0] is mailbox:
                del self._mailboxes[request_id]
                self._engine.abort(request_id)

        self._commands.put(command)

    def _run(self) -> None:
        """The engine thread: commands first, then a step, until closed or dead."""
        engine = self._engine
        while not self._is_closing and self._death is None:
            self._obey(is_idle=not engine.has_work)
            if not engine.has_work or self._is_closing or self._death is not None:
                continue
            try:
                self._deliver(engine.step())
            except Exception as error:
                self._die(error)
        while not self._is_closing:
            self._obey(is_idle=True)
        self._obey(is_idle=False)
        for request_id in list(self._mailboxes):
            output = engine.abort(request_id)
            if output is not None:
                self._deliver([output])
        engine.close()
        self._obey(is_idle=False)

    def _obey(self, *, is_idle: bool) -> None:
        """Runs the commands that are there; an idle engine waits for one."""
        try:
            if is_idle:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return
        except Exception as error:  # a bug of ours: nobody may wait for ever
            self._die(error)

    def _die(self, error: Exception) -> None:
        self._death = self._death or str(error) or type(error).__name__
        self._engine.die(error)
        try:
            # A request that ended in the failing step keeps its end.
            self._deliver([output for output in self._engine.drain_failed() if output.error is None])
        except Exception as second:  # books that are wrong already; whoever waits is told all the same
            self._death = f"{self._death} (and then {type(second).__name__}: {second})"
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox, _ in mailboxes.values():
            self._on_loop(mailbox.loop, functools.partial(mailbox.fail, EngineDeadError(self._death)))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hands outputs to their mailboxes, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for output in outputs:
            entry = self._mailboxes.get(output.request_id)
            if entry is None:
                continue
            mailbox, is_delta = entry
            if output.finished:
                del self._mailboxes[output.request_id]
            by_loop.setdefault(mailbox.loop, []).append(functools.partial(mailbox.put, output, is_delta=is_delta))
        for loop, puts in by_loop.items():
            self._on_loop(loop, functools.partial(_call_all, puts))

    def _on_loop(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:
            if not loop.is_closed():
                raise

    def _close_sinks(self) -> None:
        for sink in self._own_sinks:
            sink.close()


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


AsyncLLMEngine = AsyncLLM
"""vLLM's other name of the same class."""
