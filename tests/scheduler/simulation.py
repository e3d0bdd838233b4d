"""Scheduler, page manager and shadow pool on a virtual clock, with every check there is after each step.

The order of the queue, the choice of victims and the counts are worked out here a second time, in the plainest way.
"""

from collections import deque
from collections.abc import Callable

from jaxpaged.config import SchedulerConfig
from jaxpaged.kv_groups import FULL, KVGroup
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason, Request
from jaxpaged.scheduler import ScheduledStep, Scheduler, Sequence, SequenceStatus
from tests.scheduler.begun import Begun
from tests.scheduler.outcome import Outcome
from tests.scheduler.recomputation import Recomputation
from tests.scheduler.shadow import NO_ID, ShadowRunner
from tests.scheduler.table_model import solo_answer


def default_cost(step: ScheduledStep) -> float:
    """Seconds that a step takes on the virtual device."""
    return 0.01 + 0.001 * sum(row.num_tokens for row in step.rows)


class Simulation:
    """One engine's host side.

    Args:
        num_usable: pages.
        depth: steps that are in flight while the next one is scheduled; 0 is an engine without overlap.
        cost: seconds of a step.
        checks_steps: look at everything after every step; off only to measure times.
    """

    def __init__(
        self,
        *,
        num_usable: int,
        page_size: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 1000,
        enable_prefix_caching: bool = True,
        groups: tuple[KVGroup, ...] = (FULL,),
        depth: int = 0,
        policy: SchedulerConfig | None = None,
        token_buckets: tuple[int, ...] = (),
        cost: Callable[[ScheduledStep], float] = default_cost,
        checks_steps: bool = True,
    ) -> None:
        self.policy = SchedulerConfig(reserve_pages=0) if policy is None else policy
        self.now = 0.0
        self.pages = PageManager(num_usable + 1, page_size, enable_prefix_caching, groups)
        self.scheduler = Scheduler(
            self.pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            clock=lambda: self.now,
            policy=self.policy,
            token_buckets=token_buckets,
        )
        self.runner = ShadowRunner(self.pages)
        self.outcome = Outcome()
        self.ended: dict[str, Sequence] = {}
        self.num_added = 0
        self._depth, self._cost, self._checks_steps = depth, cost, checks_steps
        self._in_flight: deque[ScheduledStep] = deque()
        self._unfinished: dict[Sequence, int] = {}  # in order of arrival
        self._admissions: dict[Sequence, int] = {}  # of those that run
        self._admitted_once: set[Sequence] = set()
        self._recomputation = Recomputation()
        self._last_token_s: dict[Sequence, float] = {}
        self._num_admissions = self._drought = 0
        self._begun = Begun()
        self._was_sliding = False  # pages behind windows were still held

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._unfinished and not self._in_flight

    def add(self, request: Request) -> Sequence:
        """Queues a request."""
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        self.num_added += 1
        self._unfinished[sequence] = self.num_added
        self.outcome.num_prompt_tokens += sequence.num_prompt_tokens
        return sequence

    def abort(self, request_id: str) -> None:
        """Ends a request; must find it exactly once."""
        sequence = self.scheduler.abort(request_id)
        assert sequence is not None
        assert self.scheduler.abort(request_id) is None
        self.outcome.num_aborted += 1
        self._end(sequence)

    def finish(self, sequence: Sequence, stop: str) -> None:
        """Ends a sequence as a stop string does."""
        self.scheduler.finish(sequence, FinishReason.STOP, stop)
        self._end(sequence)

    def fail_all(self) -> None:
        """The device is lost: every request ends with an error, and no step comes back."""
        for sequence in list(self._unfinished):
            self.scheduler.finish(sequence, FinishReason.ERROR)
            self._end(sequence)
        self._in_flight.clear()
        self.scheduler.check()

    def reset_prefix_cache(self) -> None:
        """New weights, and what was computed with the old ones is not to be shared."""
        self.runner.change_weights()
        self.scheduler.reset_prefix_cache()

    def evict_running(self) -> None:
        """An operator takes all pages; it does not count as a preemption."""
        running = self.scheduler.sequences[: self.scheduler.num_running]
        counts = [sequence.num_preemptions for sequence in running]
        evicted = self.scheduler.evict_running()
        assert sorted(map(id, evicted)) == sorted(map(id, running))
        assert [sequence.num_preemptions for sequence in running] == counts
        for sequence in evicted:
            del self._admissions[sequence]
            self._recomputation.evicted(sequence)
        self.scheduler.check()

    def step(self, between: Callable[[], None] | None = None, fails: frozenset[int] = frozenset()) -> ScheduledStep | None:
        """One turn of the engine's loop. `between` runs after a step was scheduled and before results are taken in.

        Returns:
            What was scheduled in this turn, if anything.
        """
        scheduler = self.scheduler
        self._expire()
        queue, was_paused = self._queue(), scheduler.is_paused
        self._was_sliding = self._is_sliding()
        if scheduler.is_draining:
            queue = self._begun.of(queue)
        step = scheduler.schedule()
        assert step is None or not was_paused, "something was scheduled in a pause"
        if step is None:
            if not self._in_flight:
                assert not self._unfinished or scheduler.is_paused or scheduler.is_drained, "there are requests and nothing runs"
                return None
        else:
            if self._checks_steps:
                self._check_step(step)
                self._check_order(step, queue)
                self._check_guarded()
                if step.admitted or step.preempted:  # after the others when they are taken in
                    scheduler.check()
            self._begun.note(step)
            self._count(step)
            self.runner.dispatch(step)
            self._in_flight.append(step)
        if between is not None:
            between()
        if step is None or len(self._in_flight) > self._depth:
            self._take_in(fails)
        return step

    def run(self, *, max_steps: int) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if self.is_idle:
                break
            self.step()
        assert self.is_idle, f"unfinished after {max_steps} steps: {self.scheduler.sequences}"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing runs: every page is free or cached, and all are free after a flush."""
        self.scheduler.check()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.pages.num_in_use == 0
        self.scheduler.reset_prefix_cache()
        assert self.pages.num_free == self.pages.num_usable
        self.pages.check([])

    def check_answers(self) -> None:
        """Every answer equals its solo run; one that was cut short from outside is the beginning of it."""
        max_model_len = self.scheduler.max_model_len
        num_slots = max(
            num_tokens for num_tokens in range(max_model_len + 1) if self.pages.arithmetic.peak_pages(num_tokens) <= self.pages.num_usable
        )
        for sequence in self.ended.values():
            answer, reason = solo_answer(sequence.request, max_model_len=max_model_len, num_slots=num_slots)
            is_cut = sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or isinstance(sequence.stop_reason, str)
            if is_cut:
                assert answer[: sequence.num_output_tokens] == sequence.output_token_ids, f"{sequence} says something else"
            else:
                assert (answer, reason) == (sequence.output_token_ids, sequence.finish_reason), f"{sequence} says something else"

    def _expire(self) -> None:
        """Exactly those end whose time is over."""
        queue_s, request_s = self.policy.queue_timeout_s, self.policy.request_timeout_s
        late = {
            sequence
            for sequence in self._unfinished
            if (request_s is not None and self.now >= sequence.queued_s + request_s)
            or (queue_s is not None and self.now >= sequence.queued_s + queue_s and sequence not in self._admitted_once)
        }
        expired = self.scheduler.expire()
        assert set(expired) == late, "another's time was over"
        for sequence in expired:
            self.outcome.num_expired += 1
            assert sequence.message
            self._end(sequence)

    def _take_in(self, fails: frozenset[int]) -> None:
        """The device ends a step, and the host learns of it."""
        step = self._in_flight.popleft()
        ids = self.runner.execute(fails)
        seconds = self._cost(step)
        self.now += seconds
        self.scheduler.observe(step, seconds)
        awaited = [row.is_awaited for row in step.rows]
        for row, token_id, is_awaited in zip(step.rows, ids, awaited, strict=True):
            if is_awaited and row.samples and token_id == NO_ID:
                self.outcome.num_failed += 1
                self.scheduler.finish(row.sequence, FinishReason.ERROR)
                self._end(row.sequence)
        lengths = [len(row.sequence.token_ids) for row in step.rows]
        finished = self.scheduler.update(step, ids)
        for row, length, token_id, is_awaited in zip(step.rows, lengths, ids, awaited, strict=True):
            sequence = row.sequence
            is_taken = is_awaited and row.samples and token_id != NO_ID
            assert len(sequence.token_ids) == length + is_taken, f"{sequence} took an id that was not its own, or none"
            if is_taken:
                self._note_time(sequence)
            self.outcome.num_late_rows += not is_awaited
        assert finished == [sequence for sequence in dict.fromkeys(row.sequence for row in step.rows) if sequence in finished]
        for sequence in finished:
            self._end(sequence)
            self.outcome.num_finished += 1
        if self._checks_steps:
            self.scheduler.check()

    def _note_time(self, sequence: Sequence) -> None:
        self.outcome.num_output_tokens += 1
        if sequence.num_output_tokens == 1:
            self.outcome.ttfts_s.append(self.now - sequence.queued_s)
        else:
            self.outcome.gaps_s.append(self.now - self._last_token_s[sequence])
        self._last_token_s[sequence] = self.now

    def _end(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.ended, f"{sequence} ended twice"
        assert sequence.is_finished
        assert sequence.finish_reason is not None
        assert not any(sequence.tables)
        assert sequence.slot == -1
        del self._unfinished[sequence]
        self._admissions.pop(sequence, None)
        self._recomputation.ended(sequence)
        self.ended[sequence.request_id] = sequence

    def _queue(self) -> list[Sequence]:
        """Who waits, in the order in which they should be let in."""
        held = self.scheduler._samples.held
        waiting = [
            sequence
            for sequence in self._unfinished
            if sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED) and sequence not in held
        ]
        return sorted(waiting, key=lambda sequence: sequence.priority * self.policy.ageing_s + sequence.queued_s)

    def _check_step(self, step: ScheduledStep) -> None:
        rows, scheduler = step.rows, self.scheduler
        assert rows
        assert len({row.sequence.request_id for row in rows}) == len(rows) <= scheduler.max_num_seqs
        assert len({row.slot for row in rows}) == len(rows), "two rows share a slot"
        assert sum(row.num_tokens for row in rows) <= scheduler.max_num_batched_tokens
        assert [row.num_tokens == 1 for row in rows] == sorted((row.num_tokens == 1 for row in rows), reverse=True)
        for row in rows:
            sequence, end = row.sequence, row.start + row.num_tokens
            assert row.num_tokens >= 1
            assert (row.slot, row.epoch) == (sequence.slot, sequence.epoch)
            assert 0 <= row.slot < scheduler.max_num_seqs
            assert end == sequence.num_computed_tokens
            assert row.samples == (end == sequence.num_tokens - row.samples), f"{sequence} samples before its last token"
            # An id that is asked for now is at most the last one that is allowed.
            assert sequence.num_tokens <= sequence.max_total_tokens, f"{sequence} gets too long"
            assert row.takes_from_slot == (row.start >= len(sequence.token_ids))
            assert not row.takes_from_slot or row.num_tokens == 1
            assert not (row.takes_from_slot and sequence.needs_host), f"{sequence} goes on without the host"
            for group, table in zip(self.pages.groups, sequence.tables, strict=True):
                # Exactly as many pages as the tokens take, at multiples of the page size too.
                assert len(table) == -(-end // self.pages.page_size)
                assert table.count(0) == group.first_page(sequence.num_confirmed_tokens, self.pages.page_size)
        in_rows = {row.sequence.request_id for row in rows}
        assert all(sequence.request_id in in_rows for sequence in step.admitted)
        for sequence in step.preempted:
            assert sequence.request_id not in in_rows
            assert not any(sequence.tables)
            assert sequence.num_preemptions <= 2, f"{sequence} is preempted again and again"
        for sequence in step.admitted:
            assert sequence.num_cached_tokens < sequence.num_prompt_tokens, "a hit covers the last prompt token"
        for sequence in scheduler.sequences[: scheduler.num_running]:
            if sequence.request_id in in_rows or sequence.num_uncomputed_tokens > 1:
                continue
            waits_for_id = sequence.num_pending_ids and (sequence.needs_host or sequence.num_tokens == sequence.max_total_tokens)
            is_short = len(sequence.pages) * self.pages.page_size == sequence.num_computed_tokens
            # With steps in flight pages may be about to come back; without, somebody has to go.
            assert waits_for_id or (is_short and self._in_flight), f"{sequence} runs and gets no token"
            if not waits_for_id:
                self._check_wait(sequence, step)

    def _is_sliding(self) -> bool:
        """Whether pages are held that nothing sees any more once the steps in flight are back."""
        return any(
            any(table[: group.first_page(sequence.num_computed_tokens, self.pages.page_size)])
            for sequence in self._admissions
            for group, table in zip(self.pages.groups, sequence.tables, strict=True)
        )

    def _check_wait(self, sequence: Sequence, step: ScheduledStep) -> None:
        """Pages come back: of a sequence whose last id is on its way, or behind a window; or no other row could take them."""
        running = self.scheduler.sequences[: self.scheduler.num_running]
        is_ending = any(other.num_pending_ids and other.num_tokens == other.max_total_tokens for other in running)
        ones = [row for row in step.rows if row.num_tokens == row.samples == 1]
        assert is_ending or self._was_sliding or self._is_sliding() or not ones, f"{sequence} runs and waits for nothing"

    def _check_order(self, step: ScheduledStep, queue: list[Sequence]) -> None:
        """First come, first served within a priority; who loses pages is the last admitted of the lowest priority."""
        preempted, admitted = list(step.preempted), list(step.admitted)
        order = sorted(self._admissions, key=lambda sequence: (sequence.priority, self._admissions[sequence]))
        victims = [sequence for sequence in reversed(order) if sequence not in self._recomputation.kept]
        assert preempted == victims[: len(preempted)], "another than the last admitted of the lowest priority was preempted"
        if preempted and admitted:
            self.outcome.num_displacements += 1
            (winner,) = admitted
            best = min(queue, key=lambda sequence: (sequence.priority, self._unfinished[sequence]))
            assert winner is best, "not the best of those that wait took another's place"
            assert winner.priority < preempted[0].priority, "a request displaced one that is no worse"
        else:
            assert admitted == queue[: len(admitted)], "not the head of the queue was admitted"
        left = queue[len(admitted) :]
        if step.decision.endswith(": tokens") and not self.scheduler.is_draining:
            ageing_s = self.policy.ageing_s
            chunks = [row.sequence for row in step.rows if not (row.num_tokens == row.samples == 1) and row.sequence not in admitted]
            for sequence in chunks:
                is_worse = sequence.priority * ageing_s + sequence.queued_s > left[0].priority * ageing_s + left[0].queued_s
                assert not is_worse, f"{sequence} has the tokens for which a better one waits"
        for sequence in preempted:
            del self._admissions[sequence]
            self._recomputation.preempted(sequence)
        for sequence in admitted:
            self._recomputation.admitted(sequence, next(row.start for row in step.rows if row.sequence is sequence))
            self._num_admissions += 1
            self._admissions[sequence] = self._num_admissions
            self._admitted_once.add(sequence)
        assert set(self.scheduler.sequences) == set(self._unfinished), "a request was lost"
        assert set(self.scheduler.sequences[: self.scheduler.num_running]) == set(self._admissions)

    def _check_guarded(self) -> None:
        """Whoever was preempted twice, or recomputed much, has all its pages, or they are there for it (or come back behind a window)."""
        page_size, kept = self.pages.page_size, 0
        for sequence in self._recomputation.kept:
            num_entries = self.pages.pages_for(sequence.max_total_tokens - 1)
            for group, table in zip(self.pages.groups, sequence.tables, strict=True):
                num_to_come = num_entries - len(table)
                if group.window is not None:
                    # The pages of a window, one that fills up, and one that steps in flight keep; none that would stay with others.
                    most = -(-(group.window - 1) // page_size) + 2
                    num_to_come = min(num_to_come, most - sum(self.pages.ref_count(page) == 1 for page in table))
                kept += num_to_come
        assert kept <= self.pages.num_available, "pages that are kept for somebody were given away"

    def _count(self, step: ScheduledStep) -> None:
        outcome = self.outcome
        outcome.num_steps += 1
        outcome.num_preemptions += len(step.preempted)
        for sequence in step.preempted:
            outcome.max_preemptions = max(outcome.max_preemptions, sequence.num_preemptions)
        num_recomputed = 0
        for row in step.rows:
            end, once = row.start + row.num_tokens, self._recomputation.once_computed(row.sequence)
            num_recomputed += max(0, min(end, once) - row.start)
            outcome.num_prefill_tokens += max(0, min(end, max(once, row.sequence.num_prompt_tokens)) - row.start)
            outcome.num_prefill_tokens_of_prompts += max(0, min(end, row.sequence.num_prompt_tokens) - row.start)
        if self._checks_steps:
            assert step.prefill_recompute_tokens == num_recomputed
        outcome.num_recomputed_tokens += num_recomputed
        assert outcome.num_prefill_tokens <= self._recomputation.most_prefill(), "too much is recomputed"
        assert outcome.num_prefill_tokens_of_prompts <= self._recomputation.most_prefill_of_prompts(), "prompts are computed a third time"
        outcome.num_hit_tokens += step.prefix_hits_tokens
        self._drought = 0 if any(row.samples for row in step.rows) else self._drought + 1
        outcome.longest_drought = max(outcome.longest_drought, self._drought)
        outcome.trace.append(
            (
                self.now,
                *((row.sequence.request_id, row.start, row.num_tokens, row.slot, *map(tuple, row.sequence.tables)) for row in step.rows),
                step.decision,
            )
        )
