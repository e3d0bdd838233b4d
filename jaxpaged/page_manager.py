"""Who holds which page of the KV pool: reference counts, prefix sharing, and what may be recycled.

A page is in exactly one of three states:

    free         holds nothing of use
    cached idle  nobody uses it, a match finds it; the least recently released is recycled first
    in use       one or more sequences have it in a page table (the reference count)

Page 0 is read by padding only and never given out, so a pool of `num_pages` has `num_pages - 1` usable ones. The groups of
layers share the pool (`kv_groups`): a page belongs to whichever group it was given out to. Only the engine's thread calls this.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from jaxpaged.counts import counted
from jaxpaged.errors import ConfigError
from jaxpaged.kv_groups import FULL, KVGroup, PageArithmetic, PageTables
from jaxpaged.prefix_index import PrefixChain, PrefixIndex


class PageManager:
    """Hands out pages, takes them back, and remembers what full pages hold.

    Args:
        num_pages: pages of the pool, page 0 included; at least 2.
        page_size: tokens per page.
        enable_prefix_caching: whether full pages are shared between sequences that begin alike.
        groups: the KV groups of the model; a sequence has one page table for each.

    Raises:
        ConfigError: the pool has no usable page, or a group is not possible.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True, groups: tuple[KVGroup, ...] = (FULL,)) -> None:
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                f"The page pool has {counted(num_pages, 'page')} of {counted(page_size, 'token')}, and page 0 is never given out: "
                "give it memory for 2 pages at least (--cache.memory)"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.arithmetic = PageArithmetic(groups, page_size)
        self.groups = self.arithmetic.groups
        self._refs = [0] * num_pages
        # A stack: the page freed last is given out first, and a fresh pool is given out from page 1 on.
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex(num_pages)
        self._generation = 0

    @property
    def num_usable(self) -> int:
        """Pages that can be given out in all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached_idle(self) -> int:
        """Pages that nobody uses and a match may find."""
        return len(self._idle)

    @property
    def idle_pages(self) -> Collection[int]:
        """Pages that nobody uses and a match may find, the next to be recycled first; a view."""
        return self._idle.keys()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Pages in at least one page table."""
        return self.num_usable - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Entries of one page table for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def empty_tables(self) -> PageTables:
        """The page tables of a sequence without pages."""
        return tuple([] for _ in self.groups)

    def match(self, token_ids: Sequence[int], prefix: PrefixChain) -> PageTables:
        """Takes a reference on each page that is needed of the longest cached beginning of `token_ids`, in whole pages.

        A full group needs all pages of it, a windowed one those that the next token can see; the others are 0 in its table.
        The last token is never covered, so that there is something left to compute.

        Args:
            token_ids: prompt, or prompt and answer so far.
            prefix: the sequence's own.

        Returns:
            New page tables; the caller owns one reference on each page and gives it back with `release`.
        """
        prefix.generation = self._generation
        tables = self.empty_tables()
        if not self.enable_prefix_caching:
            return tables
        num_pages = self._longest_hit(token_ids, prefix)
        for index, group in enumerate(self.groups):
            first = group.first_page(num_pages * self.page_size, self.page_size)
            tables[index].extend([0] * first)
            for digest in prefix.digests[first:num_pages]:
                page = self._index.find((index, digest))
                assert page is not None
                self._take(page)
                tables[index].append(page)
        return tables

    def num_hit_pages(self, token_ids: Sequence[int], prefix: PrefixChain) -> int:
        """Pages that `match` would find now; none is taken."""
        return self._longest_hit(token_ids, prefix) if self.enable_prefix_caching else 0

    def allocate(self, num_pages: int) -> list[int] | None:
        """Gives out `num_pages` private pages, recycling idle cached ones when the free ones run out.

        Returns:
            The pages, one reference each; None when there are not enough, and then nothing has changed.
        """
        if num_pages > self.num_available:
            return None
        pages = []
        for _ in range(num_pages):
            page = self._free.pop() if self._free else self._recycle()
            self._refs[page] = 1
            pages.append(page)
        return pages

    def grow(self, tables: PageTables, num_tokens: int) -> bool:
        """Lengthens page tables so that they hold `num_tokens` tokens; False when there are not enough pages: nothing has changed."""
        num_each = self.pages_for(num_tokens) - len(tables[0])
        pages = self.allocate(num_each * len(tables))
        if pages is None:
            return False
        for index, table in enumerate(tables):
            table += pages[index * num_each : (index + 1) * num_each]
        return True

    def release(self, tables: PageTables) -> None:
        """Gives back one reference on each page of `tables`.

        Of pages that become idle together the last is recycled first: a chain whose beginning is gone cannot be matched.

        Raises:
            AssertionError: a page is not in use.
        """
        for pages in zip(*map(reversed, tables), strict=True):
            for page in pages:
                if page:
                    self._release(page)

    def give_back_behind(self, tables: PageTables, position: int) -> int:
        """Releases the pages of windowed groups that no token from `position` on can see; returns how many.

        Pages should be committed before, or they are not findable afterwards.
        """
        num_given_back = 0
        for index, group in self.arithmetic.windows:
            table, end = tables[index], group.first_page(position, self.page_size)
            while end > 0 and table[end - 1]:
                end -= 1
                self._release(table[end])
                table[end] = 0
                num_given_back += 1
        return num_given_back

    def commit(self, token_ids: Sequence[int], tables: PageTables, num_computed: int, prefix: PrefixChain) -> None:
        """Makes the whole pages among the first `num_computed` tokens findable; pages committed before cost nothing.

        Args:
            token_ids: the ids behind the pages; pages that hold tokens beyond them are left out.
            tables: the sequence's page tables.
            num_computed: tokens whose keys and values are in the pool (or will be, before any later step reads them).
            prefix: the sequence's own. After a `reset_prefix_cache` nothing is committed until its next `match`.
        """
        if not self.enable_prefix_caching or prefix.generation != self._generation:
            return
        num_full = self._num_full_pages(min(num_computed, len(token_ids)))
        index = self._index
        for group, table in enumerate(tables):
            first = num_full
            while first > 0 and table[first - 1] and not index.has_key(table[first - 1]):
                first -= 1
            if first < num_full:
                prefix.extend(token_ids, num_full, self.page_size)
                for number in range(first, num_full):
                    index.record(table[number], (group, prefix.digests[number]))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages, and makes sure that what running sequences hold now is never shared either."""
        self._generation += 1
        while self._idle:
            self._free.append(self._recycle())
        for page, refs in enumerate(self._refs):
            if refs > 0:
                self._index.forget(page)

    def is_shareable(self, page: int) -> bool:
        """Whether a match may find `page`."""
        return self._index.is_registered(page)

    def ref_count(self, page: int) -> int:
        """Page tables that hold `page`."""
        return self._refs[page]

    def num_sole_pages(self, tables: PageTables) -> int:
        """Pages of `tables` that nobody else holds: what their release would make available."""
        refs = self._refs
        return sum(refs[page] == 1 for table in tables for page in table)

    def pages_to_come(self, tables: PageTables, num_tokens: int, least: int = 0) -> int:
        """As `PageArithmetic.pages_to_come`. For windowed groups it changes when others begin or cease to share pages of `tables`."""
        return self.arithmetic.pages_to_come(tables, num_tokens, self._refs, least)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verifies the pool's books; linear in the number of pages.

        Args:
            tables: all page tables that exist, if known: each page's count must be the number of tables that hold it.

        Raises:
            AssertionError: naming what is wrong.
        """
        free, idle = set(self._free), set(self._idle)
        used = {page for page, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert free | idle | used == set(range(1, self.num_pages)), "free, cached idle and in use do not cover the pool"
        assert len(free) + len(idle) + len(used) == self.num_usable, "a page is in two states"
        assert min(self._refs) >= 0, "a reference count is negative"
        self._index.check(free, idle)
        if tables is not None:
            expected = [0] * self.num_pages
            for table in tables:
                for page in table:
                    expected[page] += 1
            wrong = [page for page in range(1, self.num_pages) if expected[page] != self._refs[page]]
            assert not wrong, f"reference counts of pages {wrong} are not the number of tables that hold them"

    def _longest_hit(self, token_ids: Sequence[int], prefix: PrefixChain) -> int:
        """Pages of the longest beginning of `token_ids` that every group can provide."""
        find, digests = self._index.find, prefix.digests
        full = [index for index, group in enumerate(self.groups) if group.window is None]
        num_pages = self._max_hit_pages(len(token_ids))
        if not full:
            prefix.extend(token_ids, num_pages, self.page_size)
        else:
            for number in range(num_pages):
                if number == len(digests):
                    prefix.extend(token_ids, number + 1, self.page_size)
                if any(find((index, digests[number])) is None for index in full):
                    num_pages = number
                    break
        is_settled = not self.arithmetic.windows
        while not is_settled:
            is_settled = True
            for index, group in self.arithmetic.windows:
                shorter = self._longest_windowed_hit(index, group, digests, num_pages)
                if shorter < num_pages:
                    num_pages, is_settled = shorter, False
        return num_pages

    def _longest_windowed_hit(self, index: int, group: KVGroup, digests: Sequence[bytes], num_pages: int) -> int:
        """At most `num_pages`: the longest beginning of which this group has the pages that the next token can see."""
        end = number = num_pages
        while end > 0 and number > group.first_page(end * self.page_size, self.page_size):
            number -= 1
            if self._index.find((index, digests[number])) is None:
                end = number
        return end

    def _max_hit_pages(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.page_size

    def _num_full_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_size

    def _take(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1

    def _release(self, page: int) -> None:
        if self._refs[page] < 1:
            raise AssertionError(f"page {page} was released, and nobody uses it")
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if self._index.keep(page):
                self._idle[page] = None
            else:
                self._free.append(page)

    def _recycle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._index.forget(page)
        return page
