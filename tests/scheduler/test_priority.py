"""Priorities: who goes first, who takes whose place, and that the last do come to their turn (O-44)."""

import random

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import MAX_PRIORITY
from jaxpaged.sequence import Sequence
from jaxpaged.waiting_queue import WaitingQueue
from tests.scheduler.load import Job, run_jobs
from tests.scheduler.rules import Clock, add, ids_of, make_scheduler, rows_of, schedule, step, update
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import make_request


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, True, 0.5, "high"])
def test_a_priority_is_a_number_of_moderate_size(priority: object) -> None:
    with pytest.raises(InvalidRequestError, match="priority must be an integer between -1000000 and 1000000"):
        make_request("a", [1], priority=priority)


def test_lower_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for request_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)):
        add(scheduler, request_id, 3, max_tokens=1, priority=priority)
    assert ids_of(scheduler.sequences) == ["d", "b", "e", "a", "c"]
    assert [ids_of(step(scheduler).admitted) for _ in range(5)] == [["d"], ["b"], ["e"], ["a"], ["c"]]


def test_waiting_counts_as_priority() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock, ageing_s=10.0)
    for request_id, priority, now in (("late", 2, 0.0), ("first", 1, 9.0), ("passed", 1, 11.0), ("best", 0, 19.0), ("worst", 0, 21.0)):
        clock.now = now
        add(scheduler, request_id, 3, max_tokens=1, priority=priority)
    # One class for 10 s: a 2 that came at 0 s goes after a 1 of 9 s and before one of 11 s; and before a 0 of 21 s.
    assert [ids_of(step(scheduler).admitted)[0] for _ in range(5)] == ["first", "best", "late", "passed", "worst"]


def test_a_stream_of_better_ones_does_not_keep_anybody_out_for_ever() -> None:
    jobs = [Job(0.5 * number, 50, 20, 20, priority=0) for number in range(400)] + [Job(1.0, 50, 20, 20, priority=5)]
    report = run_jobs(jobs, num_usable=100, cost=lambda _: 0.05, max_num_seqs=1)
    # Five classes at 60 s each, of a load of twice what one slot can do.
    assert 300 < report.ended_s[jobs[-1]] < 340 + 301


def test_a_better_one_takes_the_slot_of_a_worse_one_in_the_next_step() -> None:
    scheduler = make_scheduler(num_usable=200, max_num_seqs=4)
    low = [add(scheduler, request_id, 5, max_tokens=100, priority=3) for request_id in "abcd"]
    step(scheduler)
    high = add(scheduler, "high", 5, priority=-1)
    assert step(scheduler).decision == "admitted 0 of 1: rows"
    scheduled = step(scheduler)
    # The last admitted goes; its place in the queue is kept, and so is its answer.
    assert ids_of(scheduled.preempted) == ["d"]
    assert ids_of(scheduled.admitted) == ["high"]
    assert ("high", 0, 5, True) in rows_of(scheduled)
    assert (high.slot, low[3].num_output_tokens) == (3, 2)
    while not high.is_finished:
        assert not step(scheduler).preempted
    assert ids_of(step(scheduler).admitted) == ["d"]


@pytest.mark.parametrize("policy", [{}, {"target_ttft_s": 0.2}, {"target_itl_s": 0.1}], ids=str)
def test_tokens_of_a_step_go_by_priority(policy: dict[str, float]) -> None:
    """A prompt of 10,000 tokens leaves a better one, which has a slot and pages, no step to wait for; and goes on with what is left."""
    scheduler = make_scheduler(num_usable=5000, max_num_batched_tokens=64, max_model_len=30_000, **policy)
    low = add(scheduler, "low", 10_000, max_tokens=5, priority=5)
    for _ in range(3):
        scheduler.observe(step(scheduler), 0.05)
    num_computed = low.num_computed_tokens
    high = add(scheduler, "high", 5, max_tokens=5, priority=-100)
    add(scheduler, "equal", 5, max_tokens=5, priority=5)
    scheduled = step(scheduler)
    assert (ids_of(scheduled.admitted), high.num_output_tokens) == (["high"], 1)
    assert low.num_computed_tokens > num_computed
    assert scheduled.decision == "admitted 1 of 2: tokens"


def test_tokens_between_prompts_in_progress_go_in_the_order_of_the_queue() -> None:
    """Who waits comes after the better prompt in progress, and before the worse one, whose chunk is cut."""
    scheduler = make_scheduler(num_usable=500, max_num_batched_tokens=16)
    add(scheduler, "worst", 100, priority=9)
    step(scheduler)
    best = add(scheduler, "best", 26, priority=1)
    step(scheduler)
    add(scheduler, "middle", 4, priority=5)
    assert [row[:3] for row in rows_of(step(scheduler))] == [("best", 16, 10), ("middle", 0, 4), ("worst", 16, 2)]
    assert best.num_output_tokens == 1


def test_prompts_in_progress_are_served_in_the_order_of_the_queue() -> None:
    """Not in that of their classes and admissions, in which they would lose their pages: waiting counts."""
    clock = Clock()
    scheduler = make_scheduler(num_usable=500, max_num_batched_tokens=16, clock=clock, ageing_s=1.0)
    old = add(scheduler, "old", 100, priority=9)
    clock.now = 5.0
    step(scheduler)
    better = add(scheduler, "better", 20, priority=5)
    # It comes before the old one, which is 4 classes worse and has waited for 5 s: but for the second.
    clock.now = 5.5
    assert rows_of(step(scheduler)) == [("old", 16, 16, False)]
    # Admission does not let this happen; it is slipped in past it.
    scheduler._queue.remove(better)
    scheduler._running.enter(better)
    assert scheduler._pages.grow(better.tables, 4)
    better.num_computed_tokens = better.num_confirmed_tokens = 4
    assert scheduler.sequences == (better, old)
    assert rows_of(step(scheduler)) == [("old", 32, 16, False)]


def test_nobody_takes_a_place_while_the_rest_runs_out() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    low = add(scheduler, "low", 3, max_tokens=9, priority=5)
    step(scheduler)
    add(scheduler, "high", 3, max_tokens=1)
    assert step(scheduler).decision == "admitted 0 of 1: rows"
    scheduler.drain()
    while not low.is_finished:
        assert ids_of([row.sequence for row in step(scheduler).rows]) == ["low"]
    assert scheduler.schedule() is None
    scheduler.resume()
    assert ids_of(step(scheduler).admitted) == ["high"]


def test_a_better_one_takes_pages_from_as_many_worse_ones_as_it_needs() -> None:
    scheduler = make_scheduler(num_usable=8, page_size=4, is_hopeful=True)
    for request_id, priority in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
        add(scheduler, request_id, 5, priority=priority)
    step(scheduler)
    add(scheduler, "high", 15, max_tokens=1)
    add(scheduler, "low", 3, max_tokens=1, priority=7)
    assert step(scheduler).decision == "admitted 0 of 2: pages"
    scheduled = step(scheduler)
    # The lowest priority first, and then the last admitted.
    assert ids_of(scheduled.preempted) == ["c", "d"]
    assert ids_of(scheduled.admitted) == ["high"]
    assert scheduled.decision == "admitted 1 of 4: preemption"


@pytest.mark.parametrize(("num_prompt", "is_enough"), [(19, True), (20, False)])
def test_whoever_is_displaced_leaves_enough_to_the_last_page(num_prompt: int, is_enough: bool) -> None:
    """b has 1 of 8 pages and is promised none; a has 2 and is promised 1: 5 are there for the better one, and not 6."""
    scheduler = make_scheduler(num_usable=8, page_size=4)
    add(scheduler, "a", 7, max_tokens=50, priority=0)
    add(scheduler, "b", 2, max_tokens=2, priority=1)
    step(scheduler)
    high = add(scheduler, "high", num_prompt, max_tokens=3)
    scheduled = [schedule(scheduler), schedule(scheduler)][1]
    assert (ids_of(scheduled.preempted), ids_of(scheduled.admitted)) == ((["b"], ["high"]) if is_enough else ([], []))
    assert high.num_computed_tokens == is_enough * num_prompt


def test_nobody_is_preempted_when_it_would_not_be_enough() -> None:
    scheduler = make_scheduler(num_usable=8, page_size=4)
    add(scheduler, "a", 15, max_tokens=12, priority=0)
    add(scheduler, "b", 3, max_tokens=12, priority=1)
    step(scheduler)
    add(scheduler, "high", 20, priority=0)
    for _ in range(10):
        assert not step(scheduler).preempted


def test_equals_never_displace_each_other() -> None:
    for priority in (-1, 0, 7):
        scheduler = make_scheduler(num_usable=16, page_size=4, max_num_seqs=2)
        for request_id in "abcdef":
            add(scheduler, request_id, 5, max_tokens=20, priority=priority)
        for _ in range(60):
            assert not step(scheduler).preempted
        assert scheduler.num_running + scheduler.num_waiting == 0


def test_waiting_does_not_count_when_somebody_is_to_be_displaced() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock, ageing_s=1.0)
    add(scheduler, "runs", 3, max_tokens=50, priority=1)
    step(scheduler)
    add(scheduler, "old", 3, max_tokens=50, priority=1)
    clock.now = 1000.0
    for _ in range(5):
        assert not step(scheduler).preempted
    add(scheduler, "high", 3, max_tokens=2, priority=0)
    scheduled = step(scheduler)
    # It is last in the queue, since the other has waited so long; but it takes its place from one that runs.
    assert (ids_of(scheduled.preempted), ids_of(scheduled.admitted)) == (["runs"], ["high"])


def test_nobody_passes_an_aged_one_without_taking_a_place_of_its_own() -> None:
    clock = Clock()
    scheduler = make_scheduler(num_usable=10, page_size=4, clock=clock, ageing_s=1.0)
    add(scheduler, "runs", 15, max_tokens=20, priority=0)
    step(scheduler)
    add(scheduler, "aged", 30, max_tokens=4, priority=5)
    clock.now = 100.0
    add(scheduler, "high", 3, max_tokens=2, priority=0)
    for _ in range(10):
        assert not step(scheduler).admitted


def test_who_was_displaced_twice_is_left_alone() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    low = add(scheduler, "low", 3, max_tokens=60, priority=1)
    num_preemptions = []
    for number in range(5):
        for _ in range(4):
            step(scheduler)
        add(scheduler, f"high{number}", 3, max_tokens=3)
        for _ in range(8):
            step(scheduler)
        num_preemptions.append(low.num_preemptions)
    assert num_preemptions == [1, 2, 2, 2, 2]
    while not low.is_finished:
        step(scheduler)
    assert low.num_output_tokens == 60


def test_pool_pressure_takes_the_lowest_priority_first_wherever_it_was_admitted() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=4, is_hopeful=True)
    low = add(scheduler, "low", 7, max_tokens=9, priority=1)
    for request_id in "ab":
        add(scheduler, request_id, 7, max_tokens=9)
    step(scheduler)
    step(scheduler)
    assert step(scheduler).preempted == (low,)


def test_displacement_with_an_id_on_its_way() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    low = add(scheduler, "low", 3, priority=1)
    first = schedule(scheduler)
    add(scheduler, "high", 3, max_tokens=1)
    second, third = schedule(scheduler), schedule(scheduler)
    assert third.preempted == (low,)
    for scheduled in (first, second, third):
        update(scheduler, scheduled, 4)
    assert low.output_token_ids == [4, 4]
    assert ids_of(schedule(scheduler).admitted) == ["low"]


@pytest.mark.parametrize("depth", [0, 1])
def test_mixed_priorities_under_pressure_all_end(depth: int) -> None:
    rng = random.Random(depth)
    simulation = Simulation(num_usable=30, page_size=4, max_num_seqs=4, max_num_batched_tokens=16, depth=depth)
    for index in range(120):
        prompt = [rng.randrange(7) for _ in range(rng.randint(1, 60))]
        simulation.add(make_request(f"r{index}", prompt, max_tokens=rng.randint(1, 50), priority=rng.randrange(4)))
        for _ in range(rng.randrange(20)):
            simulation.step()
    simulation.run(max_steps=5000)
    simulation.check_answers()
    assert simulation.outcome.num_displacements > 5
    assert simulation.outcome.num_prefill_tokens <= 2 * simulation.outcome.num_prompt_tokens


def test_the_reserve_is_for_better_than_default() -> None:
    scheduler = make_scheduler(num_usable=10, page_size=4, reserve_pages=4)
    add(scheduler, "a", 7, max_tokens=2)
    step(scheduler)
    add(scheduler, "b", 19, max_tokens=2)
    add(scheduler, "c", 19, max_tokens=2, priority=-1)
    # 8 pages are left, 4 of them for the better; with one token more c wants 5, and so does b.
    scheduled = step(scheduler)
    assert ids_of(scheduled.admitted) == ["c"]
    assert scheduled.decision == "admitted 1 of 2: pages"


@pytest.mark.parametrize(("priority", "is_admitted"), [(-1, True), (0, False), (1, False)])
@pytest.mark.parametrize("is_hopeful", [True, False])
def test_pages_of_the_reserve(is_hopeful: bool, priority: int, is_admitted: bool) -> None:
    """8 pages are left and 4 of them for the better; 5 are wanted."""
    scheduler = make_scheduler(num_usable=10, page_size=4, reserve_pages=4, is_hopeful=is_hopeful)
    add(scheduler, "a", 7, max_tokens=2)
    step(scheduler)
    add(scheduler, "b", 17, max_tokens=2, priority=priority)
    assert bool(step(scheduler).admitted) == is_admitted


@pytest.mark.parametrize(
    ("reserve_pages", "preempted"), [(0, ["c"]), (1, ["c", "b"]), (3, ["c", "b"]), (4, ["c", "b", "a"]), (9, ["c", "b", "a"])]
)
def test_who_takes_a_place_leaves_the_reserve_as_well(reserve_pages: int, preempted: list[str]) -> None:
    """Of 10 pages each of three holds 3, and 4 are wanted. A reserve keeps nobody out of an engine of its own."""
    scheduler = make_scheduler(num_usable=10, page_size=4)
    for request_id in "abc":
        add(scheduler, request_id, 7, max_tokens=5, priority=2)
    step(scheduler)
    step(scheduler)
    scheduler._admission._reserve_pages = reserve_pages
    add(scheduler, "high", 13, max_tokens=3, priority=1)
    assert step(scheduler).decision == "admitted 0 of 1: pages"
    scheduled = step(scheduler)
    assert (ids_of(scheduled.preempted), ids_of(scheduled.admitted)) == (preempted, ["high"])


@pytest.mark.parametrize(("reserve_pages", "is_admitted"), [(0, True), (1, True), (2, False)])
def test_the_forecast_leaves_the_reserve_out(reserve_pages: int, is_admitted: bool) -> None:
    """Answers of 40 tokens after prompts of 4 fill 11 pages each. One page less in all is taken for enough, two are not."""
    scheduler = make_scheduler(num_usable=22, page_size=4, reserve_pages=reserve_pages)
    for request_id in "ab":
        add(scheduler, request_id, 4, max_tokens=40)
    assert len(step(scheduler).admitted) == 1 + is_admitted


def test_the_reserve_does_not_keep_anybody_out_of_an_idle_engine() -> None:
    scheduler = make_scheduler(num_usable=10, page_size=4, reserve_pages=9)
    add(scheduler, "a", 35, max_tokens=2)
    assert ids_of(step(scheduler).admitted) == ["a"]


def test_the_queue_is_in_order_however_it_is_used() -> None:
    rng = random.Random(0)
    queue, now = WaitingQueue(ageing_s=2.0), 0.0
    members: list[Sequence] = []
    away: list[Sequence] = []
    for number in range(3000):
        now += rng.random()
        action = rng.random()
        if action < 0.45 or not members:
            sequence = Sequence(make_request(f"r{number}", [1] * rng.randint(1, 5), priority=rng.randint(-2, 2)))
            queue.place(sequence, now)
            members.append(sequence)
            queue.add(sequence)
        elif action < 0.8:
            sequence = members.pop(rng.randrange(len(members)))
            queue.remove(sequence)
            away.append(sequence)
        elif away:
            sequence = away.pop(rng.randrange(len(away)))
            members.append(sequence)
            queue.add(sequence)
        expected = sorted(members, key=lambda sequence: sequence.priority * 2.0 + sequence.queued_s)
        assert list(queue) == expected
        assert len(queue) == len(members)
        assert queue.num_prompt_tokens == sum(sequence.num_prompt_tokens for sequence in members)
        if members:
            assert queue.first() is expected[0]
            assert queue.first_by_priority() is min(members, key=lambda sequence: (sequence.priority, sequence.queued_s))
        # Removed entries do not pile up.
        assert len(queue._by_age) <= 2 * len(members) + 65
