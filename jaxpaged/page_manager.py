"""Who holds which page of the KV pool: reference counts, prefix sharing, and what may be recycled.

A page is in exactly one of three states:

    free         holds nothing of use
    cached idle  nobody uses it, a match finds it; the least recently released is recycled first
    in use       one or more sequences have it in their page table (the reference count)

Page 0 is read by padding only and never given out, so a pool of `num_pages` has `num_pages - 1` usable ones.
Only the engine's thread calls this.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxpaged.errors import ConfigError
from jaxpaged.prefix_index import UNSHARED, PrefixIndex, extend_digests


class PageManager:
    """Hands out pages, takes them back, and remembers what full pages hold.

    Args:
        num_pages: pages of the pool, page 0 included; at least 2.
        page_size: tokens per page.
        enable_prefix_caching: whether full pages are shared between sequences that begin alike.

    Raises:
        ConfigError: the pool has no usable page.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                f"The page pool has {num_pages} pages of {page_size} tokens, and page 0 is never given out: give it memory for 2 pages "
                "at least (--cache.memory)"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_pages
        # A stack: the page freed last is given out first, and a fresh pool is given out from page 1 on.
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex(num_pages)

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
    def num_available(self) -> int:
        """Pages that `allocate` could give out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Pages in at least one page table."""
        return self.num_usable - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence take."""
        return -(-num_tokens // self.page_size)

    def match(self, token_ids: Sequence[int], *, salt: str | None = None, digests: list[bytes] | None = None) -> list[int]:
        """Takes a reference on each page of the longest cached chain of whole pages that `token_ids` begins with.

        The last token is never covered, so that there is something left to compute.

        Args:
            token_ids: prompt, or prompt and answer so far.
            salt: only pages committed under the same salt match.
            digests: the sequence's own list of page digests, lengthened in place, so that no page is hashed twice.

        Returns:
            Pages in order; the caller owns one reference on each and gives it back with `release`.
        """
        pages: list[int] = []
        if not self.enable_prefix_caching:
            return pages
        digests = [] if digests is None else digests
        for index in range(self._max_hit_pages(len(token_ids))):
            if index == len(digests):
                extend_digests(digests, token_ids, index + 1, self.page_size, salt)
            page = self._index.find(digests[index])
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self._take(page)
        return pages

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

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference on each of `pages`, which are in the order of a page table.

        Of pages that become idle together the last is recycled first: a chain whose beginning is gone cannot be matched.

        Raises:
            AssertionError: a page is not in use.
        """
        for page in reversed(pages):
            if self._refs[page] < 1:
                raise AssertionError(f"page {page} was released, and nobody uses it")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._index.keep(page):
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def commit(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        num_computed: int,
        *,
        salt: str | None = None,
        digests: list[bytes] | None = None,
    ) -> None:
        """Makes the whole pages among the first `num_computed` tokens findable; pages committed before cost nothing.

        Args:
            token_ids: the ids behind the pages; pages that hold tokens beyond them are left out.
            pages: the sequence's page table.
            num_computed: tokens whose keys and values are in the pool (or will be, before any later step reads them).
            salt: as for `match`.
            digests: as for `match`.
        """
        if not self.enable_prefix_caching:
            return
        num_full = self._num_full_pages(min(num_computed, len(token_ids)))
        first = num_full
        while first > 0 and self._index.digest(pages[first - 1]) is None:
            first -= 1
        if first == num_full:
            return
        if first > 0 and self._index.digest(pages[first - 1]) == UNSHARED:
            for page in pages[first:num_full]:
                self._index.record(page, UNSHARED)
            return
        digests = [] if digests is None else digests
        extend_digests(digests, token_ids, num_full, self.page_size, salt)
        for index in range(first, num_full):
            self._index.record(pages[index], digests[index])

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages, and makes sure that what running sequences hold now is never shared either."""
        while self._idle:
            self._free.append(self._recycle())
        for page, refs in enumerate(self._refs):
            if refs > 0:
                self._index.forget(page)
                self._index.record(page, UNSHARED)

    def is_shareable(self, page: int) -> bool:
        """Whether a match may find `page`."""
        return self._index.is_registered(page)

    def ref_count(self, page: int) -> int:
        """Page tables that hold `page`."""
        return self._refs[page]

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
            wrong = [page for page in range(self.num_pages) if expected[page] != self._refs[page]]
            assert not wrong, f"reference counts of pages {wrong} are not the number of tables that hold them"

    def _max_hit_pages(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self.page_size

    def _num_full_pages(self, num_tokens: int) -> int:
        return num_tokens // self.page_size

    def _take(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._idle[page]
        self._refs[page] += 1

    def _recycle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._index.forget(page)
        return page
