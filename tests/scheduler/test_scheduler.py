"""The scheduler's rules: who is let in, what a step holds, who loses pages."""

import pytest

from jaxpaged.errors import ConfigError, ContextLengthError, InvalidRequestError, JaxpagedError, PoolTooSmallError
from jaxpaged.request import FinishReason
from jaxpaged.scheduler import SequenceStatus
from tests.scheduler.simulation import Simulation
from tests.scheduler.steps import add, fill_two, make_scheduler, rows_of, step
from tests.scheduler.table_model import make_request

# The door


@pytest.mark.parametrize(("num_prompt", "is_accepted"), [(318, True), (319, True), (320, False), (321, False)])
def test_prompt_against_a_pool_of_20_pages(num_prompt: int, is_accepted: bool) -> None:
    """O-36: page 0 is not counted in, both numbers are named, and the small request behind is served at once."""
    simulation = Simulation(num_usable=20, page_size=16, max_num_batched_tokens=512)
    scheduler = simulation.scheduler
    big = make_request("big", [1] * num_prompt, max_tokens=50, ignore_eos=True)
    if is_accepted:
        simulation.add(big)
    else:
        with pytest.raises(PoolTooSmallError) as error:
            simulation.add(big)
        assert f"The prompt has {num_prompt} tokens and needs 21 pages" in error.value.message
        assert "the page pool has 20 pages of 16 tokens" in error.value.message
        assert scheduler.num_waiting == 0
    simulation.add(make_request("small", [2] * 5, max_tokens=3, ignore_eos=True))
    simulation.run(max_steps=10)
    assert simulation.ended["small"].num_output_tokens == 3
    simulation.check_answers()
    if is_accepted:
        # All 320 slots, and one token more that needs none.
        assert len(simulation.ended["big"].token_ids) == 321
        assert simulation.ended["big"].finish_reason is FinishReason.LENGTH


def test_answer_that_outgrows_the_pool_ends_with_length() -> None:
    simulation = Simulation(num_usable=20, page_size=16)
    simulation.add(make_request("long", [1] * 10, max_tokens=400, ignore_eos=True))
    simulation.add(make_request("small", [2] * 5, max_tokens=3, ignore_eos=True))
    simulation.run(max_steps=330)
    long = simulation.ended["long"]
    assert (long.finish_reason, long.num_output_tokens, long.num_preemptions) == (FinishReason.LENGTH, 311, 0)
    assert list(simulation.ended) == ["small", "long"]
    simulation.check_answers()


@pytest.mark.parametrize("max_tokens", [None, 1, 2, 40, 2**31 - 1])
@pytest.mark.parametrize("num_prompt", [38, 39, 40, 41, 160])
def test_lengths_at_the_context_boundary(num_prompt: int, max_tokens: int | None) -> None:
    """O-21: a prompt must leave room for one token; what is asked beyond the context is cut off with LENGTH."""
    simulation = Simulation(num_usable=100, page_size=4, max_model_len=40)
    request = make_request("a", [3] * num_prompt, max_tokens=max_tokens, ignore_eos=True)
    if num_prompt >= 40:
        with pytest.raises(ContextLengthError, match=f"The prompt has {num_prompt} tokens and the context 40.*at most 39 tokens"):
            simulation.add(request)
    else:
        simulation.add(request)
        simulation.run(max_steps=10)
        assert simulation.ended["a"].finish_reason is FinishReason.LENGTH
        assert len(simulation.ended["a"].token_ids) == min(40, num_prompt + (max_tokens or 40))
        simulation.check_answers()
    simulation.check_idle()


def test_empty_prompt_and_known_id_are_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="The prompt is empty"):
        add(scheduler, "a", [])
    add(scheduler, "a", 3)
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        add(scheduler, "a", 3)
    step(scheduler)
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        add(scheduler, "a", 3)
    scheduler.abort("a")
    add(scheduler, "a", 3)


def test_every_refusal_is_an_error_of_ours_and_leaves_nothing_behind() -> None:
    scheduler = make_scheduler(num_usable=2, max_model_len=30)
    for prompt in ([], [1] * 30, [1] * 8):
        with pytest.raises(JaxpagedError) as error:
            add(scheduler, "a", prompt)
        assert error.value.http_status == 400
        assert error.value.param == "prompt"
    assert scheduler.schedule() is None


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        make_scheduler(**{name: 0})  # type: ignore[arg-type]


# What a step holds


def test_one_token_rows_come_first_then_chunks_then_new_requests() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 3, max_tokens=50)
    assert rows_of(step(scheduler)) == [("a", 0, 3, True)]
    add(scheduler, "b", 14, max_tokens=50)
    add(scheduler, "c", 9, max_tokens=50)
    first = step(scheduler)
    assert rows_of(first) == [("a", 3, 1, True), ("b", 0, 9, False)]
    assert first.decision == "admitted 1 of 2: tokens"
    # The rest of b comes before c, and what is left of the budget goes to c.
    assert rows_of(step(scheduler)) == [("a", 4, 1, True), ("b", 9, 5, True), ("c", 0, 4, False)]
    assert rows_of(step(scheduler)) == [("a", 5, 1, True), ("b", 14, 1, True), ("c", 4, 5, True)]
    assert rows_of(step(scheduler)) == [("a", 6, 1, True), ("b", 15, 1, True), ("c", 9, 1, True)]


def test_a_chunk_of_one_token_is_among_the_one_token_rows() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 7)
    add(scheduler, "b", 5)
    assert rows_of(step(scheduler)) == [("b", 0, 1, False), ("a", 0, 7, True)]


def test_rows_and_budget_bound_admission() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        add(scheduler, request_id, 3)
    assert step(scheduler).decision == "admitted 2 of 3: rows"
    assert step(scheduler).decision == "admitted 0 of 1: rows"
    scheduler.abort("a")
    assert step(scheduler).decision == "admitted 1 of 1"
    assert step(scheduler).decision == ""


def test_every_running_row_fits_in_the_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=2)
    for request_id in "abcd":
        add(scheduler, request_id, 1, max_tokens=5)
    assert scheduler.max_num_seqs == 2
    for _ in range(5):
        assert [row[0] for row in rows_of(step(scheduler))] == ["a", "b"]
    assert [row[0] for row in rows_of(step(scheduler))] == ["c", "d"]


def test_pages_are_taken_for_the_tokens_of_the_step_only() -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=6)
    sequence = add(scheduler, "a", 12, max_tokens=50)
    num_pages = []
    for _ in range(8):
        step(scheduler)
        num_pages.append((sequence.num_computed_tokens, len(sequence.pages)))
    assert num_pages == [(6, 2), (12, 3), (13, 4), (14, 4), (15, 4), (16, 4), (17, 5), (18, 5)]


def test_nothing_to_do_is_none() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    add(scheduler, "a", 3, max_tokens=1)
    step(scheduler)
    assert scheduler.schedule() is None
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.sequences) == (0, 0, ())


def test_admission_looks_at_the_pages_that_running_prompts_still_need() -> None:
    # a needs 7 pages with its first token and has 2; b would fit in what is free now, and not in what is left.
    scheduler = make_scheduler(num_usable=10, page_size=4, max_num_batched_tokens=8)
    add(scheduler, "a", 24, max_tokens=2)
    add(scheduler, "b", 12, max_tokens=2)
    for _ in range(4):
        scheduled = step(scheduler)
        assert not scheduled.preempted
        assert "b" not in {row[0] for row in rows_of(scheduled)}
    assert scheduler.schedule() is not None
    assert scheduler.num_running == 1


# Preemption


def test_the_last_admitted_loses_its_pages_and_goes_to_the_front() -> None:
    scheduler = make_scheduler(num_usable=5, page_size=4)
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
    # Its two full pages are found again, and that is no prefix hit of a prompt.
    scheduled = step(scheduler)
    assert scheduled.admitted == (b, c)
    assert b.num_cached_tokens == 0
    assert [row[:3] for row in rows_of(scheduled) if row[0] == "b"] == [("b", 8, 1)]
    assert (scheduled.prefix_queries_tokens, scheduled.prefix_hits_tokens) == (3, 0)


def test_full_pages_of_a_preempted_sequence_are_found_again() -> None:
    scheduler = make_scheduler(num_usable=5, page_size=4)
    a, b = fill_two(scheduler)
    step(scheduler)
    scheduler.abort("a")
    assert b.status is SequenceStatus.PREEMPTED
    scheduled = step(scheduler)
    # Its 9 known tokens: two full pages found, the ninth computed.
    assert rows_of(scheduled) == [("b", 8, 1, True)]


def test_preempted_several_at_once_keep_their_order() -> None:
    scheduler = make_scheduler(num_usable=6, page_size=2, max_num_batched_tokens=64)
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
    a = add(scheduler, "a", 20, max_tokens=2)
    b = add(scheduler, "b", 18, max_tokens=2)
    step(scheduler)
    # Admission does not let this happen; b is slipped in past it.
    scheduler._queue.remove(b)
    scheduler._running.enter(b)
    assert scheduler._pages.grow(b.tables, 16)
    b.num_computed_tokens = b.num_confirmed_tokens = 16
    scheduled = step(scheduler)
    assert scheduled.preempted == (b,)
    assert rows_of(scheduled) == [("a", 8, 8, False)]
    assert a.num_computed_tokens == 16
