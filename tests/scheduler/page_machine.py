"""A page manager driven at random beside a model of it that stores whole prefixes where the real one stores digests.

Run by Hypothesis (`test_page_manager_states.py`), and against planted bugs (`test_planted_page_bugs.py`). The numbers in the
comments are the twelve invariants that hold after every rule.
"""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.kv_groups import FULL, KVGroup, PageTables
from jaxpaged.page_manager import PageManager
from jaxpaged.prefix_index import PrefixChain

Key = tuple[int, str | None, tuple[int, ...]]
"""A group, a salt and all tokens up to the end of a page: what a shared page must agree in."""

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
GROUPS = st.sampled_from([(FULL,), (FULL, KVGroup(2)), (FULL, KVGroup(4)), (KVGroup(3),), (KVGroup(1), FULL, KVGroup(5))])


@dataclass(eq=False)
class Table:
    """One sequence's tokens and page tables."""

    salt: str | None
    tokens: list[int]
    tables: PageTables = ()
    num_computed: int = 0
    position: int = 0  # the token that was computed last sees nothing behind its window
    is_stale: bool = False
    prefix: PrefixChain = field(default_factory=PrefixChain)

    @property
    def has_pages(self) -> bool:
        return any(map(any, self.tables))


class PageMachine(RuleBasedStateMachine):
    """Sequences that start, grow, lose their pages, come back and end, over a two-token alphabet and at most 11 usable pages."""

    @initialize(num_usable=st.integers(1, 11), page_size=st.integers(1, 3), groups=GROUPS)
    def build(self, num_usable: int, page_size: int, groups: tuple[KVGroup, ...]) -> None:
        self.size, self.groups = page_size, groups
        self.manager = PageManager(num_usable + 1, page_size, groups=groups)
        self.tables: list[Table] = []
        self.stored: dict[tuple[int, int], Key] = {}  # (page, offset) -> what was written there
        self.free = set(range(1, num_usable + 1))
        self.idle: list[int] = []  # the next to be recycled first
        self.refs = [0] * (num_usable + 1)
        self.registered: dict[Key, int] = {}
        self.full: dict[int, Key] = {}

    # What the model says

    def first_seen(self, group: KVGroup, position: int) -> int:
        """The first page that the token at `position` sees."""
        return 0 if group.window is None else max(0, position - group.window + 1) // self.size

    def expected_match(self, table: Table) -> PageTables:
        for num_pages in range((len(table.tokens) - 1) // self.size, -1, -1):  # 9: never the last token
            tables: PageTables = tuple([] for _ in self.groups)
            for index, group in enumerate(self.groups):
                first = self.first_seen(group, num_pages * self.size)
                keys = [(index, table.salt, tuple(table.tokens[: (number + 1) * self.size])) for number in range(first, num_pages)]
                tables[index].extend([0] * first + [self.registered.get(key, -1) for key in keys])
            if all(-1 not in pages for pages in tables):
                return tables
        raise AssertionError

    def model_release(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            key = self.full.get(page)
            if key is not None and self.registered.setdefault(key, page) == page:
                self.idle.append(page)
            else:
                self.free.add(page)
                self.full.pop(page, None)

    def model_recycle(self, page: int) -> None:
        del self.registered[self.full.pop(page)]  # 8

    # Both, side by side

    def match(self, table: Table) -> None:
        expected = self.expected_match(table)
        table.tables = self.manager.match(table.tokens, table.prefix)
        assert table.tables == expected
        table.num_computed = table.position = len(expected[0]) * self.size
        table.is_stale = False
        for pages in expected:
            for page in filter(None, pages):
                if self.refs[page] == 0:
                    self.idle.remove(page)
                self.refs[page] += 1

    def allocate(self, num_pages: int) -> list[int] | None:
        pages = self.manager.allocate(num_pages)
        self.model_allocate(num_pages, pages)
        return pages

    def model_allocate(self, num_pages: int, pages: list[int] | None) -> None:
        if num_pages > len(self.free) + len(self.idle):
            assert pages is None  # 11: the comparison after the rule sees any change
            return
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

    def release(self, table: Table) -> None:
        self.manager.release(table.tables)
        for number in range(len(table.tables[0]) - 1, -1, -1):
            for pages in table.tables:
                if pages[number]:
                    self.model_release(pages[number])
        table.tables = self.manager.empty_tables()
        table.num_computed = table.position = 0

    def slide(self, table: Table) -> None:
        """Gives back what the next token does not see."""
        before = [list(pages) for pages in table.tables]
        self.manager.give_back_behind(table.tables, table.num_computed)
        table.position = table.num_computed
        for group, pages in zip(self.groups, before, strict=True):
            for page in reversed(pages[: self.first_seen(group, table.position)]):
                if page:
                    self.model_release(page)

    def compute(self, table: Table, num_tokens: int) -> bool:
        """Gives the next tokens pages, writes them, and commits; False when there are no pages."""
        self.slide(table)
        start, end = table.num_computed, table.num_computed + num_tokens
        num_old = len(table.tables[0])
        is_grown = self.manager.grow(table.tables, end)
        num_new = self.manager.pages_for(end) - num_old
        pages = [page for entries in table.tables for page in entries[num_old:]] if is_grown else None
        self.model_allocate(num_new * len(self.groups), pages)
        if not is_grown:
            return False
        for group, entries in enumerate(table.tables):
            for position in range(start, end):
                page = entries[position // self.size]
                assert self.refs[page] == 1, f"page {page} is written and shared"  # 5
                assert not self.manager.is_shareable(page), f"page {page} is written, and a match could find it"  # 5
                self.stored[page, position % self.size] = (group, table.salt, tuple(table.tokens[: position + 1]))
        table.num_computed = end
        self.manager.commit(table.tokens, table.tables, end, table.prefix)
        if not table.is_stale:
            for group, entries in enumerate(table.tables):
                for number in range(start // self.size, end // self.size):
                    key = (group, table.salt, tuple(table.tokens[: (number + 1) * self.size]))
                    self.full[entries[number]] = key
                    self.registered.setdefault(key, entries[number])
        return True

    # Rules

    @rule(tokens=TOKENS, salt=st.sampled_from([None, None, "a", "b"]))
    def start(self, tokens: list[int], salt: str | None) -> None:
        table = Table(salt, tokens, prefix=PrefixChain(salt))
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

    @precondition(lambda self: any(not table.has_pages for table in self.tables))
    @rule()
    def resume(self) -> None:
        self.match(next(table for table in self.tables if not table.has_pages))

    @precondition(lambda self: self.tables)
    @rule(index=st.integers(0, 20))
    def end(self, index: int) -> None:
        self.release(self.tables.pop(index % len(self.tables)))

    @rule(num_recycled=st.integers(0, 11))
    def evict(self, num_recycled: int) -> None:
        pages = self.allocate(len(self.free) + num_recycled % (len(self.idle) + 1))
        assert pages is not None
        self.manager.release((pages,))
        for page in reversed(pages):
            self.model_release(page)

    @precondition(lambda self: any(table.has_pages for table in self.tables))
    @rule()
    def flush(self) -> None:
        self.manager.reset_prefix_cache()
        for page in self.idle:
            self.model_recycle(page)
        self.free.update(self.idle)
        self.idle.clear()
        self.registered.clear()
        self.full.clear()
        for table in self.tables:
            table.is_stale = True

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
        manager.check([pages for table in self.tables for pages in table.tables])  # 1, 2, 3, 4, 7, 8
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
            for index, (group, pages) in enumerate(zip(self.groups, table.tables, strict=True)):
                assert len(pages) == -(-table.num_computed // self.size)  # 6
                first = min(self.first_seen(group, table.position), len(pages))
                assert [page == 0 for page in pages] == [number < first for number in range(len(pages))]  # 6
                for position in range(first * self.size, table.num_computed):
                    stored = self.stored[pages[position // self.size], position % self.size]
                    assert stored == (index, table.salt, tuple(table.tokens[: position + 1]))  # 5, 7
