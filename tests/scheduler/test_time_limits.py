"""How much may wait, and for how long."""

import pytest

from jaxpaged.errors import ConfigError, PoolTooSmallError, QueueFullError
from jaxpaged.request import FinishReason, samples_of
from jaxpaged.scheduler import Sequence, SequenceStatus
from tests.scheduler.rules import Clock, add, ids_of, make_scheduler, schedule, step, update
from tests.scheduler.table_model import make_request


def test_a_full_queue_refuses_the_next_one_and_takes_it_later() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_requests=2)
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    with pytest.raises(QueueFullError, match="2 requests are waiting, and max_num_queued_requests is 2: try again later") as error:
        add(scheduler, "c", 3)
    assert (error.value.code, error.value.http_status) == ("queue_full", 429)
    step(scheduler)
    add(scheduler, "c", 3)
    with pytest.raises(QueueFullError):
        add(scheduler, "d", 3)
    scheduler.check()


def test_tokens_that_wait_are_counted_and_an_empty_queue_takes_anything() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_tokens=10)
    add(scheduler, "a", 50)
    with pytest.raises(
        QueueFullError, match="50 prompt tokens are waiting, and with the 1 of this request .* more than max_num_queued_tokens 10"
    ):
        add(scheduler, "b", 1)
    step(scheduler)
    add(scheduler, "b", 6)
    add(scheduler, "c", 4)
    with pytest.raises(QueueFullError):
        add(scheduler, "d", 1)
    scheduler.abort("b")
    add(scheduler, "d", 6)


def test_held_samples_count_as_waiting() -> None:
    scheduler = make_scheduler(max_num_queued_requests=3)
    for sample in samples_of(make_request("x", [1] * 9), 3):
        scheduler.add(Sequence(sample))
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        add(scheduler, "a", 3)


def test_a_bad_request_is_bad_also_when_the_queue_is_full() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_requests=1, max_model_len=30)
    add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="the context 30"):
        add(scheduler, "b", 40)
    with pytest.raises(ValueError, match="already in use"):
        add(scheduler, "a", 3)


def test_a_request_that_waits_too_long_is_given_up() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock, queue_timeout_s=2.0)
    runs = add(scheduler, "runs", 3, max_tokens=50)
    step(scheduler)
    clock.now = 1.0
    waits = add(scheduler, "waits", 3)
    assert scheduler.next_deadline_s == 2.0
    clock.now = 2.9
    assert scheduler.expire() == []
    assert scheduler.next_deadline_s == 3.0
    clock.now = 3.0
    assert scheduler.expire() == [waits]
    assert (waits.finish_reason, waits.message) == (FinishReason.ABORT, "The request waited 2 s and was not started (queue_timeout_s)")
    assert (scheduler.num_waiting, runs.status, scheduler.next_deadline_s) == (0, SequenceStatus.RUNNING, None)
    assert scheduler.expire() == []


def test_who_has_been_started_is_not_given_up_while_it_waits_again() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock, queue_timeout_s=2.0)
    low = add(scheduler, "low", 3, max_tokens=50, priority=1)
    step(scheduler)
    add(scheduler, "high", 3, max_tokens=50)
    step(scheduler)
    assert step(scheduler).preempted == (low,)
    clock.now = 5.0
    assert scheduler.expire() == []


@pytest.mark.parametrize("state", ["waiting", "running", "in flight", "held"])
def test_a_request_that_takes_too_long_ends_with_what_it_has(state: str) -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock, request_timeout_s=1.5)
    if state == "held":
        for sample in samples_of(make_request("x", [1] * 9), 2):
            scheduler.add(Sequence(sample))
        sequence = scheduler.sequences[1]
    else:
        sequence = add(scheduler, "x", 3)
    if state in ("running", "in flight"):
        step(scheduler)
    flying = schedule(scheduler) if state == "in flight" else None
    clock.now = 1.5
    assert sequence in scheduler.expire()
    assert (sequence.finish_reason, sequence.message) == (
        FinishReason.ABORT,
        "The request took longer than 1.5 s (request_timeout_s)",
    )
    assert sequence.num_output_tokens == (state in ("running", "in flight"))
    if flying is not None:
        assert update(scheduler, flying) == []
    scheduler.check()
    assert scheduler._pages.num_in_use == 0
    assert scheduler.schedule() is None


def test_both_limits_at_once_end_a_request_once() -> None:
    clock = Clock()
    scheduler = make_scheduler(max_num_seqs=1, clock=clock, queue_timeout_s=1.0, request_timeout_s=1.0)
    for request_id in "abc":
        add(scheduler, request_id, 3)
    step(scheduler)
    clock.now = 1.0
    assert sorted(ids_of(tuple(scheduler.expire()))) == ["a", "b", "c"]


def test_one_of_a_thing_is_said_in_the_singular() -> None:
    scheduler = make_scheduler(num_usable=1, max_num_seqs=1, max_num_queued_requests=1)
    with pytest.raises(ConfigError, match="leaves nothing of a page pool of 1 page: "):
        make_scheduler(num_usable=1, reserve_pages=1)
    with pytest.raises(PoolTooSmallError, match="the page pool has 1 page of 4 tokens: "):
        add(scheduler, "long", 100)
    add(scheduler, "a", 1)
    with pytest.raises(QueueFullError, match="1 request is waiting, and "):
        add(scheduler, "b", 1)


def test_limits_of_ended_requests_do_not_pile_up() -> None:
    scheduler = make_scheduler(request_timeout_s=1000.0)
    for number in range(1000):
        add(scheduler, f"r{number}", 3, max_tokens=1)
        step(scheduler)
    assert len(scheduler._deadlines._heap) <= 130


@pytest.mark.parametrize("reserve_pages", [64, 65, 10**9])
def test_a_reserve_that_leaves_nothing_is_refused(reserve_pages: int) -> None:
    with pytest.raises(ConfigError, match=f"reserve_pages {reserve_pages} leaves nothing of a page pool of 64 pages"):
        make_scheduler(num_usable=64, reserve_pages=reserve_pages)
    make_scheduler(num_usable=64, reserve_pages=63)


@pytest.mark.parametrize(("num_usable", "reserve"), [(1, 0), (99, 0), (100, 1), (1000, 10)])
def test_the_reserve_is_one_percent_unless_said_otherwise(num_usable: int, reserve: int) -> None:
    assert make_scheduler(num_usable=num_usable)._limits.reserve_pages == reserve
