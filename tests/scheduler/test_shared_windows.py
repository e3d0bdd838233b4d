"""Pages that several sequences hold: behind the window of one they do not come back, and nobody may count on them."""

import pytest

from jaxpaged.kv_groups import FULL, KVGroup, PageArithmetic
from jaxpaged.scheduler import Scheduler
from tests.scheduler.rules import add, ids_of, make_scheduler, step

WINDOW = KVGroup(8)
PROMPT = list(range(9))
MOST_OF_TWO = 2 * 9
"""Pages of one token that two sequences hold at most, one more than the window each."""


def check_kept(scheduler: Scheduler) -> None:
    """All that is kept for somebody is there, even if everybody else stays for ever."""
    running, pages = scheduler._running, scheduler._pages
    assert sum(map(running.pages_to_come, running._guarded)) <= pages.num_available


def run_two_that_are_kept(num_usable: int, groups: tuple[KVGroup, ...]) -> int:
    """Two that may not be preempted, with the same prompt, to their ends; returns the most that ran at once."""
    scheduler = make_scheduler(num_usable, 1, groups=groups, is_hopeful=True)
    a = add(scheduler, "a", PROMPT, max_tokens=40, ignore_eos=True)
    a.num_preemptions = 2
    step(scheduler)
    b = add(scheduler, "b", PROMPT, max_tokens=40, ignore_eos=True)
    b.num_preemptions = 2
    most = 0
    while scheduler.sequences:
        assert not step(scheduler).preempted
        check_kept(scheduler)
        most = max(most, scheduler.num_running)
    assert (a.num_output_tokens, b.num_output_tokens) == (40, 40)
    return most


@pytest.mark.parametrize("num_usable", range(9, 26))
def test_two_that_may_not_be_preempted_share_a_prompt(num_usable: int) -> None:
    """b holds the pages of a's prompt, and each needs its own once the prompt is behind its window: one waits, or both have them."""
    assert run_two_that_are_kept(num_usable, (WINDOW,)) == 1 + (num_usable >= MOST_OF_TWO)


@pytest.mark.parametrize("num_usable", range(48 + 9, 2 * 48 + 18, 3))
def test_two_that_may_not_be_preempted_share_a_prompt_in_two_groups(num_usable: int) -> None:
    """The full group keeps the 8 shared pages for both."""
    assert run_two_that_are_kept(num_usable, (FULL, WINDOW)) == 1 + (num_usable >= 2 * 48 - 8 + MOST_OF_TWO)


@pytest.mark.parametrize("num_usable", range(12, 34))
def test_a_newcomer_that_shares_leaves_what_is_kept(num_usable: int) -> None:
    """b comes in the same step as c and holds pages of a, for which all is kept: they do not come back for a any more."""
    scheduler = make_scheduler(num_usable, 1, groups=(WINDOW,), is_hopeful=True)
    a = add(scheduler, "a", PROMPT, max_tokens=40, ignore_eos=True)
    a.num_preemptions = 2
    step(scheduler)
    add(scheduler, "c", 2, max_tokens=3, ignore_eos=True)
    add(scheduler, "b", PROMPT, max_tokens=4, ignore_eos=True)
    assert ids_of(step(scheduler).admitted)[0] == "c"
    check_kept(scheduler)
    while scheduler.sequences:
        step(scheduler)
        check_kept(scheduler)


def test_a_page_that_others_hold_does_not_come_back_behind_a_window() -> None:
    """A window of 6 at pages of 4 holds at most 4 pages when nothing is in flight."""
    arithmetic = PageArithmetic((FULL, KVGroup(6)), 4)
    tables = (list(range(1, 7)), [0, 0, 0, 7, 8, 9])
    alone, shared = [1] * 10, [1] * 7 + [2, 3, 1]
    assert [arithmetic.pages_to_come(tables, num_tokens, alone) for num_tokens in (24, 25, 29, 33, 37)] == [0, 2, 3, 4, 5]
    assert [arithmetic.pages_to_come(tables, num_tokens, shared) for num_tokens in (24, 25, 29, 33, 37)] == [0, 2, 4, 6, 7]
