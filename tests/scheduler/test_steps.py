"""What a step holds: one token for each that runs, chunks, new requests."""

from tests.scheduler.rules import add, make_scheduler, rows_of, step


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
