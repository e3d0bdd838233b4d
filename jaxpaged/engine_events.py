"""What the engine says of itself: one method per thing that can happen, and the event made from it.

Received, rejected, queued, first token and finished are said once of a request, however many samples it has. Scheduled and
preempted tell of pages, so they are said of each sample, by the id of its sequence ("x#1" is the second sample of "x").
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.errors import JaxpagedError
from jaxpaged.output import OpenRequest
from jaxpaged.page_manager import PageManager
from jaxpaged.request import RequestMetrics
from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence

GAP_BOUNDS_S: Final = np.array(events.TOKEN_GAP_BOUNDS_S)


class StepTimes(NamedTuple):
    """Where a step's time went, in seconds."""

    schedule_s: float
    pack_s: float
    device_s: float
    update_s: float
    detokenize_s: float


class EngineEvents:
    """Makes events and hands them to the sink.

    Args:
        sink: takes every event.
        clocks: where times come from.
    """

    def __init__(self, sink: events.Sink, clocks: Clocks) -> None:
        self.sink, self._clocks = sink, clocks
        self._num_steps = 0
        self._health = "ready"

    def received(self, request_id: str, num_prompt_tokens: int) -> None:
        """A request is at the door."""
        self._emit(events.RequestReceived(time_s=self._clocks.wall(), request_id=request_id, num_prompt_tokens=num_prompt_tokens))

    def rejected(self, request_id: str, error: JaxpagedError) -> None:
        """It was turned away."""
        self._emit(events.RequestRejected(time_s=self._clocks.wall(), request_id=request_id, code=error.code, message=error.message))

    def queued(self, opened: OpenRequest, num_waiting: int) -> None:
        """It was let in and waits."""
        sequence = opened.answers[0].sequence
        self._emit(
            events.RequestQueued(
                time_s=self._clocks.wall(),
                request_id=opened.request.request_id,
                num_prompt_tokens=sequence.num_prompt_tokens,
                max_tokens=sequence.max_total_tokens - sequence.num_prompt_tokens,
                num_waiting=num_waiting,
            )
        )

    def preempted(self, sequence: Sequence) -> None:
        """A sample has lost its pages."""
        self._emit(
            events.RequestPreempted(
                time_s=self._clocks.wall(),
                request_id=sequence.request_id,
                num_pages_freed=sequence.num_pages_freed,
                num_computed_tokens=sequence.num_lost_tokens,
            )
        )

    def scheduled(self, sequence: Sequence, metrics: RequestMetrics) -> None:
        """A sample was admitted, or admitted again."""
        assert metrics.first_scheduled_s is not None
        self._emit(
            events.RequestScheduled(
                time_s=self._clocks.wall(),
                request_id=sequence.request_id,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=sequence.num_cached_tokens,
                num_pages=len(sequence.pages),
                queue_s=metrics.first_scheduled_s - metrics.arrival_s,
                num_preemptions=sequence.num_preemptions,
            )
        )

    def first_token(self, opened: OpenRequest) -> None:
        """The first token of any of its samples is there."""
        ttft_s = opened.metrics.ttft_s
        assert ttft_s is not None
        self._emit(events.RequestFirstToken(time_s=self._clocks.wall(), request_id=opened.request.request_id, ttft_s=ttft_s))

    def finished(self, opened: OpenRequest) -> None:
        """All its samples have ended."""
        metrics = opened.metrics
        assert metrics.finished_s is not None
        self._emit(
            events.RequestFinished(
                time_s=self._clocks.wall(),
                request_id=opened.request.request_id,
                reason=opened.finish_reason.value,
                num_prompt_tokens=len(opened.request.prompt_token_ids),
                num_output_tokens=opened.num_output_tokens,
                num_cached_tokens=metrics.num_cached_tokens,
                num_pages_freed=sum(answer.sequence.num_pages_freed for answer in opened.answers),
                num_preemptions=metrics.num_preemptions,
                ttft_s=metrics.ttft_s,
                e2e_s=metrics.finished_s - metrics.arrival_s,
                queue_s=(metrics.finished_s if metrics.first_scheduled_s is None else metrics.first_scheduled_s) - metrics.arrival_s,
                message=opened.error,
                num_samples=len(opened.answers),
                num_longest_tokens=opened.num_longest_tokens,
            )
        )

    def step_finished(
        self,
        step: ScheduledStep,
        taken: Iterable[ScheduledRow],
        *,
        bucket_tokens: int,
        num_tokens: int,
        num_output_tokens: int,
        scheduler: Scheduler,
        pages: PageManager,
        times: StepTimes,
    ) -> None:
        """A step was taken in, and of it the ids of the rows `taken`, which gave `num_output_tokens` to answers."""
        self._num_steps += 1
        gaps, gaps_s = self._token_gaps(taken)
        num_decodes = sum(1 for row in step.rows if row.samples and row.start >= row.sequence.num_prompt_tokens)
        self._emit(
            events.StepFinished(
                time_s=self._clocks.wall(),
                step=self._num_steps,
                bucket_tokens=bucket_tokens,
                num_tokens=num_tokens,
                num_prefill_tokens=num_tokens - num_decodes,
                num_decode_tokens=num_decodes,
                num_seqs=len(step.rows),
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_preempted=len(step.preempted),
                num_pages_total=pages.num_usable,
                num_pages_in_use=pages.num_in_use,
                num_pages_cached=pages.num_cached_idle,
                prefix_queries_tokens=step.prefix_queries_tokens,
                prefix_hits_tokens=step.prefix_hits_tokens,
                prefill_recompute_tokens=step.prefill_recompute_tokens,
                token_gaps=gaps,
                token_gaps_s=gaps_s,
                num_output_tokens=num_output_tokens,
                decision=step.decision,
                **times._asdict(),
            )
        )

    def _token_gaps(self, taken: Iterable[ScheduledRow]) -> tuple[tuple[int, ...], float]:
        """See `events.StepFinished`."""
        now_s, gaps_s = self._clocks.monotonic(), []
        for row in taken:
            if row.samples:
                last_s, row.sequence.last_token_s = row.sequence.last_token_s, now_s
                if last_s is not None:
                    gaps_s.append(now_s - last_s)
        if not gaps_s:
            return (), 0.0
        # All at once: one by one, 32 gaps cost ten times as much.
        counts = np.bincount(np.searchsorted(GAP_BOUNDS_S, gaps_s), minlength=len(GAP_BOUNDS_S) + 1)
        return tuple(counts.tolist()), sum(gaps_s)

    def load_changed(self, scheduler: Scheduler, pages: PageManager) -> None:
        """Requests or pages came or went apart from a step."""
        self._emit(
            events.LoadChanged(
                time_s=self._clocks.wall(),
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_pages_total=pages.num_usable,
                num_pages_in_use=pages.num_in_use,
                num_pages_cached=pages.num_cached_idle,
            )
        )

    def health(self, state: str, message: str = "") -> None:
        """The engine's health moved; said once for each move."""
        if state == self._health:
            return
        self._health = state
        self._emit(events.HealthChanged(time_s=self._clocks.wall(), state=state, message=message))

    def stopped(self, message: str) -> None:
        """The engine closed."""
        self._emit(events.EngineStopped(time_s=self._clocks.wall(), message=message))

    def _emit(self, event: events.Event) -> None:
        self.sink(event)
