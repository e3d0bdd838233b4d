"""Groups of layers that store their keys and values alike, and how many pages a sequence takes in all of them.

A full group keeps every token. A windowed one needs, for the token at position `p`, positions `p - window + 1` to `p`, so
its pages behind the window are given back. All groups share one pool of pages of one size and one numbering; a sequence has
one page table per group, and all its tables have the same length.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from jaxpaged.errors import ConfigError

PageTables = tuple[list[int], ...]
"""One page table per group; the entry 0 stands for a page behind the window that was given back."""


class KVGroup(NamedTuple):
    """Layers with one kind of attention. `window`: positions that a token sees, itself included; None: all."""

    window: int | None = None

    def first_page(self, position: int, page_size: int) -> int:
        """Index of the first page that the token at `position`, or any after it, can still read."""
        return 0 if self.window is None else max(0, position - self.window + 1) // page_size


FULL = KVGroup(None)


class PageArithmetic:
    """How many pages tokens take, over all groups.

    Args:
        groups: at least one.
        page_size: tokens per page.

    Raises:
        ConfigError: no group, or a window under 1.
    """

    def __init__(self, groups: Sequence[KVGroup], page_size: int) -> None:
        if not groups:
            raise ConfigError("A page pool needs at least one KV group")
        if any(group.window is not None and group.window < 1 for group in groups):
            raise ConfigError(f"A window must be at least 1, got {[group.window for group in groups]}")
        self.groups = tuple(groups)
        self.page_size = page_size
        windows = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self.windows = tuple((index, self.groups[index]) for index, _ in windows)
        self.num_full = len(self.groups) - len(windows)
        # The tokens that one new token sees can begin in the middle of a page; and while a step is in flight, the page that
        # it was the last to see is still there.
        self._most_windowed = tuple((window + page_size - 2) // page_size + 2 for _, window in windows)

    def pages_for(self, num_tokens: int) -> int:
        """Entries of one page table for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def pages_between(self, start: int, end: int) -> int:
        """Pages that a sequence holds while tokens `start` to `end` are computed."""
        num_pages = self.pages_for(end) * len(self.groups)
        for _, group in self.windows:
            num_pages -= group.first_page(start, self.page_size)
        return num_pages

    def peak_pages(self, num_tokens: int) -> int:
        """The most pages that a sequence holds on its way to `num_tokens` tokens, computed in chunks as small as need be."""
        in_table = self.pages_for(num_tokens)
        if not self.windows:
            return in_table * self.num_full
        return in_table * self.num_full + sum(min(in_table, most) for most in self._most_windowed)

    def held_pages(self, tables: PageTables) -> int:
        """Pages in `tables`, without those that were given back."""
        num_pages = len(tables[0]) * len(tables)
        for index, _ in self.windows:
            num_pages -= self.num_given_back(tables[index])
        return num_pages

    def pages_to_come(self, tables: PageTables, num_tokens: int, refs: Sequence[int], least: int = 0) -> int:
        """Pages that a sequence with these tables will take beyond them, on its way to `num_tokens` tokens.

        Args:
            tables: the sequence's.
            num_tokens: of the sequence, then.
            refs: of each page of the pool, how many tables hold it.
            least: pages that a windowed group takes at least, if any: with 1, one that holds the most already takes another before
                one behind its window comes back, since steps in flight keep it.
        """
        num_entries = self.pages_for(num_tokens) - len(tables[0])
        if num_entries <= 0:
            return 0
        num_pages = num_entries * self.num_full
        for (index, _), most in zip(self.windows, self._most_windowed, strict=True):
            first = self.num_given_back(tables[index])
            num_more = max(least, most - (len(tables[index]) - first))
            if num_more < num_entries:
                # What others hold as well is not there for it once it is behind the window.
                num_more = max(least, most - sum(refs[page] == 1 for page in tables[index][first:]))
            num_pages += min(num_entries, num_more)
        return num_pages

    def num_given_back(self, table: Sequence[int]) -> int:
        """Entries at the beginning of a windowed table whose pages were given back."""
        return bisect_left(table, True, key=bool)

    def most_tokens(self, num_pages: int, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that fits in `num_pages` pages."""
        if self.peak_pages(limit) <= num_pages:
            return limit
        return bisect_left(range(limit + 1), num_pages + 1, key=self.peak_pages) - 1
