"""Who is turned away, and what is cut short."""

import pytest

from jaxpaged.errors import ConfigError, ContextLengthError, InvalidRequestError, JaxpagedError, PoolTooSmallError
from jaxpaged.request import FinishReason
from tests.scheduler.rules import add, make_scheduler, step
from tests.scheduler.simulation import Simulation
from tests.scheduler.table_model import make_request


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
