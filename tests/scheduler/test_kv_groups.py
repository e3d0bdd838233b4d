"""Pages of several KV groups: windows slide, hits need only what is seen, and the arithmetic of how much fits."""

import random

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_groups import FULL, KVGroup, PageArithmetic, PageTables
from jaxpaged.page_manager import PageManager
from jaxpaged.prefix_index import PrefixChain
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import make_request

MIXED = (FULL, KVGroup(6))


def test_a_pool_needs_a_group_and_a_window_something_to_see() -> None:
    with pytest.raises(ConfigError, match="at least one KV group"):
        PageManager(4, 4, groups=())
    with pytest.raises(ConfigError, match=r"A window must be at least 1, got \[None, 0\]"):
        PageManager(4, 4, groups=(FULL, KVGroup(0)))


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_first_page_is_the_one_of_the_first_token_that_is_seen(window: int, page_size: int) -> None:
    for position in range(40):
        seen = range(max(0, position - window + 1), position + 1)
        assert KVGroup(window).first_page(position, page_size) == seen[0] // page_size


@pytest.mark.parametrize("groups", [(FULL,), (KVGroup(5),), MIXED, (FULL, FULL, KVGroup(1), KVGroup(9))])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_peak_is_what_a_sequence_holds_at_most_on_its_way(groups: tuple[KVGroup, ...], page_size: int) -> None:
    arithmetic = PageArithmetic(groups, page_size)
    held = [0] + [arithmetic.pages_between(number - 1, number) for number in range(1, 60)]
    for num_tokens in range(60):
        exact = max(held[: num_tokens + 1])
        # A window may begin in the middle of a page, and lag behind by a step in flight: on short ways it has done neither.
        assert exact <= arithmetic.peak_pages(num_tokens) <= exact + 2 * sum(group.window is not None for group in groups)
    for num_pages in range(1, 80):
        most = arithmetic.most_tokens(num_pages, 59)
        assert arithmetic.peak_pages(most) <= num_pages
        assert most == 59 or arithmetic.peak_pages(most + 1) > num_pages


def test_pages_behind_a_window_are_given_back_and_the_others_stay() -> None:
    manager = PageManager(40, 4, groups=MIXED)
    tables, tokens, prefix = manager.empty_tables(), list(range(24)), PrefixChain()
    assert manager.grow(tables, 24)
    full, windowed = (list(table) for table in tables)
    manager.commit(tokens, tables, 24, prefix)
    # The token at 17 sees 12 to 17.
    assert manager.give_back_behind(tables, 17) == 3
    assert tables == (full, [0, 0, 0, *windowed[3:]])
    assert manager.arithmetic.held_pages(tables) == 9
    assert manager.give_back_behind(tables, 17) == 0
    manager.check(tables)
    assert all(manager.is_shareable(page) for page in windowed[:3])
    manager.release(tables)
    assert manager.num_in_use == 0


def test_a_hit_needs_of_a_window_only_what_the_next_token_sees() -> None:
    manager = PageManager(40, 4, groups=MIXED)
    tokens = list(range(25))
    tables, prefix = manager.empty_tables(), PrefixChain()
    assert manager.grow(tables, 24)
    full, windowed = (list(table) for table in tables)
    manager.commit(tokens, tables, 24, prefix)
    manager.give_back_behind(tables, 24)
    manager.release(tables)
    # The token at 24 sees 19 to 24: pages 4 and 5.
    assert manager.match(tokens, PrefixChain()) == (full, [0, 0, 0, 0, *windowed[4:]])


def test_a_hit_ends_where_a_window_has_a_hole() -> None:
    manager = PageManager(13, 4, groups=MIXED)
    tokens = list(range(25))
    tables, prefix = manager.empty_tables(), PrefixChain()
    assert manager.grow(tables, 24)
    windowed = list(tables[1])
    manager.commit(tokens, tables, 24, prefix)
    # Pages 0 to 2 of the window become idle first, and are recycled first.
    manager.give_back_behind(tables, 17)
    assert sorted(manager.allocate(3) or []) == sorted(windowed[:3])
    manager.release(tables)
    hits = [len(manager.match(tokens[:length], PrefixChain())[0]) for length in (25, 21, 17, 13, 9)]
    # Up to token 16 tokens 11 to 15 are needed, and 11 is gone.
    assert hits == [6, 5, 0, 0, 0]


def test_pages_that_a_sequence_will_take_while_steps_in_flight_keep_those_behind_its_window() -> None:
    """A window of 6 at pages of 4 holds at most 4 pages when nothing is in flight."""
    arithmetic = PageArithmetic(MIXED, 4)
    full = list(range(1, 7))

    def to_come(tables: PageTables, num_tokens: int) -> int:
        return arithmetic.pages_to_come(tables, num_tokens, [1] * 7, 1)

    assert [to_come((full, [0, 0, 0, 4, 5, 6]), num_tokens) for num_tokens in (24, 25, 28, 29, 33)] == [0, 2, 2, 3, 4]
    assert [to_come((full, [0, 0, 3, 4, 5, 6]), num_tokens) for num_tokens in (24, 25, 28, 29, 33)] == [0, 2, 2, 3, 4]
    assert [to_come((full, [1, 2, 3, 4, 5, 6]), num_tokens) for num_tokens in (24, 25, 28, 29, 33)] == [0, 2, 2, 3, 4]
    # Until its end it takes as many as come back.
    until_end = [arithmetic.pages_to_come((full, [0, 0, 3, 4, 5, 6]), num_tokens, [1] * 7) for num_tokens in (24, 25, 28, 29, 33)]
    assert until_end == [0, 1, 1, 2, 3]


def test_the_same_tokens_of_two_groups_are_two_pages() -> None:
    manager = PageManager(40, 4, groups=(FULL, FULL))
    tables, prefix = manager.empty_tables(), PrefixChain()
    assert manager.grow(tables, 8)
    manager.commit(list(range(8)), tables, 8, prefix)
    found = manager.match(list(range(9)), PrefixChain())
    assert found == tables
    assert not set(found[0]) & set(found[1])


def test_memory_of_a_windowed_model_does_not_grow_with_the_answer() -> None:
    """Two long answers in a pool that holds a fraction of their tokens, with the chunks of their prompts longer than the window."""
    simulation = Simulation(num_usable=22, page_size=4, max_num_batched_tokens=32, groups=(KVGroup(8),))
    rng = random.Random(0)
    for index in range(2):
        simulation.add(make_request(f"r{index}", [rng.randrange(7) for _ in range(100)], max_tokens=300, ignore_eos=True))
    simulation.run(max_steps=400)
    simulation.check_answers()
    assert simulation.outcome.num_preemptions == 0
