"""Several samples of one prompt, and tenants with salts: who shares pages with whom."""

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import MAX_SEED, FinishReason, samples_of
from jaxpaged.scheduler import Scheduler, Sequence
from tests.scheduler.rules import add, ids_of, make_scheduler, rows_of, step
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import make_request


def add_samples(scheduler: Scheduler, num_prompt: int, n: int, **fields: object) -> list[Sequence]:
    request = make_request("x", [3] * num_prompt, **fields)  # type: ignore[arg-type]
    sequences = [Sequence(sample) for sample in samples_of(request, n)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def test_samples_have_names_and_seeds_of_their_own() -> None:
    for seed in (0, 5, MAX_SEED):
        request = make_request("x", [1, 2], seed=seed, priority=3, cache_salt="s")
        samples = samples_of(request, 100)
        assert [sample.request_id for sample in samples] == [f"x#{index}" for index in range(100)]
        assert samples[0].seed == seed
        assert len({sample.seed for sample in samples}) == 100
        assert all(0 <= sample.seed <= MAX_SEED for sample in samples)
        assert {(sample.sample_group, sample.priority, sample.cache_salt, sample.params.n) for sample in samples} == {("x", 3, "s", 1)}


def test_samples_wait_for_the_prompt_of_the_first_and_share_its_pages() -> None:
    """O-15 on the host's side: whole pages are shared, the partial last one is computed by each, and nothing is copied."""
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=16)
    first, *others = add_samples(scheduler, 23, 3)
    assert (scheduler.num_waiting, len(scheduler.sequences)) == (3, 3)
    assert rows_of(step(scheduler)) == [("x#0", 0, 16, False)]
    assert rows_of(step(scheduler)) == [("x#0", 16, 7, True)]
    scheduled = step(scheduler)
    assert ids_of(scheduled.admitted) == ["x#1", "x#2"]
    assert rows_of(scheduled) == [("x#0", 23, 1, True), ("x#1", 20, 3, True), ("x#2", 20, 3, True)]
    assert [sequence.num_cached_tokens for sequence in (first, *others)] == [0, 20, 20]
    assert (scheduled.prefix_queries_tokens, scheduled.prefix_hits_tokens) == (46, 40)
    assert first.pages[:5] == others[0].pages[:5] == others[1].pages[:5]
    assert len({sequence.pages[5] for sequence in (first, *others)}) == 3


def test_samples_of_a_prompt_that_is_cached_wait_for_one_step() -> None:
    """The first finds all whole pages of the prompt, so that none fills up in its step: the others go on all the same."""
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=64)
    add(scheduler, "before", [3] * 23, max_tokens=1)
    step(scheduler)
    add_samples(scheduler, 23, 3, max_tokens=9)
    assert rows_of(step(scheduler)) == [("x#0", 20, 3, True)]
    assert ids_of(step(scheduler).admitted) == ["x#1", "x#2"]


def test_other_requests_do_not_wait_for_a_group() -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=16)
    add_samples(scheduler, 23, 2)
    add(scheduler, "a", 3)
    step(scheduler)
    assert ids_of(step(scheduler).admitted) == ["a"]


@pytest.mark.parametrize(("num_prompt", "enable_prefix_caching"), [(4, True), (23, False)])
def test_nobody_waits_when_there_is_nothing_to_share(num_prompt: int, enable_prefix_caching: bool) -> None:
    scheduler = make_scheduler(page_size=4, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=100)
    add_samples(scheduler, num_prompt, 3)
    assert ids_of(step(scheduler).admitted) == ["x#0", "x#1", "x#2"]


def test_prompt_of_a_page_and_a_token_is_shared() -> None:
    scheduler = make_scheduler(page_size=4)
    add_samples(scheduler, 5, 2)
    assert ids_of(step(scheduler).admitted) == ["x#0"]
    assert rows_of(step(scheduler)) == [("x#0", 5, 1, True), ("x#1", 4, 1, True)]


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_when_the_first_is_gone_the_next_leads(state: str) -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=8)
    add_samples(scheduler, 23, 4)
    if state == "running":
        step(scheduler)
    scheduler.abort("x#2")
    scheduler.abort("x#0")
    scheduler.check()
    hit = 8 if state == "running" else 0
    assert rows_of(step(scheduler)) == [("x#1", hit, 8, False)]
    while (scheduled := step(scheduler)).rows[0].samples is False:
        assert not scheduled.admitted
    assert ids_of(step(scheduler).admitted) == ["x#3"]
    for request_id in ("x#1", "x#3"):
        scheduler.abort(request_id)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert not scheduler._samples._leaders


def test_a_first_that_ends_with_its_prompt_frees_the_others_once() -> None:
    scheduler = make_scheduler(page_size=4)
    first, second = add_samples(scheduler, 9, 2, max_tokens=1)
    step(scheduler)
    assert first.finish_reason is FinishReason.LENGTH
    assert rows_of(step(scheduler)) == [("x#1", 8, 1, True)]
    assert second.is_finished


def test_all_of_a_group_can_be_aborted_while_they_wait() -> None:
    scheduler = make_scheduler()
    for request_id in [sequence.request_id for sequence in add_samples(scheduler, 23, 4)]:
        assert scheduler.abort(request_id) is not None
    assert scheduler.schedule() is None
    assert (len(scheduler._samples), scheduler._samples.num_prompt_tokens) == (0, 0)
    add_samples(scheduler, 23, 2)
    assert ids_of(step(scheduler).admitted) == ["x#0"]


def test_samples_end_each_with_its_own_answer() -> None:
    simulation = Simulation(num_usable=120, page_size=4, max_num_batched_tokens=16, depth=1)
    for index in range(6):
        for sample in samples_of(make_request(f"r{index}", [index] * 21, max_tokens=20, seed=index), 4):
            simulation.add(sample)
    simulation.run(max_steps=1000)
    simulation.check_answers()
    assert len({tuple(sequence.output_token_ids) for sequence in simulation.ended.values()}) > 12
    # 3 of 4 find 20 of their 21 tokens.
    assert simulation.outcome.num_hit_tokens == 6 * 3 * 20


def test_salts_keep_tenants_apart() -> None:
    scheduler = make_scheduler(page_size=4)
    hits = []
    for request_id, salt in (("a", None), ("b", "s"), ("c", "t"), ("d", None), ("e", "s"), ("f", "S")):
        sequence = add(scheduler, request_id, [3] * 9, max_tokens=1, cache_salt=salt)
        step(scheduler)
        hits.append(sequence.num_cached_tokens)
    assert hits == [0, 0, 0, 8, 8, 0]


@pytest.mark.parametrize("salt", ["", "s" * 129, 5, b"salt"])
def test_a_salt_is_a_short_text(salt: object) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt must be a string of 1 to 128 characters"):
        make_request("a", [1], cache_salt=salt)
    assert make_request("a", [1], cache_salt="s" * 128).cache_salt == "s" * 128
