"""How a request ends, and what it leaves behind."""

import pytest

from jaxpaged.request import FinishReason
from jaxpaged.scheduler import SequenceStatus
from tests.scheduler.rules import add, fill_two, make_scheduler, step
from tests.scheduler.table_model import END_TOKENS


def test_end_tokens_stop_unless_ignored() -> None:
    """O-20 and O-51: any of several end tokens ends the answer; ignore_eos covers them all; min_tokens passes them by."""
    for end_token in END_TOKENS:
        scheduler = make_scheduler()
        stops = add(scheduler, "stops", 3, max_tokens=10)
        ignores = add(scheduler, "ignores", 3, max_tokens=10, ignore_eos=True)
        waits = add(scheduler, "waits", 3, max_tokens=10, min_tokens=5)
        for number in range(1, 11):
            if scheduler.num_running or number == 1:
                step(scheduler, end_token if number in (3, 7) else 1)
        assert (stops.finish_reason, stops.stop_reason, stops.output_token_ids) == (FinishReason.STOP, None, [1, 1, end_token])
        assert (ignores.finish_reason, ignores.num_output_tokens) == (FinishReason.LENGTH, 10)
        assert (waits.finish_reason, waits.num_output_tokens) == (FinishReason.STOP, 7)


def test_stop_token_ids_name_what_stopped() -> None:
    scheduler = make_scheduler()
    plain = add(scheduler, "plain", 3, stop_token_ids=(5,))
    ignores = add(scheduler, "ignores", 3, stop_token_ids=(5, 7), ignore_eos=True)
    both = add(scheduler, "both", 3, stop_token_ids=(7,))
    step(scheduler, 7)
    assert (ignores.finish_reason, ignores.stop_reason) == (FinishReason.STOP, 7)
    assert (both.finish_reason, both.stop_reason) == (FinishReason.STOP, None)
    assert plain.finish_reason is FinishReason.STOP
    scheduler = make_scheduler()
    plain = add(scheduler, "plain", 3, stop_token_ids=(5,))
    step(scheduler, 5)
    assert (plain.finish_reason, plain.stop_reason, plain.output_token_ids) == (FinishReason.STOP, 5, [5])


def test_an_end_token_is_looked_at_before_the_length() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, max_tokens=1)
    step(scheduler, 7)
    assert sequence.finish_reason is FinishReason.STOP


def test_no_end_tokens_at_all() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, max_tokens=4, eos_token_ids=frozenset())
    for token_id in (7, 8, 7, 8):
        step(scheduler, token_id)
    assert (sequence.finish_reason, sequence.output_token_ids) == (FinishReason.LENGTH, [7, 8, 7, 8])


def test_finished_come_back_in_the_order_of_rows_and_their_pages_can_be_found() -> None:
    scheduler = make_scheduler(page_size=4)
    sequences = [add(scheduler, request_id, 8, max_tokens=1) for request_id in "abc"]
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert scheduler.update(scheduled, [1, 2, 3]) == sequences
    assert [sequence.num_pages_freed for sequence in sequences] == [2, 2, 2]
    # Even of an answer of one step: the same prompt again finds all but the page of its last token.
    again = add(scheduler, "again", sequences[0].token_ids[:8])
    step(scheduler)
    assert again.num_cached_tokens == 4


def test_the_next_turn_of_a_chat_finds_the_turn_before() -> None:
    scheduler = make_scheduler(page_size=4)
    first = add(scheduler, "first", 10, max_tokens=8)
    while not first.is_finished:
        step(scheduler)
    second = add(scheduler, "second", [*first.token_ids, 5, 5, 5])
    scheduled = step(scheduler)
    # 17 tokens of the first turn were computed (its last never is): 4 whole pages.
    assert second.num_cached_tokens == 16
    assert (scheduled.prefix_queries_tokens, scheduled.prefix_hits_tokens) == (21, 16)


def test_a_failed_sequence_leaves_nothing_to_be_found() -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=8)
    sequence = add(scheduler, "a", 8)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.finish(sequence, FinishReason.ERROR)
    assert scheduler.update(scheduled, [1]) == []
    scheduler.check()
    assert scheduler._pages.num_free == 64


def test_stop_string_ends_a_running_sequence_and_beats_length() -> None:
    scheduler = make_scheduler()
    running = add(scheduler, "running", 3, max_tokens=5)
    full = add(scheduler, "full", 3, max_tokens=1)
    step(scheduler)
    scheduler.finish(running, FinishReason.STOP, "END")
    scheduler.finish(full, FinishReason.STOP, "END")
    for sequence in (running, full):
        assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, "END")
    scheduler.finish(full, FinishReason.ABORT)
    assert full.finish_reason is FinishReason.STOP
    scheduler.check()
    assert scheduler._pages.num_in_use == 0


@pytest.mark.parametrize(
    ("first", "then", "is_changed"),
    [
        (FinishReason.LENGTH, FinishReason.STOP, True),
        (FinishReason.LENGTH, FinishReason.ERROR, True),
        (FinishReason.LENGTH, FinishReason.ABORT, False),
        (FinishReason.STOP, FinishReason.STOP, False),
        (FinishReason.STOP, FinishReason.ERROR, True),
        (FinishReason.STOP, FinishReason.LENGTH, False),
        (FinishReason.ABORT, FinishReason.STOP, False),
        (FinishReason.ABORT, FinishReason.ERROR, False),
        (FinishReason.ERROR, FinishReason.STOP, False),
    ],
)
def test_a_second_end_changes_the_reason_only_for_a_stop_string_in_the_last_token_or_a_failure(
    first: FinishReason, then: FinishReason, is_changed: bool
) -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", 3, max_tokens=1)
    if first is FinishReason.LENGTH:
        step(scheduler)
    else:
        scheduler.finish(sequence, first, "first")
    scheduler.finish(sequence, then, "then")
    assert sequence.finish_reason is (then if is_changed else first)
    assert (sequence.stop_reason == "then") == is_changed
    scheduler.check()


@pytest.mark.parametrize("state", ["waiting", "chunk", "decoding", "preempted", "scheduled", "finished"])
def test_pages_come_back_exactly_once_whatever_the_state(state: str) -> None:
    """O-40."""
    scheduler = make_scheduler(num_usable=4, page_size=4, max_num_batched_tokens=16, is_hopeful=True)
    if state == "preempted":
        _, sequence = fill_two(scheduler)
        step(scheduler)
        assert sequence.status is SequenceStatus.PREEMPTED
        scheduler.abort("a")
    else:
        sequence = add(scheduler, "b", 7, max_tokens=1 if state == "finished" else 8)
        if state == "chunk":
            scheduler.max_num_batched_tokens = 5
        if state != "waiting":
            step(scheduler)
    scheduled = scheduler.schedule() if state == "scheduled" else None
    aborted = scheduler.abort("b")
    if state == "finished":
        assert aborted is None
    else:
        assert aborted is sequence
        assert sequence.finish_reason is FinishReason.ABORT
        assert scheduler.abort("b") is None
    if scheduled is not None:
        num_tokens = len(sequence.token_ids)
        assert scheduler.update(scheduled, [1]) == []
        assert len(sequence.token_ids) == num_tokens
    scheduler.check()
    assert scheduler._pages.num_in_use == 0
    assert scheduler.sequences == ()


def test_abort_of_an_unknown_id_is_none() -> None:
    assert make_scheduler().abort("nobody") is None


def test_a_leak_is_an_error_and_not_a_wait_for_ever() -> None:
    scheduler = make_scheduler(num_usable=4, page_size=4)
    scheduler._pages.allocate(3)
    add(scheduler, "a", 8)
    with pytest.raises(AssertionError, match="3 pages are in use by nobody"):
        scheduler.schedule()
