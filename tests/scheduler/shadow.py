"""A pool that notices every wrong page.

`ShadowRunner` stands where the device stands. For each token of a step it writes one number into a plain list, at the slot
that the sequence's page table names, once for every KV group; the number depends on the whole history up to that token, as
keys and values do. Then it reads back, through the page tables, all that the row's tokens can see. Whatever the scheduler or
the page manager does wrong with a page (shared too early, recycled too early, given back while it is still seen, matched to
another prefix, one short) reads back as another number.

Steps wait in a queue, as on a device: a step is packed when it is scheduled and runs later, with the page tables of then.
Ids that the host did not know come from the slots.
"""

from collections import deque
from typing import NamedTuple

from jaxpaged.page_manager import PageManager
from jaxpaged.scheduler import ScheduledRow, ScheduledStep, Sequence
from tests.scheduler.table_model import Truth

NO_ID = -1
POISON = -2
"""Stored where a row's numbers became useless."""


class _PackedRow(NamedTuple):
    row: ScheduledRow
    tables: tuple[tuple[int, ...], ...]
    token_ids: tuple[int, ...] | None
    version: int


class ShadowRunner:
    """The device: packed steps in, token ids out."""

    def __init__(self, page_manager: PageManager) -> None:
        self._pages = page_manager
        self._pool = [-1] * (page_manager.num_pages * page_manager.page_size)
        self._slot_ids: dict[int, int] = {}
        self._queue: deque[list[_PackedRow]] = deque()
        self._truths: dict[Sequence, Truth] = {}
        self._poisoned: set[Sequence] = set()
        self._version = 0  # of the weights
        self._versions = [0] * len(self._pool)
        self._first_versions: dict[int, int] = {}  # epoch -> weights when its first row was packed

    def change_weights(self) -> None:
        """From the next step on numbers come from other weights: the prefix cache has to be reset at the same moment."""
        self._version += 1

    def truth(self, sequence: Sequence) -> Truth:
        """What the sequence's tokens have to be."""
        if sequence not in self._truths:
            self._truths[sequence] = Truth(sequence.request)
        return self._truths[sequence]

    def dispatch(self, step: ScheduledStep) -> None:
        """Packs a step, and looks at the pages that it is going to write."""
        packed = []
        for row in step.rows:
            sequence, end = row.sequence, row.start + row.num_tokens
            token_ids = None if row.takes_from_slot else tuple(sequence.token_ids[row.start : end])
            packed.append(_PackedRow(row, tuple(map(tuple, sequence.tables)), token_ids, self._version))
            self._first_versions.setdefault(row.epoch, self._version)
            self._check_written_pages(row, end)
        self._queue.append(packed)

    def execute(self, fails: frozenset[int] = frozenset()) -> list[int]:
        """Runs the step that was packed first; returns one id for each row, NO_ID where none is sampled.

        Args:
            fails: rows whose numbers turn out useless; those that sample return NO_ID.
        """
        packed = self._queue.popleft()
        for index, (row, tables, token_ids, version) in enumerate(packed):
            truth, end = self.truth(row.sequence), row.start + row.num_tokens
            truth.reach(end)
            if token_ids is None:
                assert row.num_tokens == 1
                token_ids = (self._slot_ids[row.slot],)
            if row.sequence not in self._poisoned:
                assert token_ids == tuple(truth.tokens[row.start : end]), f"{row.sequence} computes tokens that are not its own"
            if index in fails and row.samples:
                self._poisoned.add(row.sequence)
            is_poisoned = row.sequence in self._poisoned
            for group, table in enumerate(tables):
                for position in range(row.start, end):
                    place = self._place(table, position)
                    self._pool[place] = POISON if is_poisoned else truth.numbers[position] ^ group
                    self._versions[place] = version
        ids = []
        for row, tables, *_ in packed:
            end = row.start + row.num_tokens
            if row.sequence in self._poisoned:
                ids.append(NO_ID)
                self._slot_ids[row.slot] = 0
                continue
            for group, table in enumerate(tables):
                self._verify(row, group, table, end)
            ids.append(self.truth(row.sequence).sampled_after(end) if row.samples else NO_ID)
            if row.samples:
                self._slot_ids[row.slot] = ids[-1]
        return ids

    def _check_written_pages(self, row: ScheduledRow, end: int) -> None:
        size, pages = self._pages.page_size, self._pages
        for table in row.sequence.tables:
            assert len(table) * size >= end, f"{row.sequence} has too few pages"
            for page in table[row.start // size : (end - 1) // size + 1]:
                assert page != 0, f"{row.sequence} writes to page 0"
                assert pages.ref_count(page) == 1, f"page {page} is written and shared"
                assert not pages.is_shareable(page), f"page {page} is written, and a match could find it"

    def _place(self, table: tuple[int, ...], position: int) -> int:
        size = self._pages.page_size
        return table[position // size] * size + position % size

    def _verify(self, row: ScheduledRow, group: int, table: tuple[int, ...], end: int) -> None:
        """Reads all that the row's tokens can see."""
        size, window = self._pages.page_size, self._pages.groups[group].window
        first = 0 if window is None else max(0, row.start - window + 1)
        pages = table[first // size : (end - 1) // size + 1]
        assert all(pages), f"{row.sequence} has given back a page that it still sees"
        places = [place for page in pages for place in range(page * size, (page + 1) * size)][first % size : end - first + first % size]
        expected = self.truth(row.sequence).numbers[first:end]
        read = [self._pool[place] ^ group for place in places]
        assert read == expected, f"{row.sequence} reads a page of group {group} that is not its own"
        oldest = min(self._versions[place] for place in places)
        assert oldest >= self._first_versions[row.epoch], f"{row.sequence} was given a page from before the cache was reset"
