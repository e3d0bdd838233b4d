"""Bugs of the scheduler, one patch each, and a world that notices each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from jaxpaged import admission, running_set
from jaxpaged.admission import Admission
from jaxpaged.admission_limits import AdmissionLimits, Deadlines
from jaxpaged.errors import JaxpagedError, QueueTimeoutError
from jaxpaged.kv_groups import PageArithmetic
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason
from jaxpaged.running_rows import RunningRows
from jaxpaged.running_set import RunningSet
from jaxpaged.sample_groups import SampleGroups
from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.scheduler import Scheduler
from jaxpaged.scheduler import Sequence as EngineSequence
from jaxpaged.sequence import SequenceStatus
from jaxpaged.step_draft import StepDraft
from jaxpaged.waiting_queue import WaitingQueue
from tests.scheduler import planted_page_bugs as page_bugs
from tests.scheduler import planted_turn_bugs as turn_bugs
from tests.scheduler.planted_page_bugs import Plant

real_add = Scheduler.add
real_append = EngineSequence.append
real_enter = Admission._enter
real_end = Scheduler._end
real_finish = Scheduler.finish
real_grow = PageManager.grow
real_leave = RunningSet.leave
real_one_token_rows = RunningRows.take_one_token_each
real_place = WaitingQueue.place
real_preempt = RunningRows.preempt
real_running_enter = RunningSet.enter
real_schedule = Scheduler.schedule
real_take = StepDraft.take
real_update = Scheduler.update


def one_page_more_at_multiples(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "pages_for", lambda self, num_tokens: num_tokens // self.page_size + 1)


def one_page_less(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "pages_for", lambda self, num_tokens: max(1, num_tokens // self.page_size))


def end_keeps_the_pages(patch: pytest.MonkeyPatch) -> None:
    def leave(self: RunningSet, sequence: EngineSequence, *, commit: bool) -> None:
        sequence.tables = self._pages.empty_tables()
        real_leave(self, sequence, commit=False)

    patch.setattr(RunningSet, "leave", leave)


def pages_are_released_twice(patch: pytest.MonkeyPatch) -> None:
    def leave(self: RunningSet, sequence: EngineSequence, *, commit: bool) -> None:
        self._pages.release(sequence.tables)
        real_leave(self, sequence, commit=commit)

    patch.setattr(RunningSet, "leave", leave)


def slot_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    def leave(self: RunningSet, sequence: EngineSequence, *, commit: bool) -> None:
        real_leave(self, sequence, commit=commit)
        self._free_slots.pop()

    patch.setattr(RunningSet, "leave", leave)


def one_slot_for_all(patch: pytest.MonkeyPatch) -> None:
    def enter(self: RunningSet, sequence: EngineSequence) -> None:
        real_running_enter(self, sequence)
        sequence.slot = 0

    patch.setattr(RunningSet, "enter", enter)


def preempted_keeps_its_count(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: RunningRows, victim: EngineSequence, draft: StepDraft) -> None:
        real_preempt(self, victim, draft)
        victim.num_computed_tokens = victim.num_lost_tokens

    patch.setattr(RunningRows, "preempt", preempt)


def first_admitted_is_preempted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningSet, "victim", lambda self: next((s for s in self.sequences if not running_set.is_guarded(s)), None))


def priority_of_victims_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def victim(self: RunningSet) -> EngineSequence | None:
        return max((s for s in self.sequences if not running_set.is_guarded(s)), key=lambda s: s.epoch, default=None)

    patch.setattr(RunningSet, "victim", victim)


def equals_displace_each_other(patch: pytest.MonkeyPatch) -> None:
    def victims(self: RunningSet, worse_than: int) -> list[EngineSequence]:
        return [s for s in reversed(self.sequences) if not running_set.is_guarded(s) and s.priority >= worse_than]

    patch.setattr(RunningSet, "victims", victims)


def nobody_is_guarded(patch: pytest.MonkeyPatch) -> None:
    for module in (running_set, admission):
        patch.setattr(module, "is_guarded", lambda sequence: False)


def pages_of_the_guarded_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningSet, "kept_pages", lambda self, sequence: 0)


def preempted_goes_to_the_back(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: RunningRows, victim: EngineSequence, draft: StepDraft) -> None:
        real_preempt(self, victim, draft)
        self._queue.remove(victim)
        victim.queue_key = (victim.queue_key[0] + 1e9, victim.queue_key[1])
        self._queue.add(victim)

    patch.setattr(RunningRows, "preempt", preempt)


def preempted_is_lost(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: RunningRows, victim: EngineSequence, draft: StepDraft) -> None:
        real_preempt(self, victim, draft)
        self._queue.remove(victim)

    patch.setattr(RunningRows, "preempt", preempt)


def unfinished_prompt_samples(patch: pytest.MonkeyPatch) -> None:
    def take(self: StepDraft, sequence: EngineSequence, num_tokens: int, rows: list[ScheduledRow]) -> None:
        real_take(self, sequence, num_tokens, rows)
        row = rows.pop()
        rows.append(ScheduledRow(sequence, num_tokens, row.start, True, row.slot, row.takes_from_slot, row.epoch))

    patch.setattr(StepDraft, "take", take)


def budget_is_exceeded_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_prompt_budget", lambda self, partial, num_ones: self.max_num_batched_tokens - num_ones + 1)


def newest_is_admitted_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "first", lambda self: max(self._members, key=lambda sequence: sequence.queue_key))


def ageing_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "first", lambda self: self.first_by_priority())


def hit_is_one_token_long(patch: pytest.MonkeyPatch) -> None:
    def enter(self: Admission, sequence: EngineSequence, draft: StepDraft) -> None:
        real_enter(self, sequence, draft)
        sequence.num_computed_tokens += 1 if sequence.pages and sequence.num_uncomputed_tokens > 1 else 0

    patch.setattr(Admission, "_enter", enter)


def late_token_is_kept(patch: pytest.MonkeyPatch) -> None:
    def update(self: Scheduler, step: ScheduledStep, token_ids: Sequence[int]) -> list[EngineSequence]:
        late = [(row.sequence, token_id) for row, token_id in zip(step.rows, token_ids, strict=True) if row.sequence.is_finished]
        finished = real_update(self, step, token_ids)
        for sequence, token_id in late:
            sequence.token_ids.append(token_id)
        return finished

    patch.setattr(Scheduler, "update", update)


def rows_of_an_earlier_admission_count(patch: pytest.MonkeyPatch) -> None:
    def update(self: Scheduler, step: ScheduledStep, token_ids: Sequence[int]) -> list[EngineSequence]:
        epochs = [(row.sequence, row.sequence.epoch) for row in step.rows]
        for row in step.rows:
            row.sequence.epoch = row.epoch
        finished = real_update(self, step, token_ids)
        for sequence, epoch in epochs:
            sequence.epoch = epoch
        return finished

    patch.setattr(Scheduler, "update", update)


def preempted_comes_back_before_its_id(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: RunningRows, victim: EngineSequence, draft: StepDraft) -> None:
        real_preempt(self, victim, draft)
        victim.num_pending_ids = 0

    patch.setattr(RunningRows, "preempt", preempt)


def min_tokens_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def append(self: EngineSequence, token_id: int) -> bool:
        has_ended = real_append(self, token_id)
        if not has_ended and token_id in self.stop_ids:
            self.finish_reason, self.status = FinishReason.STOP, SequenceStatus.FINISHED
            return True
        return has_ended

    patch.setattr(EngineSequence, "append", append)


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    def add(self: Scheduler, sequence: EngineSequence) -> None:
        real_add(self, sequence)
        sequence.max_total_tokens += 1

    patch.setattr(Scheduler, "add", add)


def length_is_not_known_ahead(patch: pytest.MonkeyPatch) -> None:
    def rows(self: RunningRows, draft: StepDraft, *, is_ahead: bool) -> list[EngineSequence]:
        limits = [(sequence, sequence.max_total_tokens) for sequence in self._running.sequences]
        for sequence, _ in limits:
            sequence.max_total_tokens += 1
        partial = real_one_token_rows(self, draft, is_ahead=is_ahead)
        for sequence, limit in limits:
            sequence.max_total_tokens = limit
        return partial

    patch.setattr(RunningRows, "take_one_token_each", rows)


def host_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def rows(self: RunningRows, draft: StepDraft, *, is_ahead: bool) -> list[EngineSequence]:
        needy = [sequence for sequence in self._running.sequences if sequence.needs_host]
        for sequence in needy:
            sequence.needs_host = False
        partial = real_one_token_rows(self, draft, is_ahead=is_ahead)
        for sequence in needy:
            sequence.needs_host = True
        return partial

    patch.setattr(RunningRows, "take_one_token_each", rows)


def token_is_never_taken_from_the_slot(patch: pytest.MonkeyPatch) -> None:
    def take(self: StepDraft, sequence: EngineSequence, num_tokens: int, rows: list[ScheduledRow]) -> None:
        real_take(self, sequence, num_tokens, rows)
        row = rows.pop()
        rows.append(ScheduledRow(sequence, num_tokens, row.start, row.samples, row.slot, False, row.epoch))

    patch.setattr(StepDraft, "take", take)


def failed_sequence_is_shared(patch: pytest.MonkeyPatch) -> None:
    def end(self: Scheduler, sequence: EngineSequence, *, commit: bool) -> None:
        if sequence.finish_reason is FinishReason.ERROR:
            sequence.num_confirmed_tokens = sequence.num_computed_tokens
        real_end(self, sequence, commit=True)

    patch.setattr(Scheduler, "_end", end)


def queue_limit_ends_those_that_run(patch: pytest.MonkeyPatch) -> None:
    def expired(self: Deadlines, now_s: float) -> list[tuple[EngineSequence, JaxpagedError]]:
        found = [entry[2] for entry in self._heap if entry[0] <= now_s and not entry[2].is_finished]
        self._heap = [entry for entry in self._heap if entry[0] > now_s]
        return [(sequence, QueueTimeoutError("too late")) for sequence in found]

    patch.setattr(Deadlines, "expired", expired)


def followers_wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SampleGroups, "freed_by_progress", lambda self, sequence: [])
    patch.setattr(SampleGroups, "freed_by_end", lambda self, sequence: [])


def recomputation_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    def preempt(self: RunningRows, victim: EngineSequence, draft: StepDraft) -> None:
        real_preempt(self, victim, draft)
        victim.num_once_computed = 0

    patch.setattr(RunningRows, "preempt", preempt)


def pages_are_not_counted_at_admission(patch: pytest.MonkeyPatch) -> None:
    def take_pages(self: Admission, candidate: EngineSequence, load: object) -> bool:
        candidate.tables = self._pages.match(candidate.token_ids, candidate.prefix)
        return True

    patch.setattr(Admission, "_take_pages", take_pages)


def queue_has_no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdmissionLimits, "check_queue", lambda self, *counts: None)


def pool_of_the_guarded_is_counted_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageArithmetic, "peak_pages", lambda self, num_tokens: self.pages_for(num_tokens) // 2)


def steps_are_taken_in_twice(patch: pytest.MonkeyPatch) -> None:
    def update(self: Scheduler, step: ScheduledStep, token_ids: Sequence[int]) -> list[EngineSequence]:
        real_update(self, step, token_ids)
        self._in_flight.appendleft(step)
        return real_update(self, step, token_ids)

    patch.setattr(Scheduler, "update", update)


def pause_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def schedule(self: Scheduler) -> ScheduledStep | None:
        self._is_paused, is_paused = False, self._is_paused
        step = real_schedule(self)
        self._is_paused = is_paused
        return step

    patch.setattr(Scheduler, "schedule", schedule)


@dataclass(frozen=True)
class PlantedBug:
    """A bug and the seed of a world that notices it."""

    plant: Plant
    seed: int


SCHEDULER_BUGS = [
    PlantedBug(plant, seed)
    for plant, seed in (
        (one_page_more_at_multiples, 0),
        (one_page_less, 0),
        (end_keeps_the_pages, 0),
        (pages_are_released_twice, 0),
        (slot_is_not_given_back, 0),
        (one_slot_for_all, 0),
        (preempted_keeps_its_count, 1),
        (first_admitted_is_preempted, 1),
        (priority_of_victims_is_ignored, 19),
        (equals_displace_each_other, 0),
        (nobody_is_guarded, 5),
        (pages_of_the_guarded_are_not_kept, 53),
        (preempted_goes_to_the_back, 1),
        (preempted_is_lost, 1),
        (unfinished_prompt_samples, 0),
        (budget_is_exceeded_by_one, 0),
        (newest_is_admitted_first, 0),
        (ageing_is_ignored, 5),
        (turn_bugs.everybody_waits_for_pages, 1),
        (turn_bugs.spare_tokens_are_not_spent, 170),
        (turn_bugs.drain_is_ignored, 0),
        (turn_bugs.places_are_taken_while_draining, 19),
        (turn_bugs.tokens_go_to_running_prompts_first, 2),
        (hit_is_one_token_long, 1),
        (late_token_is_kept, 0),
        (rows_of_an_earlier_admission_count, 22),
        (preempted_comes_back_before_its_id, 1),
        (min_tokens_are_ignored, 0),
        (one_token_too_many, 0),
        (length_is_not_known_ahead, 0),
        (host_is_not_waited_for, 0),
        (token_is_never_taken_from_the_slot, 0),
        (failed_sequence_is_shared, 46),
        (queue_limit_ends_those_that_run, 14),
        (followers_wait_for_ever, 1),
        (recomputation_is_not_counted, 1),
        (pages_are_not_counted_at_admission, 0),
        (queue_has_no_limit, 3),
        (pool_of_the_guarded_is_counted_short, 1),
        (steps_are_taken_in_twice, 0),
        (pause_is_ignored, 3),
        # The simulation must see these as well: they change what is read back.
        (page_bugs.release_forgets_one, 0),
        (page_bugs.partial_page_is_committed, 1),
        (page_bugs.page_is_committed_before_it_is_computed, 1),
        (page_bugs.hit_covers_the_last_token, 1),
        (page_bugs.hit_takes_no_reference, 1),
        (page_bugs.recycled_page_stays_in_the_map, 1),
        (page_bugs.digest_ignores_the_parent, 1),
        (page_bugs.digest_has_three_values, 1),
        (page_bugs.salt_is_ignored, 1),
        (page_bugs.group_is_ignored, 4),
        (page_bugs.page_zero_is_given_out, 0),
        (page_bugs.window_is_one_too_short, 0),
        (page_bugs.hit_ignores_windows, 3),
        (page_bugs.shared_pages_after_a_flush, 2),
        (page_bugs.flush_forgets_running_pages, 2),
        (page_bugs.windows_never_slide, 0),
    )
]
