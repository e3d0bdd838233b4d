"""Who loses pages, who comes back, and that nobody loses them for ever."""

import random

import pytest

from jaxpaged.request import FinishReason
from jaxpaged.scheduler import SequenceStatus
from tests.scheduler.rules import Hopeful, add, fill_two, ids_of, make_scheduler, rows_of, schedule, step, update
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import make_request

END_TOKEN = 7


def test_the_last_admitted_loses_its_pages_and_goes_to_the_front() -> None:
    scheduler = make_scheduler(num_usable=4, page_size=4, is_hopeful=True)
    a, b = fill_two(scheduler)
    c = add(scheduler, "c", 3)
    scheduled = step(scheduler)
    assert scheduled.preempted == (b,)
    assert scheduled.decision == "admitted 0 of 2: preemption"
    assert rows_of(scheduled) == [("a", 8, 1, True)]
    assert scheduler.sequences == (a, b, c)
    assert (b.status, b.num_preemptions, b.num_lost_tokens, b.num_pages_freed) == (SequenceStatus.PREEMPTED, 1, 8, 2)
    # Never for admission: b needs 3 pages and gets them when a has ended.
    while not a.is_finished:
        assert not step(scheduler).admitted
    # One page of its two was recycled, the last; the first is found again, and that is no prefix hit of a prompt.
    scheduled = step(scheduler)
    assert scheduled.admitted == (b, c)
    assert b.num_cached_tokens == 0
    assert [row[:3] for row in rows_of(scheduled) if row[0] == "b"] == [("b", 4, 5)]
    assert (scheduled.prefix_queries_tokens, scheduled.prefix_hits_tokens) == (3, 0)
    # Tokens 4 to 7 had been computed before, token 8 had not.
    assert scheduled.prefill_recompute_tokens == 4


def test_full_pages_of_a_preempted_sequence_are_found_again() -> None:
    scheduler = make_scheduler(num_usable=5, page_size=4, is_hopeful=True)
    _, b = fill_two(scheduler)
    step(scheduler)
    scheduler.abort("a")
    assert b.status is SequenceStatus.PREEMPTED
    scheduled = step(scheduler)
    # Its 9 known tokens: two full pages found, the ninth computed.
    assert rows_of(scheduled) == [("b", 8, 1, True)]
    assert scheduled.prefill_recompute_tokens == 0


def test_preempted_several_at_once_keep_their_order() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=2, max_num_batched_tokens=64, is_hopeful=True)
    a = add(scheduler, "a", [1, 2, 3], max_tokens=8)
    add(scheduler, "b", [1, 2, 4], max_tokens=8)
    step(scheduler)
    step(scheduler)
    for _ in range(20):
        scheduled = step(scheduler)
        waiting = scheduler.sequences[scheduler.num_running :]
        assert list(scheduled.preempted) == list(reversed(waiting))[: len(scheduled.preempted)]
        if a.is_finished:
            break
    assert a.num_preemptions == 0
    assert a.is_finished


def test_two_prompts_that_hold_every_page_between_them_do_not_wait_for_each_other() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=4, max_num_batched_tokens=8, enable_prefix_caching=False)
    add(scheduler, "a", 20, max_tokens=2)
    step(scheduler)
    # Admission does not let this happen; b is slipped in past it.
    b = add(scheduler, "b", 18, max_tokens=2)
    scheduler._queue.remove(b)
    scheduler._running.enter(b)
    assert scheduler._pages.grow(b.tables, 16)
    b.num_computed_tokens = b.num_confirmed_tokens = 16
    scheduled = step(scheduler)
    assert scheduled.preempted == (b,)
    assert rows_of(scheduled) == [("a", 8, 8, False)]


def test_a_prompt_that_loses_its_pages_for_another_gets_no_chunk_in_that_step() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=4, max_num_batched_tokens=16, enable_prefix_caching=False)
    add(scheduler, "a", 18, max_tokens=2)
    step(scheduler)
    b = add(scheduler, "b", 18, max_tokens=2)
    scheduler._queue.remove(b)
    scheduler._running.enter(b)
    assert scheduler._pages.grow(b.tables, 8)
    b.num_computed_tokens = b.num_confirmed_tokens = 8
    # Of the two pages that b gives back a takes one.
    scheduled = step(scheduler)
    assert scheduled.preempted == (b,)
    assert rows_of(scheduled) == [("a", 16, 2, True)]


def test_a_chunk_leaves_the_pages_that_are_kept_for_others() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=4, enable_prefix_caching=False)
    a = add(scheduler, "a", 3, max_tokens=14)
    a.num_preemptions = 2
    step(scheduler)
    b = add(scheduler, "b", 20)
    # Of 5 free pages a will take 3.
    assert [scheduler._running.fitting_tokens(b, most) for most in (30, 8, 7, 1)] == [8, 8, 7, 1]
    assert scheduler._running.fitting_tokens(a, 30) == 21


def test_whoever_was_preempted_twice_comes_back_with_all_its_pages_and_stays() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=4, is_hopeful=True)
    add(scheduler, "a", 7, max_tokens=9)
    b = add(scheduler, "b", 7, max_tokens=16)
    for _ in range(2):
        while b.status is not SequenceStatus.PREEMPTED:
            step(scheduler)
        b.num_preemptions = 2
    # 5 of the 6 pages are its own by right; what is left is too little for a.
    while b.status is not SequenceStatus.RUNNING:
        step(scheduler)
    c = add(scheduler, "c", 5, max_tokens=16)
    while not b.is_finished:
        scheduled = step(scheduler)
        assert b not in scheduled.preempted
        assert not c.pages
    assert b.num_output_tokens == 16


def test_an_id_that_is_on_its_way_at_a_preemption_is_waited_for() -> None:
    scheduler = make_scheduler(num_usable=2, page_size=4, is_hopeful=True)
    a, b = add(scheduler, "a", 3), add(scheduler, "b", 1)
    first, second = schedule(scheduler), schedule(scheduler)
    update(scheduler, first)
    third = schedule(scheduler)
    assert rows_of(third) == [("a", 4, 1, True)]
    assert third.preempted == (b,)
    # Of its two ids one is known and one is on its way.
    assert (b.output_token_ids, b.num_pending_ids, b.num_tokens) == ([1], 1, 3)
    scheduler.abort("a")
    assert scheduler.schedule() is None
    assert scheduler.num_waiting == 1
    assert update(scheduler, second, 6) == []
    assert b.output_token_ids == [1, 6]
    update(scheduler, third)
    again = schedule(scheduler)
    assert rows_of(again) == [("b", 0, 3, True)]
    assert again.prefill_recompute_tokens == 2
    update(scheduler, again)
    assert a.is_finished


def test_an_id_that_is_on_its_way_at_a_preemption_may_end_the_answer() -> None:
    scheduler = make_scheduler(num_usable=2, page_size=4, is_hopeful=True)
    _, b = add(scheduler, "a", 3), add(scheduler, "b", 1)
    first, second = schedule(scheduler), schedule(scheduler)
    update(scheduler, first)
    third = schedule(scheduler)
    assert third.preempted == (b,)
    assert b in update(scheduler, second, END_TOKEN)
    assert (b.finish_reason, b.output_token_ids) == (FinishReason.STOP, [1, END_TOKEN])
    assert scheduler.num_waiting == 0


def test_a_chunk_of_an_earlier_admission_does_not_count() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    add(scheduler, "a", 3, max_tokens=30)
    b = add(scheduler, "b", 40)
    flying = [schedule(scheduler)]
    c = add(scheduler, "c", 2, priority=-1)
    flying += [schedule(scheduler), schedule(scheduler)]
    assert [rows_of(scheduled)[-1] for scheduled in flying] == [("b", 0, 5, False), ("b", 5, 7, False), ("c", 0, 2, True)]
    assert flying[2].preempted == (b,)
    scheduler.abort("c")
    again = schedule(scheduler)
    assert ids_of(again.admitted) == ["b"]
    assert not any(row.is_awaited for row in (*flying[0].rows, *flying[1].rows) if row.sequence is b)
    for scheduled in flying:
        update(scheduler, scheduled)
        assert b.num_confirmed_tokens == 0
        assert not any(map(scheduler._pages.is_shareable, b.pages))
    update(scheduler, again)
    assert b.num_confirmed_tokens == 7
    assert c.is_finished


def test_nobody_waits_for_pages_that_do_not_come_back() -> None:
    """Beside one whose pages are kept, and which does not end, a running one that finds none goes at once."""
    scheduler = make_scheduler(num_usable=10, page_size=16, is_hopeful=True, enable_prefix_caching=False)
    a = add(scheduler, "a", 17, max_tokens=90, ignore_eos=True)
    a.num_preemptions = 2
    b = add(scheduler, "b", 36, max_tokens=90, ignore_eos=True)
    flying = [schedule(scheduler)]
    for _ in range(40):
        flying.append(schedule(scheduler))
        assert b.status is SequenceStatus.PREEMPTED or b in [row.sequence for row in flying[-1].rows]
        update(scheduler, flying.pop(0))
    assert (b.status, b.num_output_tokens) == (SequenceStatus.PREEMPTED, 13)


def test_whoever_finds_no_page_waits_for_one_that_ends() -> None:
    """b's last id is on its way, so a, which was admitted after it, keeps its pages for the one step that this takes."""
    scheduler = make_scheduler(num_usable=5, page_size=4, is_hopeful=True)
    add(scheduler, "c", 2, max_tokens=3)
    b = add(scheduler, "b", 7, max_tokens=2)
    a = add(scheduler, "a", 7, max_tokens=9)
    flying = [schedule(scheduler), schedule(scheduler)]
    assert (b.num_tokens, b.max_total_tokens, a.num_computed_tokens) == (9, 9, 8)
    assert scheduler._pages.num_available == 0
    flying.append(schedule(scheduler))
    assert (rows_of(flying[2]), flying[2].preempted) == ([("c", 3, 1, True)], ())
    for scheduled in flying:
        update(scheduler, scheduled)
    assert b.is_finished
    assert rows_of(schedule(scheduler)) == [("a", 8, 1, True)]
    assert a.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("max_tokens", [8, 40, 80])
@pytest.mark.parametrize("is_hopeful", [False, True])
def test_three_long_requests_in_a_pool_for_one_and_a_third(max_tokens: int, page_size: int, depth: int, is_hopeful: bool) -> None:
    """O-42: chunks of an eighth of the prompt; readmission asks for all the pages, not for those of the first chunk."""
    length = 128
    num_usable = -(-13 * (length + max_tokens) // 10 // page_size)
    simulation = Simulation(num_usable=num_usable, page_size=page_size, max_num_batched_tokens=length // 8, depth=depth)
    if is_hopeful:
        simulation.scheduler._admission.lengths = Hopeful()
    for index in range(3):
        simulation.add(make_request(f"r{index}", [index] * length, max_tokens=max_tokens, ignore_eos=True))
    simulation.run(max_steps=1000)
    simulation.check_answers()
    assert simulation.outcome.num_prefill_tokens <= 2 * simulation.outcome.num_prompt_tokens
    assert simulation.outcome.max_preemptions <= 2


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_recomputation_stays_under_the_prompts(depth: int, enable_prefix_caching: bool) -> None:
    """All prefill, recomputed answers included, is at most twice the prompts, under a scheduler that lets in far too much."""
    for seed in range(4):
        rng = random.Random(seed)
        simulation = Simulation(
            num_usable=40, page_size=4, max_num_batched_tokens=32, depth=depth, enable_prefix_caching=enable_prefix_caching
        )
        simulation.scheduler._admission.lengths = Hopeful()
        for index in range(60):
            prompt = [rng.randrange(7) for _ in range(rng.randint(10, 60))]
            simulation.add(make_request(f"r{index}", prompt, max_tokens=rng.randint(1, 60), ignore_eos=True))
        simulation.run(max_steps=5000)
        simulation.check_answers()
        outcome = simulation.outcome
        assert outcome.num_preemptions > 10
        assert outcome.max_preemptions <= 2
        assert outcome.num_prefill_tokens <= 2 * outcome.num_prompt_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("is_hopeful", [True, False])
def test_recomputation_of_answers_longer_than_prompts(depth: int, enable_prefix_caching: bool, is_hopeful: bool) -> None:
    """The simulation asserts the bound after each step: twice the prompts, and once the answers of those preempted. More than the first."""
    rng = random.Random(0)
    simulation = Simulation(num_usable=40, page_size=4, max_num_batched_tokens=32, depth=depth, enable_prefix_caching=enable_prefix_caching)
    if is_hopeful:
        simulation.scheduler._admission.lengths = Hopeful()
    for index in range(60):
        prompt = [rng.randrange(7) for _ in range(4)]
        simulation.add(make_request(f"r{index}", prompt, max_tokens=rng.randint(20, 120), ignore_eos=True))
    simulation.run(max_steps=20_000)
    simulation.check_answers()
    outcome = simulation.outcome
    assert 2 * outcome.num_prompt_tokens < outcome.num_prefill_tokens <= 2 * outcome.num_prompt_tokens + outcome.num_output_tokens
    # Answers apart, no prompt is computed a third time, taken together.
    assert outcome.num_prompt_tokens < outcome.num_prefill_tokens_of_prompts <= 2 * outcome.num_prompt_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_long_prompt_is_not_displaced_a_second_time_at_the_cost_of_nobody(depth: int, enable_prefix_caching: bool) -> None:
    """Nobody has ended who left much of its prompt: so the next better one waits until the long one has ended."""
    simulation = Simulation(num_usable=52, page_size=4, max_num_batched_tokens=32, depth=depth, enable_prefix_caching=enable_prefix_caching)
    low = simulation.add(make_request("low", [index % 7 for index in range(180)], max_tokens=20, ignore_eos=True, priority=5))
    num_better = 0
    for _ in range(600):
        if low.num_output_tokens and low.status is SequenceStatus.RUNNING and num_better == low.num_preemptions < 2:
            simulation.add(make_request(f"high{num_better}", [num_better + 1, 3, 3], max_tokens=200, ignore_eos=True))
            num_better += 1
        simulation.step()
    simulation.check_idle()
    assert (num_better, low.num_preemptions) == (2, 1)
    assert 180 < simulation.outcome.num_prefill_tokens_of_prompts <= 2 * simulation.outcome.num_prompt_tokens
    # The first token of its answer is the only one computed twice that is not of a prompt.
    assert simulation.outcome.num_prefill_tokens <= 2 * simulation.outcome.num_prompt_tokens + low.num_output_tokens


@pytest.mark.parametrize(("num_left", "is_kept"), [(5, True), (20, True), (21, False), (30, False)])
def test_who_may_lose_its_pages_a_second_time_uses_what_others_left(num_left: int, is_kept: bool) -> None:
    """21 tokens are lost; the better one that has ended leaves its prompt, if it is enough."""
    scheduler = make_scheduler(max_num_seqs=1, enable_prefix_caching=False)
    low = add(scheduler, "low", 20, max_tokens=60, priority=1)
    step(scheduler)
    add(scheduler, "high", num_left, max_tokens=2)
    while low.status is SequenceStatus.RUNNING:
        step(scheduler)
    while low.status is not SequenceStatus.RUNNING:
        step(scheduler)
    assert (low.num_lost_tokens, low.has_recomputed_much) == (21, is_kept)
    assert (low.num_recomputed_tokens, scheduler._admission._num_spare_tokens) == ((21, num_left) if is_kept else (0, num_left - 21))
    # An operator's wish is at nobody's cost, and changes nothing.
    assert scheduler.evict_running() == (low,)
    step(scheduler)
    assert (low.num_recomputed_tokens, low.has_recomputed_much, low.num_preemptions) == (21 * is_kept, is_kept, 1)
    scheduler.abort("low")
    # It has recomputed more than its prompt itself, or leaves that.
    assert scheduler._admission._num_spare_tokens == (num_left if is_kept else num_left - 21 + 20)
