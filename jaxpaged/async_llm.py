"""The Python API for programs with an event loop: one engine thread steps, any number of tasks wait."""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.api import open_own_sinks, settle_config
from jaxpaged.beam_requests import BeamRequests, all_or_none
from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams
from jaxpaged.config import Config
from jaxpaged.embeddings import EmbeddingRequestOutput, check_pooling, embedding_of
from jaxpaged.engine_client import EngineClient, Generation
from jaxpaged.engine_control import Pause, PauseMode, check_flag, wake_tags
from jaxpaged.engine_thread import EngineThread
from jaxpaged.errors import InvalidRequestError, JaxpagedError
from jaxpaged.events import Sink
from jaxpaged.host_limits import prepare_process
from jaxpaged.intake import Continuation, Messages, Prompt
from jaxpaged.interrupts import held_interrupts
from jaxpaged.metrics import EngineMetrics, Metric
from jaxpaged.pool_map import PoolCopy
from jaxpaged.profiler import Profiler
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import Pooling, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.request_streams import RequestStreams
from jaxpaged.scoring import ContinuationScore, check_gives_logprobs, score_of
from jaxpaged.start import start_engine
from jaxpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxpaged.distributed.leader import Leader

__all__ = ["AsyncLLM", "AsyncLLMEngine", "EngineClient", "Generation"]

NUM_TOKENIZER_THREADS = 2


class AsyncLLM:
    """A model that serves many tasks at once, in this process; options as for `LLM`.

    vLLM's constructor of an engine's arguments has its counterpart in keyword arguments: `AsyncLLM("smollm2-135m", max_model_len=2048)`.
    Loading blocks the caller. Requests may come from several event loops. `close()` ends what is unfinished with `abort`.
    `leader` is for `jaxpaged serve`: the other processes that share the model.

    Raises:
        JaxpagedError: the options, the model or the memory; one sentence.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        sinks: Sequence[Sink] | None = None,
        leader: "Leader | None" = None,
        **kwargs: Any,
    ) -> None:
        self.config = settle_config(model, config, kwargs)
        prepare_process(self.config)
        self._own_sinks = open_own_sinks(self.config, is_quiet=False) if sinks is None else []
        self._metrics = EngineMetrics()
        start = start_engine if leader is None else functools.partial(start_engine, leader=leader)
        try:
            self._engine, self._intake = start(self.config, (*self._own_sinks, *(sinks or ()), self._metrics))
        except BaseException:
            self._close_sinks()
            raise
        self._thread = EngineThread(self._engine)
        self._profiler = Profiler()
        self._is_closed = False
        self._close_lock = threading.Lock()
        self._tokenizer_pool = concurrent.futures.ThreadPoolExecutor(NUM_TOKENIZER_THREADS, "jaxpaged-tokenizer")

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> Generation:
        """Completes a prompt: `await` gives the last output, `async for` all of them as `output_kind` says.

        Cancelling the task, or closing the iteration, aborts the request. Of two requests the one of the lower `priority` goes first.
        The limits of the queue are asked for the first request of a `group`; the others go in as it has room.

        Raises:
            InvalidRequestError: a bad prompt or parameter, when awaited.
            EngineDeadError: the engine stopped.
        """

        def start(is_awaited: bool) -> AsyncIterator[RequestOutput]:
            kind = RequestOutputKind.FINAL_ONLY if is_awaited else None
            return self._outputs(prompt, sampling_params, request_id, priority, kind, group)

        return Generation(start)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what is new as it comes; a slow reader gets several tokens at once. Raises as `generate` does."""
        return self._outputs(prompt, sampling_params, request_id, priority, RequestOutputKind.DELTA, group)

    async def score(
        self,
        prompt: Prompt,
        continuation: Continuation,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> ContinuationScore:
        """How likely a continuation of a prompt is; see `LLM.score`. Cancelling the task aborts the request."""
        check_gives_logprobs(self.config)
        make = functools.partial(self._intake.scoring_request, prompt, continuation, request_id=request_id, priority=priority)
        outputs = [output async for output in self._streams().outputs_of(make, request_id, group)]
        return score_of(outputs[-1])

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> BeamSearchOutput:
        """The likeliest answers to a prompt; see `LLM.beam_search`. Cancelling the task, or `abort` by its id, ends the search.

        Args:
            prompt: as for `generate`.
            params: the width, the length and how answers are ordered.
            request_id: a label; the requests of the steps are called "X#1.0", "X#1.1" and so on.
            priority: lower goes first.
            group: as for `generate`.
        """
        check_gives_logprobs(self.config, "beam_search")
        make = functools.partial(self._intake.beam_request, prompt, params, request_id=request_id, priority=priority)
        streams = self._streams()
        with self._thread.arriving(request_id) as arrival:
            first = await streams.made(make, request_id)
            search, arrival.request_id = BeamRequests(first, params, self._engine.scheduler.most_prompt_tokens), first.request_id
            while not search.is_done:
                search.take(await all_or_none(streams.last_output_of(request, arrival, group) for request in search.next_requests()))
                arrival.has_begun = True
        return search.output(self._intake.tokenizer)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> EmbeddingRequestOutput:
        """A prompt as a vector; see `LLM.embed`. Cancelling the task aborts the request."""
        check_pooling(pooling, normalize)
        make = functools.partial(self._intake.embedding_request, prompt, pooling, request_id=request_id, priority=priority)
        outputs = [output async for output in self._streams().outputs_of(make, request_id, group)]
        return embedding_of(outputs[-1], normalize=normalize)

    async def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, for `generate` and `stream`; the chat template sees `variables` as well.

        Raises ChatTemplateError, or EngineDeadError when closed.
        """
        return await self._streams().beside(
            functools.partial(
                self._intake.chat_prompt,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        )

    async def prompt_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, as `generate` makes them. Raises InvalidRequestError, or EngineDeadError when closed."""
        return await self._streams().beside(functools.partial(self._intake.prompt_ids, prompt, add_special_tokens=add_special_tokens))

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        return self._engine.runner.limits.max_model_len

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is, still being tokenized or running; nothing happens when there is none of that id.

        Raises:
            InvalidRequestError: no string.
        """
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"request_id is a string, got {request_id!r:.40}", param="request_id")
        self._thread.abort(request_id)

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine no longer serves."""
        self._thread.check_health()

    async def probe(self) -> None:
        """Runs a step program over nothing and returns when it is done, so that the device is known to answer; leaves no trace.

        A paused engine has nothing run. Raises EngineDeadError.
        """
        await self._thread.call(lambda engine: engine.probe())

    async def pool_copy(self) -> PoolCopy:
        """Who holds which page, taken between two steps. Raises EngineDeadError."""
        return await self._thread.call(lambda engine: engine.copy_pool())

    def fail_open(self, error: JaxpagedError) -> None:
        """Ends every open request with `error`, which its task raises; any thread may call it, also while a step hangs."""
        self._thread.fail_open(error)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forgets all cached pages; `reset_running_requests`: those that run give theirs back and are computed again. True: done."""
        check_flag("reset_running_requests", reset_running_requests)
        await self._thread.call(lambda engine: engine.control.reset_prefix_cache(reset_running_requests=reset_running_requests))
        return True

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Computes nothing until `resume`; requests that come meanwhile wait. Returns when the engine stands still.

        Args:
            mode: what becomes of the requests that are there: "abort" ends them all; "wait" computes those that have begun to their
                ends; "keep" stops them where they are, to go on after `resume`.
            clear_cache: forget all cached pages; requests that were kept are computed again.

        Cancelled before the engine stands still, the call has never been: the engine goes on.

        Raises:
            InvalidRequestError: an unknown mode, or no bool.
        """
        await self._thread.pause(Pause(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Goes on after `pause`; nothing happens without one. Raises EnginePausedError while asleep."""
        await self._thread.call(lambda engine: engine.control.resume())

    async def is_paused(self) -> bool:
        """Whether requests wait for `resume` or `wake_up`."""
        return await self._thread.call(lambda engine: engine.control.is_paused)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, and gives memory back until `wake_up`; requests that come meanwhile wait.

        Args:
            level: 0 only pauses; 1 moves the weights to host memory and drops the page pool; 2 drops both, and the weights are
                read from their files again.
            mode: as for `pause`.

        Raises:
            InvalidRequestError: an unknown level or mode.
            EnginePausedError: somebody resumed before the engine had come to rest.
        """
        await self._thread.pause(Pause.to_sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings back what `tags` name ("weights", "kv_cache", "scheduling"; None: all); goes on once all is there.

        An engine that was paused apart from the sleep stays paused. Nothing happens when it is awake, or without tags.

        Raises:
            InvalidRequestError: an unknown tag.
            MemoryBudgetError: there is no room now; the engine sleeps on.
        """
        wanted = wake_tags(tags)
        await self._thread.call(lambda engine: engine.control.wake_up(wanted))

    async def is_sleeping(self) -> bool:
        """Whether `sleep` was called and `wake_up` has not ended it."""
        return await self._thread.call(lambda engine: engine.control.is_sleeping)

    async def start_profile(self, folder: Path) -> None:
        """Begins a trace by JAX's profiler; see `Profiler.start`."""
        await asyncio.to_thread(self._profiler.start, folder)

    async def stop_profile(self) -> None:
        """Writes the trace; see `Profiler.stop`."""
        await asyncio.to_thread(self._profiler.stop)

    pause_generation, resume_generation = pause, resume
    """vLLM's names."""

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
        """Aborts what is unfinished, stops the thread and gives weights and page pool back; a second call does nothing.

        Ctrl-C waits until that is done; pressed twice it does not, and another call goes on where this one was left.
        """
        with held_interrupts(), self._close_lock:
            if not self._is_closed:
                self._thread.close()
                self._tokenizer_pool.shutdown(wait=True)
                self._profiler.close()
                self._close_sinks()
                self._is_closed = True

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

    def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        kind: RequestOutputKind | None,
        group: QueueGroup | None,
    ) -> AsyncIterator[RequestOutput]:
        return self._streams().outputs(prompt, params, request_id, priority, kind, group)

    def _streams(self) -> RequestStreams:
        return RequestStreams(self._thread, self._intake, self._tokenizer_pool, self._engine.clocks.monotonic)

    def _close_sinks(self) -> None:
        for sink in self._own_sinks:
            sink.close()


AsyncLLMEngine = AsyncLLM
"""vLLM's other name of the same class."""
