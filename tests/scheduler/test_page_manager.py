"""The page manager, one rule at a time."""

import hashlib
import random

import pytest

from jaxpaged import prefix_index
from jaxpaged.errors import ConfigError
from jaxpaged.kv_groups import PageTables
from jaxpaged.page_manager import PageManager
from jaxpaged.prefix_index import PrefixChain, page_digest, root_digest


def grown(manager: PageManager, num_tokens: int) -> PageTables:
    """Page tables of their own for `num_tokens` tokens."""
    tables = manager.empty_tables()
    assert manager.grow(tables, num_tokens)
    return tables


def cache_tokens(manager: PageManager, token_ids: list[int], salt: str | None = None) -> list[int]:
    """Computes and commits `token_ids` from nothing and lets them go; returns the pages."""
    tables = grown(manager, len(token_ids))
    manager.commit(token_ids, tables, len(token_ids), fresh(manager, salt))
    manager.release(tables)
    manager.check([])
    return tables[0]


def fresh(manager: PageManager, salt: str | None = None) -> PrefixChain:
    """The place in the cache of a sequence that was matched just now and found nothing."""
    prefix = PrefixChain(salt)
    manager.match([0], prefix)
    return prefix


def hit_tokens(manager: PageManager, token_ids: list[int], salt: str | None = None) -> int:
    """How many of `token_ids` a match finds; leaves no reference behind."""
    tables = manager.match(token_ids, PrefixChain(salt))
    manager.release(tables)
    return len(tables[0]) * manager.page_size


def test_page_zero_is_never_given_out() -> None:
    manager = PageManager(21, 16)
    assert (manager.num_usable, manager.num_available) == (20, 20)
    assert manager.allocate(20) == list(range(1, 21))
    assert manager.allocate(1) is None


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (2, 0)])
def test_pool_without_a_usable_page_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="page 0 is never given out"):
        PageManager(num_pages, page_size)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_is_exact_at_multiples(num_tokens: int, num_pages: int) -> None:
    assert PageManager(2, 16).pages_for(num_tokens) == num_pages


def test_failed_allocation_changes_nothing() -> None:
    manager = PageManager(6, 4)
    cache_tokens(manager, list(range(9)))
    before = (manager.num_free, manager.num_cached_idle, manager.num_in_use)
    assert manager.allocate(6) is None
    assert (manager.num_free, manager.num_cached_idle, manager.num_in_use) == before == (3, 2, 0)
    assert hit_tokens(manager, list(range(9))) == 8
    assert manager.allocate(0) == []


def test_release_of_a_page_that_nobody_uses_raises() -> None:
    manager = PageManager(4, 4)
    pages = manager.allocate(2)
    assert pages is not None
    manager.release((pages,))
    for page in pages:
        with pytest.raises(AssertionError, match=f"page {page} was released"):
            manager.release(([page],))


@pytest.mark.parametrize(
    ("page_size", "num_cached", "num_tokens", "num_hit"),
    [
        # O-39: the same prompt again, at multiples of the page size.
        (16, 16, 16, 0),
        (16, 32, 32, 16),
        (16, 48, 48, 32),
        # Length 16 then 17, and 17 then 16.
        (16, 16, 17, 16),
        (16, 17, 16, 0),
        # O-37's lengths: only whole pages, never the last token.
        (16, 15, 40, 0),
        (16, 31, 40, 16),
        (16, 33, 40, 32),
        (16, 160, 161, 160),
        (1, 5, 5, 4),
        (1, 1, 1, 0),
        (4, 8, 0, 0),
    ],
)
def test_hit_length(page_size: int, num_cached: int, num_tokens: int, num_hit: int) -> None:
    manager = PageManager(200, page_size)
    tokens = [position % 7 for position in range(200)]
    cache_tokens(manager, tokens[:num_cached])
    assert hit_tokens(manager, tokens[:num_tokens]) == num_hit


def test_match_takes_references() -> None:
    manager = PageManager(6, 2)
    pages = cache_tokens(manager, [1, 2, 3, 4, 5])
    first = manager.match([1, 2, 3, 4, 5], PrefixChain())
    second = manager.match([1, 2, 9], PrefixChain())
    assert (first, second) == ((pages[:2],), (pages[:1],))
    manager.check([*first, *second])
    assert (manager.num_in_use, manager.num_cached_idle) == (2, 0)
    assert (manager.num_sole_pages(first), manager.num_sole_pages(second)) == (1, 0)
    manager.release(first)
    assert manager.ref_count(pages[0]) == 1
    manager.release(second)
    assert manager.num_cached_idle == 2


def test_prefixes_with_the_same_page_in_another_place_do_not_meet() -> None:
    manager = PageManager(20, 2)
    cache_tokens(manager, [1, 1, 2, 2, 3, 3])
    assert hit_tokens(manager, [2, 2, 3, 3, 0]) == 0
    assert hit_tokens(manager, [1, 1, 3, 3, 0]) == 2


def test_salts_do_not_meet() -> None:
    manager = PageManager(40, 2)
    tokens = [1, 2, 3, 4, 5]
    for salt in (None, "", "a", "salt"):
        assert hit_tokens(manager, tokens, salt) == 0
        cache_tokens(manager, tokens, salt)
    for salt in (None, "", "a", "salt"):
        assert hit_tokens(manager, tokens, salt) == 4
    assert hit_tokens(manager, tokens, "A") == 0


def test_least_recently_released_is_recycled_first_and_leaves_before_their_parents() -> None:
    manager = PageManager(7, 1)
    old, new = [1, 2, 3, 0], [4, 5, 6, 0]
    cache_tokens(manager, old[:3])
    cache_tokens(manager, new[:3])
    hits = []
    for _ in range(6):
        pages = manager.allocate(manager.num_free + 1)
        assert pages is not None
        manager.release((pages,))
        # Looked at on a twin, since a match would make pages young again.
        hits.append((sum(manager.is_shareable(page) for page in (1, 2, 3)), sum(manager.is_shareable(page) for page in (4, 5, 6))))
    assert hits == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_match_makes_pages_young_again() -> None:
    manager = PageManager(5, 1)
    cache_tokens(manager, [1, 2])
    cache_tokens(manager, [3, 4])
    assert hit_tokens(manager, [1, 2, 0]) == 2
    manager.release(grown(manager, 2))
    assert hit_tokens(manager, [1, 2, 0]) == 2
    assert hit_tokens(manager, [3, 4, 0]) == 0


def test_recycled_page_is_forgotten_at_once() -> None:
    manager = PageManager(3, 2)
    cache_tokens(manager, [1, 2, 3, 4])
    tables = grown(manager, 4)
    assert manager.match([1, 2, 3, 4, 5], PrefixChain()) == ([],)
    manager.check(tables)


def test_only_whole_computed_pages_are_committed() -> None:
    manager = PageManager(6, 4)
    tokens = list(range(12))
    tables, prefix = grown(manager, 12), fresh(manager)
    manager.commit(tokens, tables, 7, prefix)
    assert [manager.is_shareable(page) for page in tables[0]] == [True, False, False]
    manager.commit(tokens[:8], tables, 12, prefix)  # computed, but the ids are not known yet
    assert [manager.is_shareable(page) for page in tables[0]] == [True, True, False]
    manager.release(tables)
    assert (manager.num_cached_idle, manager.num_free) == (2, 3)
    manager.check([])


def test_second_commit_of_the_same_page_stays_private() -> None:
    manager = PageManager(9, 2)
    tokens = [1, 2, 3, 4]
    first, second = grown(manager, 4), grown(manager, 4)
    manager.commit(tokens, first, 4, fresh(manager))
    manager.commit(tokens, second, 4, fresh(manager))
    assert [manager.is_shareable(page) for page in second[0]] == [False, False]
    third = manager.match([*tokens, 5], PrefixChain())
    assert third == first
    manager.release(first)
    manager.release(second)
    assert manager.num_free == 6  # the duplicate holds nothing of use
    manager.release(third)
    assert manager.num_cached_idle == 2
    manager.check([])


def test_private_page_takes_the_entry_when_the_first_one_is_gone() -> None:
    manager = PageManager(5, 2)
    tokens = [1, 2, 3, 4]
    first, second = grown(manager, 4), grown(manager, 4)
    (first_pages,) = first
    manager.commit(tokens, first, 4, fresh(manager))
    manager.commit(tokens, second, 4, fresh(manager))
    manager.release((list(first_pages),))
    other = grown(manager, 4)
    assert other == ([first_pages[1], first_pages[0]],)
    assert hit_tokens(manager, [*tokens, 5]) == 0
    manager.release(second)
    assert manager.match([*tokens, 5], PrefixChain()) == second
    manager.check([*other, *second])


def test_caching_off_finds_and_keeps_nothing() -> None:
    manager = PageManager(5, 2, enable_prefix_caching=False)
    cache_tokens(manager, [1, 2, 3, 4])
    assert manager.num_free == 4
    assert manager.match([1, 2, 3, 4, 5], PrefixChain()) == ([],)


def test_reset_while_pages_are_in_use() -> None:
    manager = PageManager(10, 2)
    cache_tokens(manager, [7, 7, 7])
    tokens = [1, 2, 3]
    running, prefix = grown(manager, 3), fresh(manager)
    manager.commit(tokens, running, 3, prefix)
    manager.reset_prefix_cache()
    assert manager.num_cached_idle == 0
    # The page that was half full is not shared either, nor what comes after it.
    tokens += [4, 5, 6]
    assert manager.grow(running, 6)
    manager.commit(tokens, running, 6, prefix)
    manager.check(running)
    assert hit_tokens(manager, [*tokens, 0]) == 0
    manager.release(running)
    assert manager.num_free == 9
    cache_tokens(manager, tokens)
    assert hit_tokens(manager, [*tokens, 0]) == 6


def test_digest_is_whole_and_covers_parent_and_tokens() -> None:
    # O-45: 256 bits, not cut short, so equal digests are equal prefixes.
    root = root_digest(None)
    expected = hashlib.sha256(root + b"".join(token.to_bytes(8, "little") for token in (5, 2**31 - 1)))
    assert page_digest(root, [5, 2**31 - 1]) == expected.digest()
    assert len(page_digest(root, [5])) == len(root) == 32
    rng = random.Random(0)
    digests, parent = set(), root
    for _ in range(20_000):
        parent = page_digest(parent, [rng.randrange(2)])
        digests.add(parent)
    assert len(digests) == 20_000


def test_salts_and_adapters_are_told_apart() -> None:
    names = (None, "", "a", "b", "ab", "adapter", "salt", "a\x00", "é", "\ud800")
    assert len({root_digest(salt, adapter) for salt in names for adapter in names}) == len(names) ** 2
    manager, tokens = PageManager(20, 2), [1, 2, 3, 4]
    for salt, adapter in ((None, None), ("a", None), (None, "a"), ("a", "a")):
        prefix = PrefixChain(salt, adapter)
        assert manager.match([*tokens, 5], prefix) == ([],)
        tables = grown(manager, 4)
        manager.commit(tokens, tables, 4, prefix)
        manager.release(tables)
        found = manager.match([*tokens, 5], PrefixChain(salt, adapter))
        assert len(found[0]) == 2
        manager.release(found)


def test_no_page_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[list[int]] = []

    def counted(parent: bytes, token_ids: list[int]) -> bytes:
        hashed.append(token_ids)
        return page_digest(parent, token_ids)

    monkeypatch.setattr(prefix_index, "page_digest", counted)
    manager, prefix = PageManager(20, 2), PrefixChain()
    tokens = [1, 2, 3, 4, 5]
    for _ in range(3):
        assert manager.match(tokens, prefix) == ([],)
    assert hashed == [[1, 2]]  # the search ends at the first page that is not there
    tables = grown(manager, 20)
    for num_computed in range(1, 20):
        if num_computed >= len(tokens):
            tokens.append(num_computed)
        manager.commit(tokens, tables, num_computed, prefix)
    assert len(hashed) == 9
    manager.release(tables)
    assert len(manager.match(tokens, prefix)[0]) == 9
    assert len(hashed) == 9


def test_check_notices_a_table_that_is_not_accounted_for() -> None:
    manager = PageManager(5, 2)
    pages = manager.allocate(2)
    assert pages is not None
    manager.check([pages])
    for tables in ([], [pages, pages], [[pages[0], 3]]):
        with pytest.raises(AssertionError, match="reference counts of pages"):
            manager.check(tables)
