"""A page manager driven at random beside a model of it that stores whole prefixes where the real one stores digests.

Run by Hypothesis (`test_page_manager_states.py`), and against planted bugs (`test_planted_bugs.py`). The numbers in the
comments are the twelve invariants that hold after every rule.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.page_manager import PageManager

Prefix = tuple[str | None, tuple[int, ...]]
"""A salt and all tokens up to the end of a page: what a shared page must agree in."""

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass
class Table:
    """One sequence's tokens and page table."""

    salt: str | None
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    digests: list[bytes] = field(default_factory=list)


class PageMachine(RuleBasedStateMachine):
    """Sequences that start, grow, lose their pages, come back and end, over a two-token alphabet and at most 11 usable pages."""

    @initialize(num_usable=st.integers(1, 11), page_size=st.integers(1, 3))
    def build(self, num_usable: int, page_size: int) -> None:
        self.size = page_size
        self.manager = PageManager(num_usable + 1, page_size)
        self.tables: list[Table] = []
        self.stored: dict[tuple[int, int], Prefix] = {}  # (page, offset) -> what was written there
        self.free = set(range(1, num_usable + 1))
        self.idle: list[int] = []  # the next to be recycled first
        self.refs = [0] * (num_usable + 1)
        self.registered: dict[Prefix, int] = {}
        self.full: dict[int, Prefix | None] = {}  # None: may never be shared again

    # What the model says

    def expected_match(self, table: Table) -> list[int]:
        pages = []
        for end in range(self.size, len(table.tokens), self.size):  # 9: never the last token
            page = self.registered.get((table.salt, tuple(table.tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    def model_release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.refs[page] -= 1
            if self.refs[page] == 0:
                prefix = self.full.get(page)
                if prefix is not None and self.registered.setdefault(prefix, page) == page:
                    self.idle.append(page)
                else:
                    self.free.add(page)
                    self.full.pop(page, None)

    def model_recycle(self, page: int) -> None:
        prefix = self.full.pop(page)
        assert prefix is not None
        del self.registered[prefix]  # 8

    # Both, side by side

    def match(self, table: Table) -> None:
        expected = self.expected_match(table)
        table.pages = self.manager.match(table.tokens, salt=table.salt, digests=table.digests)
        assert table.pages == expected
        table.num_computed = len(table.pages) * self.size
        for page in table.pages:
            if self.refs[page] == 0:
                self.idle.remove(page)
            self.refs[page] += 1

    def allocate(self, num_pages: int) -> list[int] | None:
        pages = self.manager.allocate(num_pages)
        if num_pages > len(self.free) + len(self.idle):
            assert pages is None  # 11: the comparison after the rule sees any change
            return None
        assert pages is not None
        assert len(pages) == num_pages
        num_free = min(num_pages, len(self.free))
        assert set(pages[:num_free]) <= self.free, "a page that is not free was given out before the free ones were gone"  # 4
        assert pages[num_free:] == self.idle[: num_pages - num_free], "not the oldest idle page was recycled"  # 10
        for page in pages[:num_free]:
            self.free.remove(page)
        for page in pages[num_free:]:
            self.idle.remove(page)
            self.model_recycle(page)
        for page in pages:
            self.refs[page] = 1
        return pages

    def release(self, table: Table) -> None:
        self.manager.release(table.pages)
        self.model_release(table.pages)
        table.pages, table.num_computed = [], 0

    def compute(self, table: Table, num_tokens: int) -> bool:
        """Gives the next tokens pages, writes them, and commits; False when there are no pages."""
        end = table.num_computed + num_tokens
        pages = self.allocate(self.manager.pages_for(end) - len(table.pages))
        if pages is None:
            return False
        table.pages += pages
        for position in range(table.num_computed, end):
            page = table.pages[position // self.size]
            assert self.refs[page] == 1, f"page {page} is written and shared"  # 5
            assert not self.manager.is_shareable(page), f"page {page} is written, and a match could find it"  # 5
            self.stored[page, position % self.size] = (table.salt, tuple(table.tokens[: position + 1]))
        table.num_computed = end
        self.manager.commit(table.tokens, table.pages, end, salt=table.salt, digests=table.digests)
        for index in range(end // self.size):
            page = table.pages[index]
            if page not in self.full:
                is_tainted = index > 0 and self.full[table.pages[index - 1]] is None
                self.full[page] = None if is_tainted else (table.salt, tuple(table.tokens[: (index + 1) * self.size]))
                if not is_tainted:
                    self.registered.setdefault((table.salt, tuple(table.tokens[: (index + 1) * self.size])), page)
        return True

    # Rules

    @rule(tokens=TOKENS, salt=st.sampled_from([None, None, "a", "b"]))
    def start(self, tokens: list[int], salt: str | None) -> None:
        table = Table(salt, tokens)
        self.match(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 20), num_tokens=st.integers(1, 9))
    def prefill_chunk(self, index: int, num_tokens: int) -> None:
        table = self.tables[index % len(self.tables)]
        self.compute(table, min(num_tokens, len(table.tokens) - table.num_computed))

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 20), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, index: int, tokens: list[int]) -> None:
        table = self.tables[index % len(self.tables)]
        table.tokens += tokens
        self.compute(table, len(table.tokens) - table.num_computed)

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 20))
    def fork(self, index: int) -> None:
        table = self.tables[index % len(self.tables)]
        self.start(list(table.tokens), table.salt)

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 20))
    def preempt(self, index: int) -> None:
        self.release(self.tables[index % len(self.tables)])

    @precondition(lambda self: any(not table.pages for table in self.tables))
    @rule()
    def resume(self) -> None:
        self.match(next(table for table in self.tables if not table.pages))

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 20))
    def end(self, index: int) -> None:
        self.release(self.tables.pop(index % len(self.tables)))

    @rule(num_recycled=st.integers(0, 11))
    def evict(self, num_recycled: int) -> None:
        pages = self.allocate(len(self.free) + num_recycled % (len(self.idle) + 1))
        assert pages is not None
        self.manager.release(pages)
        self.model_release(pages)

    @precondition(lambda self: any(table.pages for table in self.tables))
    @rule()
    def flush(self) -> None:
        self.manager.reset_prefix_cache()
        for page in self.idle:
            self.model_recycle(page)
        self.free.update(self.idle)
        self.idle.clear()
        self.registered.clear()
        for page, refs in enumerate(self.refs):
            if refs > 0:
                self.full[page] = None

    @rule()
    def allocate_too_much(self) -> None:
        assert self.allocate(len(self.free) + len(self.idle) + 1) is None

    @precondition(lambda self: len(self.tables) > 3)
    @rule()
    def everything_ends(self) -> None:
        while self.tables:
            self.end(0)
            self.books_agree()
        self.flush()
        assert self.manager.num_free == self.manager.num_usable  # 12

    # After every rule

    @invariant()
    def books_agree(self) -> None:
        manager = self.manager
        manager.check([table.pages for table in self.tables])  # 1, 2, 3, 4, 7, 8
        assert manager.num_free == len(self.free)
        assert manager.num_cached_idle == len(self.idle)
        assert manager.num_in_use == sum(refs > 0 for refs in self.refs)
        assert manager.num_available == len(self.free) + len(self.idle)
        assert [manager.ref_count(page) for page in range(manager.num_pages)] == self.refs
        shareable = {page for page in range(manager.num_pages) if manager.is_shareable(page)}
        assert shareable == set(self.registered.values())  # 7, 8

    @invariant()
    def tables_read_back(self) -> None:
        for table in self.tables:
            assert len(table.pages) == -(-table.num_computed // self.size)  # 6
            for position in range(table.num_computed):
                stored = self.stored[table.pages[position // self.size], position % self.size]
                assert stored == (table.salt, tuple(table.tokens[: position + 1]))  # 5, 7
