"""Who is let in: passes 0 and 3 of a step.

A request is let in when there is a slot, a token of budget, and pages, looked at in two ways. For sure: the pages for all
its known tokens and those of every running sequence, and one token more of each, so that admission never causes a preemption
in the next step. In all likelihood: the most pages that all of them will need at once, if answers become as long as those
that ended lately (`page_forecast`). Some pages are left over for requests of higher priority than the default. None of this
keeps a request out of an idle engine.

Every request may be computed again once, after a preemption, as far as it is not found in the prefix cache. It is let in with pages
for the next tokens only, and may lose them a second time, if what it has to compute again fits into what requests that have ended
have left over of their own: their prompts, less what was recomputed of them. Otherwise, and after the second time, all the pages
that it can ever need are kept for it. So all prefill is at most twice the prompts and once the answers of those preempted.

A request waits a step or two when a running one is just computing a long part of its prompt, which it then finds in the prefix cache.

A request of strictly higher priority that found no room takes it from running ones of lower priority, in the next step.
"""

from collections.abc import Callable

from jaxpaged.admission_limits import AdmissionLimits
from jaxpaged.output_lengths import OutputLengths
from jaxpaged.page_forecast import Demand, peak_pages
from jaxpaged.page_manager import PageManager
from jaxpaged.running_set import RunningSet, is_guarded
from jaxpaged.sequence import Sequence, SequenceStatus
from jaxpaged.step_budget import StepBudget
from jaxpaged.step_draft import StepDraft
from jaxpaged.waiting_queue import WaitingQueue

LOWEST_QUANTILE = 0.5
"""Each running answer stands for another quantile of the lengths in the history, from this one up: together they are like the
history, a little on the careful side."""

OVERCOMMIT = 1.08
"""The forecast may exceed the pool by this factor: if it comes true, one sequence is preempted, which costs less than pages that
lie idle, since most of what it has computed is found again. With these two a tenfold burst costs 1 to 2 % preemptions, 3.5 % in the worst
of 24, and 2 to 4 % of the best throughput (tests/scheduler/test_load.py)."""

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, taken modulo 1, are spread evenly, however many there are."""

DEFAULT_PRIORITY = 0

SHARED_PART = 4
"""A shared beginning is waited for from this part of a full step on: less is computed again faster than waited for."""

ROWS, TIME, TOKENS, PAGES = "rows", "target_itl_s", "tokens", "pages"
LATE = "a token on its way"
PREFIX = "its beginning is being computed"
PREEMPTION = "preemption"
DRAINING = "draining"
"""Why a request stays in the queue."""


class Admission:
    """Moves requests from the queue to the running set.

    Args:
        page_manager: the pool.
        queue: who waits.
        running: who runs.
        limits: has the reserve.
        budget: bounds the number of rows when a target is set.
        takes_whole_prompts: whether a prompt waits for a step that has room for all of it.
    """

    def __init__(
        self,
        page_manager: PageManager,
        queue: WaitingQueue,
        running: RunningSet,
        limits: AdmissionLimits,
        budget: StepBudget,
        takes_whole_prompts: bool = False,
    ) -> None:
        self._num_shared_pages = -(-budget.most_tokens // (SHARED_PART * page_manager.page_size))
        self._pages, self._queue, self._running = page_manager, queue, running
        self._reserve_pages = limits.reserve_pages
        self._budget, self._takes_whole_prompts = budget, takes_whole_prompts
        self.lengths = OutputLengths()
        self._num_spare_tokens = 0
        self._no_room_reason = ""
        self._no_room: tuple[Sequence, int] | None = None

    def displace(self, draft: StepDraft, preempt: Callable[[Sequence, StepDraft], None]) -> Sequence | None:
        """Pass 0: gives a waiting request the place of running ones of strictly lower priority; returns who was let in."""
        if self._no_room_reason not in (ROWS, PAGES, TIME) or not len(self._queue):
            return None
        candidate = self._queue.first_by_priority()
        victims = self._running.victims(worse_than=candidate.priority)
        if not victims or candidate.num_pending_ids:
            return None
        chosen = self._choose_victims(candidate, victims)
        if chosen is None:
            return None
        for victim in chosen:
            preempt(victim, draft)
        self._enter(candidate, draft)
        return candidate

    def admit(self, draft: StepDraft, *, only: Callable[[Sequence], bool] | None = None, ahead_of: Sequence | None = None) -> None:
        """Pass 3: lets in requests in the order of the queue, and schedules their first chunks.

        Args:
            draft: takes them.
            only: which of them may come in; None: all.
            ahead_of: a prompt in progress; then only those that come before it in the order (a part of pass 2).
        """
        queue, running = self._queue, self._running
        num_waiting = len(queue) + len(draft.admitted)
        reason = PREEMPTION if draft.preempted else draft.reason
        load = _Load(self._pages, running, self.lengths)
        while len(queue) and not reason:
            candidate = queue.first() if only is None else queue.first_of(only)
            if candidate is not None and ahead_of is not None and candidate.queue_key > ahead_of.queue_key:
                break
            if candidate is None:
                reason = DRAINING
            elif not running.has_slot:
                reason = ROWS
            elif len(running.sequences) >= self._budget.max_rows():
                reason = TIME
            elif draft.budget == 0 or (self._takes_whole_prompts and draft.budget < candidate.num_uncomputed_tokens):
                reason = TOKENS
            elif candidate.num_pending_ids:
                reason = LATE
            elif self._is_being_computed(candidate):
                reason = PREFIX
            elif not self._take_pages(candidate, load):
                reason = PAGES
            else:
                self._enter(candidate, draft)
                num_tokens = running.fitting_tokens(candidate, min(candidate.num_uncomputed_tokens, draft.budget))
                is_grown = self._pages.grow(candidate.tables, candidate.num_computed_tokens + num_tokens)
                if not is_grown or num_tokens == 0:
                    raise AssertionError(f"{candidate}: no pages for {num_tokens} tokens that were there a moment ago")
                draft.take_chunk(candidate, num_tokens)
                load.add(candidate)
        self._no_room_reason = draft.reason = reason
        if num_waiting:
            draft.decision = f"admitted {len(draft.admitted)} of {num_waiting}" + (f": {reason}" if reason else "")

    def settle(self, sequence: Sequence) -> None:
        """One has ended: what it might have recomputed of its prompt, and has not, others may."""
        num_prompt = min(sequence.num_prompt_tokens, max(sequence.num_computed_tokens, sequence.num_once_computed))
        self._num_spare_tokens += max(0, num_prompt - sequence.num_recomputed_tokens)

    def _enter(self, sequence: Sequence, draft: StepDraft) -> None:
        """From the queue to the running set; the sequence has the pages of its cached prefix already."""
        is_first = sequence.status is SequenceStatus.WAITING
        num_hit_tokens = len(sequence.pages) * self._pages.page_size
        num_again = max(0, sequence.num_charged_tokens - num_hit_tokens)
        if is_guarded(sequence):
            sequence.num_recomputed_tokens += num_again
        else:
            self._num_spare_tokens -= num_again
        sequence.num_charged_tokens = 0
        sequence.num_computed_tokens = sequence.num_confirmed_tokens = num_hit_tokens
        sequence.num_hit_pages = self._running.held_pages(sequence)
        if is_first:
            sequence.num_cached_tokens = num_hit_tokens
        self._queue.remove(sequence)
        self._running.enter(sequence)
        draft.admit(sequence, counts_hits=is_first and self._pages.enable_prefix_caching)

    def _take_pages(self, candidate: Sequence, load: "_Load") -> bool:
        """Gives a waiting sequence its cached prefix, if the pages that it will want beyond are there; else changes nothing."""
        pages, running = self._pages, self._running
        if self._no_room == (candidate, running.version):
            # Nothing was given back since it was last looked at, and those that run have only grown.
            return False
        self._match(candidate)
        wanted = running.pages_to_come(candidate)
        if not running.sequences:
            if wanted > pages.num_available:
                raise AssertionError(f"{candidate} does not fit in an idle engine: {pages.num_in_use} pages are in use by nobody")
            return True
        reserve = self._reserve_for(candidate)
        if wanted <= pages.num_available - load.promised - reserve and load.peak_with(candidate) <= OVERCOMMIT * (
            pages.num_usable - reserve
        ):
            return True
        pages.release(candidate.tables)
        candidate.tables = pages.empty_tables()
        self._no_room = (candidate, running.version)
        return False

    def _is_being_computed(self, candidate: Sequence) -> bool:
        """Whether a step that has not come back computes a good part of the candidate's prompt that is not in the prefix cache yet."""
        pages = self._pages
        if not pages.enable_prefix_caching:
            return False
        leaders = [one for one in self._running.sequences if one.num_confirmed_tokens < min(one.num_computed_tokens, one.num_prompt_tokens)]
        if not leaders:
            return False
        known = candidate.findable_token_ids
        end = (pages.num_hit_pages(known, candidate.prefix) + self._num_shared_pages) * pages.page_size
        return end < len(known) and any(
            min(leader.num_computed_tokens, leader.num_prompt_tokens) >= end
            and leader.prefix.salt == candidate.prefix.salt
            and leader.prefix.adapter == candidate.prefix.adapter
            and leader.token_ids[:end] == known[:end]
            for leader in leaders
        )

    def _match(self, candidate: Sequence) -> None:
        """Gives a waiting sequence its cached prefix, which says how much of it is to be computed again."""
        candidate.tables = self._pages.match(candidate.findable_token_ids, candidate.prefix)
        num_again = max(0, candidate.num_charged_tokens - len(candidate.pages) * self._pages.page_size)
        candidate.has_recomputed_much = candidate.num_recomputed_tokens > 0 or num_again > self._num_spare_tokens

    def _reserve_for(self, candidate: Sequence) -> int:
        """Pages that must stay free when `candidate` is let in beside others."""
        return self._reserve_pages if candidate.priority >= DEFAULT_PRIORITY else 0

    def _choose_victims(self, candidate: Sequence, victims: list[Sequence]) -> list[Sequence] | None:
        """The fewest of `victims` that make room, and the candidate's cached prefix; None, and nothing is changed, if all are too few."""
        pages, running = self._pages, self._running
        self._match(candidate)
        reserve = self._reserve_for(candidate)
        lacking = running.pages_to_come(candidate) + running.promised_pages() + reserve - pages.num_available
        # Nobody passes another in the queue for free: then one place is taken even if there is room.
        num_least = int(not running.has_slot or len(running.sequences) >= self._budget.max_rows() or candidate is not self._queue.first())
        chosen: list[Sequence] = []
        for victim in victims:
            if lacking <= 0 and len(chosen) >= num_least:
                break
            chosen.append(victim)
            lacking -= pages.num_sole_pages(victim.tables) + running.pages_to_come(victim, 1)
        if lacking <= (reserve if len(chosen) == len(running.sequences) else 0):
            return chosen
        pages.release(candidate.tables)
        candidate.tables = pages.empty_tables()
        return None


class _Load:
    """What the running sequences will ask of the pool, worked out when it is first needed."""

    def __init__(self, page_manager: PageManager, running: RunningSet, lengths: OutputLengths) -> None:
        self._pages, self._running, self._lengths = page_manager, running, lengths
        self._arithmetic = page_manager.arithmetic
        self._demands: list[Demand] | None = None
        self._promised: int | None = None
        self._num_own_pages = 0

    @property
    def promised(self) -> int:
        """Pages for the known tokens of the running sequences and one more of each, beyond those they hold."""
        if self._promised is None or self._arithmetic.windows:
            # Behind a window a page comes back for its owner only while nobody else holds it, and the candidate may have come to.
            self._promised = self._running.promised_pages()
        return self._promised

    def add(self, sequence: Sequence) -> None:
        """One more runs, and has its first chunk."""
        if self._promised is not None:
            self._promised += self._running.pages_to_come(sequence, 1)
        if self._demands is not None:
            self._demands.append(self._demand(sequence))
            self._num_own_pages += self._own_pages(sequence)

    def peak_with(self, candidate: Sequence) -> float:
        """The most pages in use at once if `candidate`, which holds its cached prefix, runs beside the others."""
        if self._demands is None:
            self._demands = [self._demand(sequence) for sequence in self._running.sequences]
            self._num_own_pages = sum(map(self._own_pages, self._running.sequences))
        num_shared = max(0, self._pages.num_in_use - self._num_own_pages)
        candidate.num_hit_pages = self._running.held_pages(candidate)
        growth = self._arithmetic.num_full / self._pages.page_size
        return num_shared + peak_pages([*self._demands, self._demand(candidate)], growth)

    def _own_pages(self, sequence: Sequence) -> int:
        return max(0, self._running.held_pages(sequence) - sequence.num_hit_pages)

    def _demand(self, sequence: Sequence) -> Demand:
        """Windowed groups stop growing, so their share counts in full from now on."""
        arithmetic, num_tokens = self._arithmetic, sequence.num_tokens
        remaining = sequence.max_total_tokens - num_tokens
        if not is_guarded(sequence):
            number = sequence.epoch or self._running.next_epoch
            quantile = LOWEST_QUANTILE + (1 - LOWEST_QUANTILE) * (number * GOLDEN_RATIO % 1.0)
            remaining = min(remaining, self._lengths.expected_remaining(num_tokens - sequence.num_prompt_tokens, quantile))
        num_pages = arithmetic.peak_pages(num_tokens + remaining)
        num_pages -= arithmetic.num_full * (arithmetic.pages_for(num_tokens + remaining) - arithmetic.pages_for(num_tokens))
        return Demand(remaining, max(0, max(num_pages, self._running.held_pages(sequence)) - sequence.num_hit_pages))
