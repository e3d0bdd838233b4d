"""Bugs of the page manager, one patch each, for the tests of the tests."""

from collections.abc import Callable, Sequence

import pytest

from jaxpaged import prefix_index
from jaxpaged.kv_groups import KVGroup, PageTables
from jaxpaged.page_manager import PageManager
from jaxpaged.prefix_index import PrefixChain, PrefixIndex, PrefixKey

Plant = Callable[[pytest.MonkeyPatch], None]

real_allocate = PageManager.allocate
real_commit = PageManager.commit
real_find = PrefixIndex.find
real_first_page = KVGroup.first_page
real_give_back_behind = PageManager.give_back_behind
real_init = PageManager.__init__
real_page_digest = prefix_index.page_digest
real_record = PrefixIndex.record
real_release = PageManager.release
real_root_digest = prefix_index.root_digest


def release_forgets_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "release", lambda self, tables: real_release(self, tuple(pages[1:] for pages in tables)))


def release_frees_the_beginning_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "release", lambda self, tables: real_release(self, tuple(pages[::-1] for pages in tables)))


def release_frees_shared_pages(patch: pytest.MonkeyPatch) -> None:
    def release(self: PageManager, tables: PageTables) -> None:
        for page in (page for pages in tables for page in pages):
            self._refs[page] = 1
        real_release(self, tables)

    patch.setattr(PageManager, "release", release)


def partial_page_is_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "_num_full_pages", lambda self, num_tokens: -(-num_tokens // self.page_size))


def page_is_committed_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    def commit(self: PageManager, token_ids: Sequence[int], tables: PageTables, num_computed: int, prefix: PrefixChain) -> None:
        real_commit(self, token_ids, tables, min(num_computed + 1, len(tables[0]) * self.page_size), prefix)

    patch.setattr(PageManager, "commit", commit)


def hit_covers_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "_max_hit_pages", lambda self, num_tokens: num_tokens // self.page_size)


def hit_takes_no_reference(patch: pytest.MonkeyPatch) -> None:
    def take(self: PageManager, page: int) -> None:
        if self._refs[page] == 0:
            del self._idle[page]
            self._refs[page] = 1

    patch.setattr(PageManager, "_take", take)


def recycled_page_stays_in_the_map(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "_recycle", lambda self: self._idle.popitem(last=False)[0])


def newest_idle_page_is_recycled(patch: pytest.MonkeyPatch) -> None:
    def recycle(self: PageManager) -> int:
        page, _ = self._idle.popitem(last=True)
        self._index.forget(page)
        return page

    patch.setattr(PageManager, "_recycle", recycle)


def digest_ignores_the_parent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_index, "page_digest", lambda parent, token_ids: real_page_digest(b"", token_ids))


def digest_has_three_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_index, "page_digest", lambda parent, token_ids: bytes([real_page_digest(parent, token_ids)[0] % 3]))


def salt_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_index, "root_digest", lambda salt, adapter: real_root_digest(None))


def group_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "find", lambda self, key: real_find(self, (0, key[1])))
    patch.setattr(PrefixIndex, "record", lambda self, page, key: real_record(self, page, (0, key[1])))


def failed_allocation_keeps_pages(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: PageManager, num_pages: int) -> list[int] | None:
        if num_pages > self.num_available:
            real_allocate(self, self.num_available)
            return None
        return real_allocate(self, num_pages)

    patch.setattr(PageManager, "allocate", allocate)


def page_zero_is_given_out(patch: pytest.MonkeyPatch) -> None:
    def init(self: PageManager, num_pages: int, page_size: int, *options: object, **groups: object) -> None:
        real_init(self, num_pages, page_size, *options, **groups)  # type: ignore[arg-type]
        self._free = list(range(num_pages - 2, -1, -1))

    patch.setattr(PageManager, "__init__", init)


def second_commit_takes_the_entry(patch: pytest.MonkeyPatch) -> None:
    def record(self: PrefixIndex, page: int, key: PrefixKey) -> None:
        self._key_of[page] = key
        self._page_of[key] = page

    patch.setattr(PrefixIndex, "record", record)


def flush_forgets_running_pages(patch: pytest.MonkeyPatch) -> None:
    def reset(self: PageManager) -> None:
        while self._idle:
            self._free.append(self._recycle())

    patch.setattr(PageManager, "reset_prefix_cache", reset)


def shared_pages_after_a_flush(patch: pytest.MonkeyPatch) -> None:
    def commit(self: PageManager, token_ids: Sequence[int], tables: PageTables, num_computed: int, prefix: PrefixChain) -> None:
        prefix.generation = self._generation
        real_commit(self, token_ids, tables, num_computed, prefix)

    patch.setattr(PageManager, "commit", commit)


def window_is_one_too_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVGroup, "first_page", lambda self, position, page_size: real_first_page(self, position + 1, page_size))


def page_behind_a_window_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: PageManager, tables: PageTables, position: int) -> int:
        before = [list(table) for table in tables]
        num_pages = real_give_back_behind(self, tables, position)
        for table, pages in zip(tables, before, strict=True):
            table[:] = pages
        return num_pages

    patch.setattr(PageManager, "give_back_behind", give_back)


def windows_never_slide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "give_back_behind", lambda self, tables, position: 0)


def hit_ignores_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageManager, "_longest_windowed_hit", lambda self, index, group, digests, num_pages: num_pages)


PAGE_BUGS: list[Plant] = [
    release_forgets_one,
    release_frees_the_beginning_first,
    release_frees_shared_pages,
    partial_page_is_committed,
    page_is_committed_before_it_is_computed,
    hit_covers_the_last_token,
    hit_takes_no_reference,
    recycled_page_stays_in_the_map,
    newest_idle_page_is_recycled,
    digest_ignores_the_parent,
    digest_has_three_values,
    salt_is_ignored,
    group_is_ignored,
    failed_allocation_keeps_pages,
    page_zero_is_given_out,
    second_commit_takes_the_entry,
    flush_forgets_running_pages,
    shared_pages_after_a_flush,
    window_is_one_too_short,
    page_behind_a_window_is_not_marked,
    windows_never_slide,
    hit_ignores_windows,
]
