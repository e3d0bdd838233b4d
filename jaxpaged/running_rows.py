"""Rows of the sequences that run, and who has to go for them: passes 1 and 2 of a step."""

from jaxpaged.page_manager import PageManager
from jaxpaged.running_set import RunningSet, is_guarded
from jaxpaged.sequence import NO_SLOT, Sequence, SequenceStatus
from jaxpaged.step_draft import StepDraft
from jaxpaged.waiting_queue import WaitingQueue


class RunningRows:
    """Chooses the next tokens of running sequences and takes their pages.

    Args:
        page_manager: the pool.
        queue: where preempted sequences go.
        running: the sequences.
    """

    def __init__(self, page_manager: PageManager, queue: WaitingQueue, running: RunningSet) -> None:
        self._pages, self._queue, self._running = page_manager, queue, running

    def take_one_token_each(self, draft: StepDraft, *, is_ahead: bool) -> list[Sequence]:
        """Pass 1; returns the running sequences that have more than one token to compute.

        Args:
            draft: takes the rows.
            is_ahead: steps are in flight, whose results may give pages back.
        """
        partial = []
        page_size, has_windows = self._pages.page_size, bool(self._pages.arithmetic.windows)
        ones, take = draft.ones, draft.take
        # A copy: whoever is preempted on the way comes later in it than the one it is preempted for.
        for sequence in tuple(self._running.sequences):
            if sequence.slot == NO_SLOT:
                continue
            num_pending, start = sequence.num_pending_ids, sequence.num_computed_tokens
            num_tokens = len(sequence.token_ids) + num_pending
            if num_tokens - start > 1:
                partial.append(sequence)
                continue
            if num_pending and (num_tokens >= sequence.max_total_tokens or sequence.needs_host):
                # Its last id is on its way, or nothing can be said before it is here.
                continue
            if has_windows:
                self._running.slide_windows(sequence)
            if start < len(sequence.tables[0]) * page_size or self._grow_by_force(sequence, draft, is_ahead=is_ahead):
                take(sequence, 1, ones)
        return partial

    def take_chunk(self, sequence: Sequence, draft: StepDraft) -> None:
        """Pass 2: a chunk as long as budget and pages allow, preempting nobody."""
        if draft.budget == 0 or sequence.slot == NO_SLOT:
            return
        self._running.slide_windows(sequence)
        num_tokens = self._running.fitting_tokens(sequence, min(sequence.num_uncomputed_tokens, draft.budget))
        if num_tokens > 0:
            is_grown = self._pages.grow(sequence.tables, sequence.num_computed_tokens + num_tokens)
            if not is_grown:
                raise AssertionError(f"{sequence}: no pages for {num_tokens} tokens that were there a moment ago")
            draft.take_chunk(sequence, num_tokens)

    def preempt(self, victim: Sequence, draft: StepDraft) -> None:
        """Takes the pages of a running sequence. Its whole pages are in the prefix cache already, since `update` commits at once."""
        victim.num_lost_tokens = victim.num_charged_tokens = victim.num_computed_tokens
        victim.num_once_computed = max(victim.num_once_computed, victim.num_computed_tokens)
        self._running.leave(victim, commit=False)
        victim.num_computed_tokens = victim.num_confirmed_tokens = 0
        victim.num_preemptions += 1
        victim.status = SequenceStatus.PREEMPTED
        self._queue.add(victim)
        draft.preempted.append(victim)

    def _grow_by_force(self, sequence: Sequence, draft: StepDraft, *, is_ahead: bool) -> bool:
        """Room for one token more, at the cost of those admitted last; False when it has to wait, or to go, itself."""
        running, num_pages = self._running, len(sequence.tables)
        while self._pages.num_available - running.kept_pages(sequence) < num_pages:
            victim = running.victim()
            if is_ahead and self._may_wait(sequence, victim, draft):
                return False
            if victim is None:
                raise AssertionError(f"{sequence} has no page and nobody may lose any")
            self.preempt(victim, draft)
            if victim is sequence:
                return False
        return self._pages.grow(sequence.tables, sequence.num_computed_tokens + 1)

    def _may_wait(self, sequence: Sequence, victim: Sequence | None, draft: StepDraft) -> bool:
        """Whether the steps in flight give pages back, or are all that goes on: then nobody has to lose any for `sequence` now."""
        if victim is None or is_guarded(sequence) or self._running.has_returning:
            return True
        # There has to be a step in which somebody gets what is taken.
        return victim is sequence and not draft.ones and not any(map(_goes_on, filter(is_guarded, self._running.sequences)))


def _goes_on(sequence: Sequence) -> bool:
    """Whether a sequence has something to compute before its last id is known."""
    is_last = sequence.num_tokens >= sequence.max_total_tokens or sequence.needs_host
    return sequence.num_uncomputed_tokens > 1 or not (sequence.num_pending_ids and is_last)
