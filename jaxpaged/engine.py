"""The engine: takes requests, runs steps, gives back outputs. `Engine.step` is the whole of it."""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxpaged import events
from jaxpaged.clocks import REAL_CLOCKS, Clocks
from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import EngineDeadError, InvalidRequestError, JaxpagedError
from jaxpaged.model_runner import Runner
from jaxpaged.output import Answer
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason, Request, RequestOutput
from jaxpaged.sampling import NO_ID
from jaxpaged.scheduler import DEFAULT_POLICY, ScheduledRow, ScheduledStep, Scheduler, Sequence
from jaxpaged.step_packer import StepPacker
from jaxpaged.tokenizer import Tokenizer


class _Timer:
    """Splits a step's wall time into its parts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.last = clock, clock()

    def lap(self) -> float:
        now = self._clock()
        lap, self.last = now - self.last, now
        return lap


class _StartedStep(NamedTuple):
    """A step on the device.

    Attributes:
        ids: its results to come.
        started_s: monotonic time at which it was handed over.
        run_s: seconds that the handing over took.
    """

    step: ScheduledStep
    ids: Any
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
        max_in_flight: steps that may run before the oldest is taken in; 2 hides the host's work behind the device's.
        policy: priorities, targets and limits of the queue.
        sink: takes every event; whoever made it closes it.
        clocks: where times come from.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        enable_prefix_caching: bool = True,
        max_in_flight: int = 1,
        policy: SchedulerConfig = DEFAULT_POLICY,
        sink: events.Sink,
        clocks: Clocks = REAL_CLOCKS,
    ) -> None:
        self.runner, self.tokenizer, self._sink, self.clocks = runner, tokenizer, sink, clocks
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
        )
        self._packer = StepPacker(runner.layout_for(1), runner.vocab)
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_StartedStep] = deque()
        self._answers: dict[str, Answer] = {}
        self._outputs: list[RequestOutput] = []  # of the step that runs
        self._num_steps = 0
        self._last_done_s = 0.0
        self._fatal: str | None = None
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step runs."""
        return bool(self._answers or self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    @property
    def is_dead(self) -> bool:
        """Whether a step failed in a way that nothing can go on after."""
        return self._fatal is not None

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: it can never run (too long for context or pool), or its id is in use.
            EngineDeadError: the engine has failed or was closed.
        """
        num_prompt = len(request.prompt_token_ids)
        self._emit(events.RequestReceived(time_s=self.clocks.wall(), request_id=request.request_id, num_prompt_tokens=num_prompt))
        try:
            self._check_alive()
            if request.request_id in self._answers:
                raise InvalidRequestError(f"The request id {request.request_id!r} is already in use", param="request_id")
            answer = Answer(request, Sequence(request), self.tokenizer)
            self.scheduler.add(answer.sequence)
        except JaxpagedError as error:
            self._emit(
                events.RequestRejected(time_s=self.clocks.wall(), request_id=request.request_id, code=error.code, message=error.message)
            )
            raise
        self._answers[request.request_id] = answer
        self._emit(
            events.RequestQueued(
                time_s=self.clocks.wall(),
                request_id=request.request_id,
                num_prompt_tokens=num_prompt,
                max_tokens=answer.sequence.max_total_tokens - num_prompt,
                num_waiting=self.scheduler.num_waiting,
            )
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it is and frees its pages; None when it is not (or no longer) there."""
        answer = self._answers.get(request_id)
        if answer is None:
            return None
        self.scheduler.abort(request_id)
        return self._end(answer)

    def step(self) -> list[RequestOutput]:
        """One step of every request that fits.

        Returns:
            What is new, for requests whose `output_kind` asks for it.

        Raises:
            EngineDeadError: something failed that nothing can go on after; `drain_failed` ends every unfinished request.
        """
        self._check_alive()
        try:
            self._step()
        except Exception as error:  # not the device's alone: after a bug of ours, too, nobody may wait for ever
            self.die(error)
            raise EngineDeadError(f"the engine stopped: {self._fatal}") from error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self) -> None:
        """Schedule, pack, run; then, of the oldest step if enough are running: update, detokenize, emit."""
        for sequence in self.scheduler.expire():
            answer = self._answers[sequence.request_id]
            answer.error = sequence.message
            self._outputs.append(self._end(answer))
        started = self._start_step()
        if started is not None:
            self._in_flight.append(started)
        if self._in_flight and (started is None or len(self._in_flight) >= self._max_in_flight):
            self._take_in(self._in_flight.popleft())
        if not self.has_work:
            self.pages.check()

    def _start_step(self) -> "_StartedStep | None":
        timer = _Timer(self.clocks.monotonic)
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._note_scheduled(step)
        schedule_s = timer.lap()
        num_tokens = sum(row.num_tokens for row in step.rows)
        layout = self.runner.layout_for(num_tokens)
        blob = self._packer.pack(step.rows, layout)
        pack_s, started_s = timer.lap(), timer.last
        ids = self.runner.run(layout, blob)
        # Handing over takes no time on a device, and the whole step on a runner that waits.
        return _StartedStep(step, ids, layout.num_tokens, num_tokens, schedule_s, pack_s, started_s, timer.lap())

    def _take_in(self, started: "_StartedStep") -> None:
        timer = _Timer(self.clocks.monotonic)
        step = started.step
        ids = np.asarray(started.ids)
        device_s = timer.lap()
        # Steps run one after another: this one began when the one before it was done, or when it was started.
        self.scheduler.observe(step, timer.last - max(started.started_s, self._last_done_s))
        self._last_done_s = timer.last
        awaited = [row for row, token_id in zip(step.rows, ids, strict=False) if row.is_awaited and (row.samples or token_id == NO_ID)]
        self._fail_rows_without_id(step, ids)
        self.scheduler.update(step, ids[: len(step.rows)].tolist())
        update_s = timer.lap()
        self._detokenize(awaited)
        detokenize_s = timer.lap()
        self._num_steps += 1
        num_decodes = sum(1 for row in step.rows if row.samples and row.start >= row.sequence.num_prompt_tokens)
        self._emit(
            events.StepFinished(
                time_s=self.clocks.wall(),
                step=self._num_steps,
                bucket_tokens=started.bucket_tokens,
                num_tokens=started.num_tokens,
                num_prefill_tokens=started.num_tokens - num_decodes,
                num_decode_tokens=num_decodes,
                num_seqs=len(step.rows),
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                num_preempted=len(step.preempted),
                num_pages_total=self.pages.num_usable,
                num_pages_in_use=self.pages.num_in_use,
                num_pages_cached=self.pages.num_cached_idle,
                schedule_s=started.schedule_s,
                pack_s=started.pack_s,
                device_s=started.run_s + device_s,
                update_s=update_s,
                detokenize_s=detokenize_s,
                prefix_queries_tokens=step.prefix_queries_tokens,
                prefix_hits_tokens=step.prefix_hits_tokens,
                prefill_recompute_tokens=step.prefill_recompute_tokens,
                decision=step.decision,
            )
        )

    def die(self, error: Exception) -> None:
        """Stops the engine for good: a step failed, or whoever drives it did. A second call does nothing."""
        if self._fatal is None:
            self._fatal = str(error) or type(error).__name__
            self._emit(events.HealthChanged(time_s=self.clocks.wall(), state="dead", message=f"{type(error).__name__}: {error}"))

    def drain_failed(self) -> list[RequestOutput]:
        """After a fatal error: ends every unfinished request with it and returns their last outputs, and those the failed step had made."""
        outputs, self._outputs = self._outputs, []
        self._in_flight.clear()
        for answer in list(self._answers.values()):
            self._fail(answer, self._fatal or "the engine stopped")
            outputs.append(self._end(answer))
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages that nobody uses."""
        self.pages.reset_prefix_cache()

    def close(self) -> None:
        """Aborts what is unfinished and gives the device's memory back; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for request_id in list(self._answers):
                self.abort(request_id)
        finally:  # whatever is wrong with the books of a dead engine, its memory comes back
            for started in self._in_flight:
                with contextlib.suppress(Exception):  # what a step failed with has been told already
                    np.asarray(started.ids)
            self._in_flight.clear()
            self.runner.close()
            self._emit(events.EngineStopped(time_s=self.clocks.wall(), message=self._fatal or ""))

    def _check_alive(self) -> None:
        if self._fatal is not None:
            raise EngineDeadError(f"the engine stopped: {self._fatal}")
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def _note_scheduled(self, step: ScheduledStep) -> None:
        for sequence in step.preempted:
            self._answers[sequence.request_id].metrics.num_preemptions = sequence.num_preemptions
            self._emit(
                events.RequestPreempted(
                    time_s=self.clocks.wall(),
                    request_id=sequence.request_id,
                    num_pages_freed=sequence.num_pages_freed,
                    num_computed_tokens=sequence.num_lost_tokens,
                )
            )
        now = self.clocks.monotonic()
        for sequence in step.admitted:
            metrics = self._answers[sequence.request_id].metrics
            if metrics.first_scheduled_s is None:
                metrics.first_scheduled_s = now
                metrics.num_cached_tokens = sequence.num_cached_tokens
            self._emit(
                events.RequestScheduled(
                    time_s=self.clocks.wall(),
                    request_id=sequence.request_id,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_cached_tokens=sequence.num_cached_tokens,
                    num_pages=len(sequence.pages),
                    queue_s=metrics.first_scheduled_s - metrics.arrival_s,
                    num_preemptions=sequence.num_preemptions,
                )
            )

    def _fail_rows_without_id(self, step: ScheduledStep, ids: np.ndarray) -> None:
        """Chunks of prompts as well: a NaN spoils earlier positions of its step too, and their pages must not be found by others."""
        for row, token_id in zip(step.rows, ids, strict=False):
            if token_id == NO_ID and row.is_awaited:
                answer = self._answers[row.sequence.request_id]
                self._fail(answer, "the model gave no usable number for the next token (NaN, or every token is forbidden)")

    def _detokenize(self, rows: list[ScheduledRow]) -> None:
        now = self.clocks.monotonic()
        for row in rows:
            sequence = row.sequence
            answer = self._answers[sequence.request_id]
            if answer.error is None:
                self._take_token(answer, now)
            if sequence.is_finished:
                self._outputs.append(self._end(answer))
            elif answer.is_due():
                self._outputs.append(answer.output())

    def _take_token(self, answer: Answer, now: float) -> None:
        sequence = answer.sequence
        if answer.metrics.first_token_s is None:
            answer.metrics.first_token_s = now
            ttft_s = now - answer.metrics.arrival_s
            self._emit(events.RequestFirstToken(time_s=self.clocks.wall(), request_id=sequence.request_id, ttft_s=ttft_s))
        try:
            stop = answer.take_token()
        except Exception as error:  # a fault in one request's text must not reach the others
            self._fail(answer, f"the answer's text could not be made: {error}")
            return
        if stop is not None:
            self.scheduler.finish(sequence, FinishReason.STOP, stop)

    def _fail(self, answer: Answer, message: str) -> None:
        answer.error = message
        self.scheduler.finish(answer.sequence, FinishReason.ERROR)

    def _end(self, answer: Answer) -> RequestOutput:
        """The last output of a request whose sequence has finished."""
        sequence = answer.sequence
        del self._answers[sequence.request_id]
        now = self.clocks.monotonic()
        metrics = answer.metrics
        metrics.finished_s = now
        try:
            answer.finish_text()
        except Exception as error:
            self._fail(answer, f"the answer's text could not be made: {error}")
        output = answer.output()
        assert sequence.finish_reason is not None
        self._emit(
            events.RequestFinished(
                time_s=self.clocks.wall(),
                request_id=sequence.request_id,
                reason=sequence.finish_reason.value,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_output_tokens=sequence.num_output_tokens,
                num_cached_tokens=metrics.num_cached_tokens,
                num_pages_freed=sequence.num_pages_freed,
                num_preemptions=metrics.num_preemptions,
                ttft_s=metrics.ttft_s,
                e2e_s=now - metrics.arrival_s,
                queue_s=(now if metrics.first_scheduled_s is None else metrics.first_scheduled_s) - metrics.arrival_s,
                message=answer.error,
            )
        )
        return output

    def _emit(self, event: events.Event) -> None:
        self._sink(event)
