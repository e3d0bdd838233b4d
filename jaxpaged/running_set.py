"""The sequences that have pages and a slot, in the order in which they would lose them."""

from bisect import insort
from operator import attrgetter

from jaxpaged.page_manager import PageManager
from jaxpaged.sequence import NO_SLOT, Sequence, SequenceStatus

MAX_PREEMPTIONS = 2
"""A sequence that was preempted so often comes back only with all its pages kept for it, and is then never a victim."""

_ORDER = attrgetter("priority", "epoch")


def is_guarded(sequence: Sequence) -> bool:
    """Whether all pages that a sequence can ever need are kept for it while it runs."""
    return sequence.num_preemptions >= MAX_PREEMPTIONS or sequence.has_recomputed_much


class RunningSet:
    """Slots, and what is promised of the pool.

    Args:
        page_manager: the pool.
        max_num_seqs: slots.

    Attributes:
        sequences: best priority first, then in order of admission. The last one that is not guarded is the next victim.
        version: changes whenever pages were given back or became findable, so that a request that had no room may have it.
    """

    def __init__(self, page_manager: PageManager, max_num_seqs: int) -> None:
        self._pages = page_manager
        self.sequences: list[Sequence] = []
        self.max_num_seqs = max_num_seqs
        self.version = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_admissions = 0
        self._guarded: list[Sequence] = []

    @property
    def has_slot(self) -> bool:
        """Whether one sequence more may run."""
        return bool(self._free_slots)

    @property
    def has_ending(self) -> bool:
        """Whether a sequence's last id is on its way, so that its pages come back soon."""
        return any(sequence.num_tokens >= sequence.max_total_tokens for sequence in self.sequences)

    @property
    def has_returning(self) -> bool:
        """Whether tables get shorter when the steps in flight come back: of a sequence that ends, or behind a window.

        A page that another sequence holds too does not become free by that. Whoever waits for it waits for these steps only: when they
        have come back nothing returns any more, and a victim is chosen.
        """
        if self.has_ending:
            return True
        arithmetic = self._pages.arithmetic
        return any(
            group.first_page(sequence.num_computed_tokens, arithmetic.page_size) > arithmetic.num_given_back(sequence.tables[index])
            for index, group in arithmetic.windows
            for sequence in self.sequences
        )

    @property
    def next_epoch(self) -> int:
        """Number of the admission to come."""
        return self._num_admissions + 1

    def enter(self, sequence: Sequence) -> None:
        """Gives a sequence, which has its cached pages, a slot."""
        sequence.epoch = self.next_epoch
        self._num_admissions += 1
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        insort(self.sequences, sequence, key=_ORDER)
        if is_guarded(sequence):
            self._guarded.append(sequence)

    def leave(self, sequence: Sequence, *, commit: bool) -> None:
        """Takes pages and slot away. `commit`: its whole pages of known tokens become findable first."""
        if commit:
            self._pages.commit(sequence.token_ids, sequence.tables, sequence.num_confirmed_tokens, sequence.prefix)
        sequence.num_pages_freed = self.held_pages(sequence)
        self._pages.release(sequence.tables)
        sequence.tables = self._pages.empty_tables()
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        self.sequences.remove(sequence)
        if self._guarded and sequence in self._guarded:
            self._guarded.remove(sequence)
        self.version += 1

    def slide_windows(self, sequence: Sequence) -> None:
        """Gives back the pages of windowed groups that the next tokens of a sequence do not see.

        What steps in flight compute is kept until they have come back: only then is it known to be good, and findable.
        """
        if self._pages.give_back_behind(sequence.tables, sequence.num_confirmed_tokens):
            self.version += 1

    def victim(self) -> Sequence | None:
        """Who loses its pages next: the last admitted of the lowest priority; None if nobody may be chosen."""
        return next((sequence for sequence in reversed(self.sequences) if not is_guarded(sequence)), None)

    def victims(self, worse_than: int) -> list[Sequence]:
        """All of a strictly lower priority (a larger number) that may lose their pages, the next one first."""
        return [sequence for sequence in reversed(self.sequences) if not is_guarded(sequence) and sequence.priority > worse_than]

    def held_pages(self, sequence: Sequence) -> int:
        """Pages in a sequence's tables."""
        return self._pages.arithmetic.held_pages(sequence.tables)

    def pages_to_come(self, sequence: Sequence, least: int = 0) -> int:
        """Pages beyond those that a sequence holds: for the step after this one, or for all that it can ever compute.

        `least` as for `PageArithmetic.pages_to_come`: 1 to be sure of the next step, 0 for what is kept until the end.
        """
        # The last token of an answer is never computed, nor in the next step the one that it will sample.
        most = sequence.max_total_tokens - 1
        num_tokens = most if is_guarded(sequence) else min(sequence.num_tokens + (sequence.num_pending_ids == 0), most)
        return self._pages.pages_to_come(sequence.tables, num_tokens, least)

    def kept_pages(self, sequence: Sequence) -> int:
        """Pages that must stay available for guarded sequences other than this one."""
        return sum(self.pages_to_come(other) for other in self._guarded if other is not sequence)

    def fitting_tokens(self, sequence: Sequence, num_tokens: int) -> int:
        """The next tokens of a sequence, `num_tokens` at most, for which there are pages without taking anybody's."""
        pages, table = self._pages, sequence.tables[0]
        spare = pages.num_available - self.kept_pages(sequence)
        if pages.arithmetic.windows:
            # A chunk longer than the window takes pages that were not asked for at admission, so they must not be promised.
            others = self.promised_pages() - self.pages_to_come(sequence, 1)
            least = pages.arithmetic.pages_for(sequence.num_computed_tokens + 1) - len(table)
            spare = max(pages.num_available - others, min(spare, least * len(pages.groups)))
        room = (len(table) + max(0, spare) // len(pages.groups)) * pages.page_size - sequence.num_computed_tokens
        return max(0, min(num_tokens, room))

    def promised_pages(self) -> int:
        """Pages that the running sequences will ask for soon, or are sure of."""
        return sum([self.pages_to_come(sequence, 1) for sequence in self.sequences])

    def check(self) -> None:
        """Verifies slots and order. Raises AssertionError naming what is wrong."""
        slots = [sequence.slot for sequence in self.sequences]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), f"slots {slots} and free {self._free_slots}"
        assert self.sequences == sorted(self.sequences, key=_ORDER), "the running sequences are out of order"
        assert self._guarded == [sequence for sequence in self._guarded if sequence in self.sequences], "a guarded sequence has left"
        assert len(self._guarded) == sum(map(is_guarded, self.sequences)), "a sequence is guarded and not known as such"
        if not self._pages.arithmetic.windows:
            # A window may lag behind by what is in flight.
            kept = sum(map(self.pages_to_come, self._guarded))
            assert kept <= self._pages.num_available, "pages that are kept for somebody were given away"
