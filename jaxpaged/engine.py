"""The engine: takes requests, runs steps, gives back outputs. `Engine.step` is the whole of it."""

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxpaged import events
from jaxpaged.clocks import REAL_CLOCKS, Clocks, Timer
from jaxpaged.config import SchedulerConfig
from jaxpaged.embeddings import pooled_rows
from jaxpaged.engine_control import EngineControl
from jaxpaged.engine_events import EngineEvents, StepTimes
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.model_runner import Runner
from jaxpaged.open_requests import OpenRequests
from jaxpaged.page_manager import PageManager
from jaxpaged.pool_map import PoolCopy, copy_pool
from jaxpaged.request import Request, RequestOutput
from jaxpaged.sampling import NO_ID
from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.scheduler import DEFAULT_POLICY, Scheduler
from jaxpaged.slot_rows import slot_row
from jaxpaged.step_packer import StepPacker
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.told_logprobs import ScoredSpan, SpanLogprobs, TokenLogprobs, ToldRows


class _StartedStep(NamedTuple):
    """A step on the device.

    Attributes:
        ids: its results to come.
        scored: tokens of prompts of which they tell how likely they were.
        started_s: monotonic time at which it was handed over.
        run_s: seconds that the handing over took.
    """

    step: ScheduledStep
    ids: Any
    scored: list[ScoredSpan]
    bucket_tokens: int
    num_tokens: int
    schedule_s: float
    pack_s: float
    started_s: float
    run_s: float


class Engine:
    """Owns the scheduler, the runner and every unfinished request. One thread at a time may call it.

    Args:
        runner: the model on its device.
        tokenizer: for the text of answers.
        enable_prefix_caching: share full pages between requests that begin alike.
        takes_whole_prompts: see `Scheduler`.
        max_in_flight: steps that may run before the oldest is taken in; 2 hides the host's work behind the device's.
        policy: priorities, targets and limits of the queue.
        sink: takes every event; whoever made it closes it.
        clocks: where times come from.

    Attributes:
        control: what operators may ask: pause, sleep, reset of the prefix cache.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        enable_prefix_caching: bool = True,
        takes_whole_prompts: bool = False,
        max_in_flight: int = 1,
        policy: SchedulerConfig = DEFAULT_POLICY,
        sink: events.Sink,
        clocks: Clocks = REAL_CLOCKS,
    ) -> None:
        self.runner, self.clocks = runner, clocks
        self._emit = EngineEvents(sink, clocks)
        self.pages = PageManager(runner.num_pages, runner.page_size, enable_prefix_caching, runner.kv_groups)
        limits = runner.limits
        self.scheduler = Scheduler(
            self.pages,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            clock=clocks.monotonic,
            policy=policy,
            token_buckets=limits.token_buckets,
            takes_whole_prompts=takes_whole_prompts,
        )
        self._packer = StepPacker(runner.layout_for(1), runner.vocab)
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_StartedStep] = deque()
        self._requests = OpenRequests(self.scheduler, tokenizer, self._emit, clocks)
        self._last_done_s = 0.0
        self._fatal: str | None = None
        self._is_closed = False
        self.control = EngineControl(self, self._emit)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step runs."""
        return bool(len(self._requests) or self._in_flight)

    @property
    def has_step(self) -> bool:
        """Whether `step` has something to do now. A paused engine waits for `resume`, or until `next_deadline_s`."""
        scheduler = self.scheduler
        if self._in_flight:
            return True
        if not len(self._requests):
            return False
        if not (scheduler.is_paused or scheduler.is_drained):
            return True
        return self.next_deadline_s is not None and self.next_deadline_s <= self.clocks.monotonic()

    @property
    def next_deadline_s(self) -> float | None:
        """When, by the monotonic clock, a request may next reach a time limit."""
        return self.scheduler.next_deadline_s

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def unfinished_ids(self) -> list[str]:
        """Their ids."""
        return self._requests.ids

    @property
    def num_in_flight(self) -> int:
        """Steps on the device."""
        return len(self._in_flight)

    @property
    def is_dead(self) -> bool:
        """Whether a step failed in a way that nothing can go on after."""
        return self._fatal is not None

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: it can never run (too long for context or pool), or its id is in use.
            QueueFullError: too much waits already.
            EngineDeadError: the engine has failed or was closed.
        """
        self._emit.received(request.request_id, len(request.prompt_token_ids))
        try:
            self.check_alive()
            self._requests.add(request)
        except JaxpagedError as error:
            self._emit.rejected(request.request_id, error)
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it is and frees its pages; None when it is not (or no longer) there."""
        output = self._requests.abort(request_id)
        if output is not None:
            self._emit.load_changed(self.scheduler, self.pages)
        return output

    def reject(self, request_id: str, error: JaxpagedError, *, num_prompt_tokens: int = 0) -> None:
        """Notes that a request was turned away before it came here."""
        self._emit.received(request_id, num_prompt_tokens)
        self._emit.rejected(request_id, error)

    def step(self) -> list[RequestOutput]:
        """One step of every request that fits.

        Returns:
            What is new, for requests whose `output_kind` asks for it.

        Raises:
            EngineDeadError: something failed that nothing can go on after; `drain_failed` ends every unfinished request.
        """
        self.check_alive()
        try:
            self._step()
        except Exception as error:  # not the device's alone: after a bug of ours, too, nobody may wait for ever
            self.die(error)
            raise EngineDeadError(f"the engine stopped: {self._fatal}") from error
        return self._requests.collect()

    def _step(self) -> None:
        """Schedule, pack, run; then, of the oldest step if enough are running: update, detokenize, emit."""
        if self._requests.expire() and not self._in_flight:
            self._emit.load_changed(self.scheduler, self.pages)
        started = self._start_step()
        if started is not None:
            self._in_flight.append(started)
        if self._in_flight and (started is None or len(self._in_flight) >= self._max_in_flight):
            self._take_in(self._in_flight.popleft())
        if not self.has_work:
            self.pages.check()

    def _start_step(self) -> "_StartedStep | None":
        timer = Timer(self.clocks.monotonic)
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._requests.note_scheduled(step)
        schedule_s = timer.lap()
        num_tokens = sum(row.num_tokens for row in step.rows)
        layout = self.runner.layout_for(num_tokens)
        blob = self._packer.pack(step.rows, layout)
        for row in self._packer.newcomers:
            self.runner.write_slot(row.slot, slot_row(row.sequence, self.runner.vocab))
        pack_s, started_s = timer.lap(), timer.last
        ids = self.runner.run(layout, blob)
        # Handing over takes no time on a device, and the whole step on a runner that waits.
        return _StartedStep(step, ids, self._packer.scored, layout.num_tokens, num_tokens, schedule_s, pack_s, started_s, timer.lap())

    def _take_in(self, started: "_StartedStep") -> None:
        timer = Timer(self.clocks.monotonic)
        step = started.step
        ids = np.asarray(started.ids)
        device_s = timer.lap()
        # Steps run one after another: this one began when the one before it was done, or when it was started.
        self.scheduler.observe(step, timer.last - max(started.started_s, self._last_done_s))
        self._last_done_s = timer.last
        if started.scored:
            ids = self._take_prompt_logprobs(started, ids)
        awaited = [row for row, token_id in zip(step.rows, ids, strict=False) if row.is_awaited and (row.samples or token_id == NO_ID)]
        self._requests.take_pooled(pooled_rows(step, started.ids))
        self._fail_rows_without_id(step, ids)
        num_before = _num_output_tokens(awaited)
        self.scheduler.update(step, ids[: len(step.rows)].tolist())
        update_s = timer.lap()
        self._requests.take_tokens(awaited, self._token_logprobs(started))
        self._emit.step_finished(
            step,
            awaited,
            bucket_tokens=started.bucket_tokens,
            num_tokens=started.num_tokens,
            num_output_tokens=_num_output_tokens(awaited) - num_before,
            scheduler=self.scheduler,
            pages=self.pages,
            times=StepTimes(started.schedule_s, started.pack_s, started.run_s + device_s, update_s, timer.lap()),
        )

    def _take_prompt_logprobs(self, started: "_StartedStep", ids: np.ndarray) -> np.ndarray:
        """Returns the ids, without those of rows whose prompts came out as NaN."""
        ids = ids.copy()
        arrays = ToldRows.of(np.asarray(started.ids.prompt))
        for span in started.scored:
            logprobs = SpanLogprobs.of(span, arrays)
            if not logprobs.is_usable:
                ids[span.row_index] = NO_ID
            elif span.row.is_awaited:
                self._requests.take_prompt_logprobs(span, logprobs)
        return ids

    @staticmethod
    def _token_logprobs(started: "_StartedStep") -> dict[str, TokenLogprobs]:
        """By sequence, for those that want them; nothing is fetched for the others."""
        wanting = [
            (index, row.sequence)
            for index, row in enumerate(started.step.rows)
            if row.samples and row.sequence.request.params.logprobs is not None
        ]
        if not wanting:
            return {}
        chosen, rank, top_ids, top = ToldRows.of(np.asarray(started.ids.logprobs))
        return {
            sequence.request_id: TokenLogprobs(float(chosen[index]), int(rank[index]), top_ids[index].tolist(), top[index].tolist())
            for index, sequence in wanting
        }

    def _fail_rows_without_id(self, step: ScheduledStep, ids: np.ndarray) -> None:
        """Chunks of prompts as well: a NaN spoils earlier positions of its step too, and their pages must not be found by others."""
        for row, token_id in zip(step.rows, ids, strict=False):
            if token_id == NO_ID and row.is_awaited:
                self._requests.fail_row(row, "the model gave no usable number for the next token (NaN, or every token is forbidden)")

    def die(self, error: Exception) -> None:
        """Stops the engine for good: a step failed, or whoever drives it did. A second call does nothing."""
        if self._fatal is None:
            self._fatal = str(error) or type(error).__name__
            self._emit.health("dead", f"{type(error).__name__}: {error}")

    def drain_failed(self) -> list[RequestOutput]:
        """After a fatal error: ends every unfinished request with it and returns their last outputs, and those the failed step had made."""
        self._in_flight.clear()
        outputs = self._requests.end_all(self._fatal or "the engine stopped")
        self._emit.load_changed(self.scheduler, self.pages)
        return outputs

    def probe(self) -> None:
        """Runs the smallest program over padding alone, unless a step runs that shows as much, or the engine is paused.

        Raises:
            EngineDeadError: as `step` does.
        """
        self.check_alive()
        if self._in_flight or self.control.is_paused:
            return
        layout = self.runner.layout_for(1)
        try:
            np.asarray(self.runner.run(layout, self._packer.pack([], layout)))
        except Exception as error:  # the pool was handed over, and may be gone
            self.die(error)
            raise EngineDeadError(f"the engine stopped: {self._fatal}") from error

    def copy_pool(self) -> PoolCopy:
        """Who holds which page."""
        return copy_pool(self.scheduler, self.pages)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages; see `EngineControl.reset_prefix_cache`."""
        self.control.reset_prefix_cache()

    def close(self) -> None:
        """Aborts what is unfinished and gives the device's memory back; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for request_id in self.unfinished_ids:
                self.abort(request_id)
        finally:  # whatever is wrong with the books of a dead engine, its memory comes back
            for started in self._in_flight:
                with contextlib.suppress(Exception):  # what a step failed with has been told already
                    np.asarray(started.ids)
            self._in_flight.clear()
            self.runner.close()
            self._emit.stopped(self._fatal or "")

    def check_alive(self) -> None:
        """Raises EngineDeadError when it has failed or was closed."""
        if self._fatal is not None:
            raise EngineDeadError(f"the engine stopped: {self._fatal}")
        if self._is_closed:
            raise EngineDeadError("the engine is closed")


def _num_output_tokens(rows: Iterable[ScheduledRow]) -> int:
    """Tokens that the answers of these rows have; a request for hidden states has none."""
    return sum(row.sequence.num_output_tokens for row in rows if row.sequence.request.pooling is None)
