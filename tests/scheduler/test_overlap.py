"""Steps that are scheduled before the results of earlier ones are known."""

import random

import pytest

from jaxpaged.request import FinishReason
from jaxpaged.scheduler import ScheduledStep
from tests.scheduler.rules import add, ids_of, make_scheduler, rows_of, schedule, step, update
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import END_TOKENS, make_request

END_TOKEN = min(END_TOKENS)


def slots_of(scheduled: ScheduledStep) -> dict[str, tuple[int, bool]]:
    return {row.sequence.request_id: (row.slot, row.takes_from_slot) for row in scheduled.rows}


def test_sequences_move_on_at_once_and_unknown_ids_come_from_the_slot() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    a, b = add(scheduler, "a", 5), add(scheduler, "b", 9)
    first = schedule(scheduler)
    assert rows_of(first) == [("a", 0, 5, True), ("b", 0, 3, False)]
    assert (a.num_computed_tokens, a.num_confirmed_tokens, a.num_pending_ids, a.num_tokens) == (5, 0, 1, 6)
    assert (b.num_computed_tokens, b.num_pending_ids, b.num_tokens) == (3, 0, 9)
    second = schedule(scheduler)
    assert rows_of(second) == [("a", 5, 1, True), ("b", 3, 6, True)]
    assert slots_of(second) == {"a": (0, True), "b": (1, False)}
    third = schedule(scheduler)
    assert rows_of(third) == [("a", 6, 1, True), ("b", 9, 1, True)]
    assert slots_of(third) == {"a": (0, True), "b": (1, True)}
    assert (a.num_pending_ids, a.token_ids[5:], scheduler.num_in_flight) == (3, [], 3)
    for scheduled, token_id in ((first, 1), (second, 2), (third, 3)):
        update(scheduler, scheduled, token_id)
    assert (a.num_pending_ids, a.output_token_ids, b.output_token_ids) == (0, [1, 2, 3], [2, 3])
    assert (a.num_computed_tokens, a.num_confirmed_tokens) == (7, 7)
    # Once the id is known there is no need for the slot.
    assert slots_of(schedule(scheduler)) == {"a": (0, False), "b": (1, False)}


def test_steps_are_taken_in_once_and_in_order() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    first, second = schedule(scheduler), schedule(scheduler)
    with pytest.raises(AssertionError, match="in the order in which they were scheduled"):
        scheduler.update(second, [1])
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    first = schedule(scheduler)
    update(scheduler, first)
    with pytest.raises(AssertionError, match="once each"):
        scheduler.update(first, [1])


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_length_that_is_known_ahead_is_never_overrun(max_tokens: int) -> None:
    scheduler = make_scheduler()
    a = add(scheduler, "a", 5, max_tokens=max_tokens)
    flying = [schedule(scheduler) for _ in range(max_tokens)]
    # Its last id is on its way: there is nothing to schedule, and the pages are still its own.
    assert scheduler.schedule() is None
    assert (scheduler.num_running, scheduler.num_in_flight, a.num_pending_ids) == (1, max_tokens, max_tokens)
    for scheduled in flying[:-1]:
        assert update(scheduler, scheduled) == []
    assert update(scheduler, flying[-1]) == [a]
    assert (a.finish_reason, a.num_output_tokens) == (FinishReason.LENGTH, max_tokens)


def test_lengths_at_the_end_of_context_and_pool_are_known_ahead() -> None:
    for options in ({"max_model_len": 9}, {"num_usable": 2}):
        scheduler = make_scheduler(**options)  # type: ignore[arg-type]
        a = add(scheduler, "a", 7, max_tokens=None)
        flying = [schedule(scheduler), schedule(scheduler)]
        assert scheduler.schedule() is None
        assert [update(scheduler, scheduled) for scheduled in flying] == [[], [a]]
        assert a.num_tokens == 9


@pytest.mark.parametrize("end", ["end token", "stop token id", "stop string", "abort"])
def test_a_token_after_the_end_is_thrown_away(end: str) -> None:
    scheduler = make_scheduler(page_size=4, max_num_seqs=1)
    a = add(scheduler, "a", 3, stop_token_ids=(5,))
    first, second = schedule(scheduler), schedule(scheduler)
    pages = list(a.pages)
    if end == "abort":
        scheduler.abort("a")
    elif end == "stop string":
        update(scheduler, first)
        scheduler.finish(a, FinishReason.STOP, "END")
    else:
        assert update(scheduler, first, END_TOKEN if end == "end token" else 5) == [a]
    assert a.is_finished
    assert scheduler._pages.num_in_use == 0
    known = list(a.token_ids)
    assert not second.rows[0].is_awaited
    # The slot and the pages are given out again while the late step still runs: the device runs steps in order.
    b = add(scheduler, "b", 3)
    third = schedule(scheduler)
    assert (third.rows[0].slot, b.pages) == (0, pages[:1])
    if end == "abort":
        assert update(scheduler, first) == []
    assert update(scheduler, second, 6) == []
    assert a.token_ids == known
    assert a.num_pending_ids == 0
    update(scheduler, third)
    # Token 3 was computed by the late step at most: the page that it fills is not to be found.
    assert not any(map(scheduler._pages.is_shareable, pages))


def test_only_pages_whose_ids_are_known_are_committed() -> None:
    scheduler = make_scheduler(page_size=2)
    a = add(scheduler, "a", 3)
    flying = [schedule(scheduler) for _ in range(3)]
    assert len(a.pages) == 3
    shareable = []
    for scheduled in flying:
        update(scheduler, scheduled)
        shareable.append([scheduler._pages.is_shareable(page) for page in a.pages])
    # After step n tokens 0 to n + 2 are computed for certain.
    assert shareable == [[True, False, False], [True, True, False], [True, True, False]]


def test_an_ended_sequence_leaves_what_was_computed_for_certain() -> None:
    scheduler = make_scheduler(page_size=4)
    add(scheduler, "a", 9)
    first, second = schedule(scheduler), schedule(scheduler)
    update(scheduler, first, END_TOKEN)
    update(scheduler, second)
    again = add(scheduler, "again", [197] * 9)
    step(scheduler)
    assert again.num_cached_tokens == 8


def test_slots_are_distinct_and_the_freed_one_is_used_again() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for request_id in "abc":
        add(scheduler, request_id, 2)
    assert slots_of(step(scheduler)) == {"a": (0, False), "b": (1, False), "c": (2, False)}
    scheduler.abort("b")
    assert scheduler.schedule() is not None
    add(scheduler, "d", 2)
    assert slots_of(schedule(scheduler)) == {"a": (0, True), "c": (2, True), "d": (1, False)}


def test_a_sequence_that_needs_the_host_waits_for_its_id_and_the_others_go_on() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 3), add(scheduler, "b", 3)
    a.needs_host = True
    first = schedule(scheduler)
    assert rows_of(first) == [("a", 0, 3, True), ("b", 0, 3, True)]
    second = schedule(scheduler)
    assert rows_of(second) == [("b", 3, 1, True)]
    update(scheduler, first)
    third = schedule(scheduler)
    assert slots_of(third) == {"a": (0, False), "b": (1, True)}
    update(scheduler, second)
    update(scheduler, third)
    assert (a.num_output_tokens, b.num_output_tokens) == (2, 3)
    scheduler.abort("b")
    fourth = schedule(scheduler)
    assert scheduler.schedule() is None
    update(scheduler, fourth)


def test_a_failed_row_beside_a_step_in_flight() -> None:
    scheduler = make_scheduler(page_size=2)
    a = add(scheduler, "a", 4)
    first, second = schedule(scheduler), schedule(scheduler)
    pages = list(a.pages)
    scheduler.finish(a, FinishReason.ERROR)
    assert update(scheduler, first) == update(scheduler, second) == []
    assert not any(map(scheduler._pages.is_shareable, pages))
    assert a.num_output_tokens == 0


def test_nothing_is_scheduled_in_a_pause() -> None:
    scheduler = make_scheduler()
    a = add(scheduler, "a", 3)
    first = schedule(scheduler)
    scheduler.pause()
    assert scheduler.is_paused
    assert scheduler.schedule() is None
    add(scheduler, "b", 3)
    update(scheduler, first)
    assert scheduler.schedule() is None
    assert (a.num_output_tokens, len(a.pages), scheduler.num_waiting) == (1, 1, 1)
    scheduler.resume()
    assert rows_of(step(scheduler)) == [("a", 3, 1, True), ("b", 0, 3, True)]


def test_reset_of_the_prefix_cache_with_steps_in_flight() -> None:
    scheduler = make_scheduler(page_size=2)
    a = add(scheduler, "a", 6)
    first = schedule(scheduler)
    scheduler.reset_prefix_cache()
    update(scheduler, first)
    assert not any(map(scheduler._pages.is_shareable, a.pages))
    again = add(scheduler, "again", list(a.token_ids))
    step(scheduler)
    assert again.num_cached_tokens == 0


def test_pages_that_are_about_to_come_back_are_waited_for() -> None:
    """Nobody is preempted for a page while another sequence's last id is on its way."""
    scheduler = make_scheduler(num_usable=3, page_size=4, is_hopeful=True)
    add(scheduler, "a", 4, max_tokens=2)
    b = add(scheduler, "b", 3, max_tokens=6)
    first, second = schedule(scheduler), schedule(scheduler)
    assert ids_of(first.admitted) == ["a", "b"]
    # a holds two pages and ends with the step in flight; b needs a second one.
    assert scheduler.schedule() is None
    update(scheduler, first)
    assert scheduler.schedule() is None
    update(scheduler, second)
    assert rows_of(schedule(scheduler)) == [("b", 4, 1, True)]
    assert b.num_preemptions == 0


def test_a_long_beginning_that_is_being_computed_is_waited_for() -> None:
    shared = list(range(100, 116))
    scheduler = make_scheduler(max_num_batched_tokens=32)
    add(scheduler, "a", [*shared, 1])
    b = add(scheduler, "b", [*shared, 2])
    first = schedule(scheduler)
    assert rows_of(first) == [("a", 0, 17, True)]
    assert first.decision == "admitted 1 of 2: its beginning is being computed"
    second = schedule(scheduler)
    assert rows_of(second) == [("a", 17, 1, True)]
    update(scheduler, first)
    assert rows_of(schedule(scheduler)) == [("a", 18, 1, True), ("b", 16, 1, True)]
    assert b.num_cached_tokens == 16


@pytest.mark.parametrize(
    ("other", "options"),
    [
        pytest.param([*range(100, 107), 1, 1, 1, 1, 1], {}, id="a quarter of a step is not shared"),
        pytest.param([*range(100, 108)], {}, id="the last token is never found"),
        pytest.param([*range(100, 116), 2], {"enable_prefix_caching": False}, id="nothing is ever found"),
        pytest.param([*range(100, 116), 2], {"cache_salt": "own"}, id="another salt"),
    ],
)
def test_what_is_not_found_later_is_not_waited_for(other: list[int], options: dict[str, object]) -> None:
    fields = {name: value for name, value in options.items() if name == "cache_salt"}
    caching = bool(options.get("enable_prefix_caching", True))
    scheduler = make_scheduler(max_num_batched_tokens=36, enable_prefix_caching=caching)
    add(scheduler, "a", [*range(100, 116), 1])
    add(scheduler, "b", other, **fields)
    assert rows_of(schedule(scheduler)) == [("a", 0, 17, True), ("b", 0, len(other), True)]


def test_a_beginning_is_not_waited_for_when_who_computes_it_has_gone() -> None:
    shared = list(range(100, 116))
    scheduler = make_scheduler(max_num_batched_tokens=32)
    add(scheduler, "a", [*shared, 1])
    add(scheduler, "b", [*shared, 2])
    schedule(scheduler)
    scheduler.abort("a")
    assert rows_of(schedule(scheduler)) == [("b", 0, 17, True)]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_do_not_depend_on_how_far_ahead_steps_are_scheduled(enable_prefix_caching: bool) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 40))] for _ in range(40)]
    outputs = []
    for depth in range(3):
        simulation = Simulation(
            num_usable=40, page_size=4, max_num_batched_tokens=24, depth=depth, enable_prefix_caching=enable_prefix_caching
        )
        for index, prompt in enumerate(prompts):
            simulation.add(make_request(f"r{index}", prompt, max_tokens=40))
        simulation.run(max_steps=2000)
        simulation.check_answers()
        assert (simulation.outcome.num_late_rows > 0) == (depth > 0)
        outputs.append({request_id: sequence.output_token_ids for request_id, sequence in simulation.ended.items()})
    assert outputs[0] == outputs[1] == outputs[2]
