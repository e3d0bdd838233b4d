"""Sampling through the whole engine: tiny temperatures, seeds that belong to the request, edges of top_k, ids that nobody may choose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import FinishReason, SamplingParams
from jaxpaged.start import Started
from tests.engine.conftest import real_bench, tiny_bench
from tests.fakes import Bench, Canary
from tests.tiny_engine import start_tiny
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.real]

PROMPT = "The weather in the mountains was"


def test_o14_no_temperature_is_the_models_default(tiny: Started) -> None:
    params = tiny.intake.request("a", SamplingParams(temperature=None), arrival_s=0.0).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)


def beside_an_unseeded_one(bench: Bench, add_it: Callable[..., str]) -> str:
    bench.add("Something else", temperature=1.0, max_tokens=12)
    return add_it()


def beside_a_seeded_one(bench: Bench, add_it: Callable[..., str]) -> str:
    bench.add("Something else", temperature=1.0, seed=12, max_tokens=12)
    return add_it()


def after_seven_others(bench: Bench, add_it: Callable[..., str]) -> str:
    for index in range(7):
        bench.add(f"Number {index} of seven", temperature=0.0 if index % 2 else 1.0, max_tokens=10)
    return add_it()


def three_steps_late(bench: Bench, add_it: Callable[..., str]) -> str:
    bench.add("Something else", temperature=1.0, max_tokens=12)
    for _ in range(3):
        bench.step()
    return add_it()


def with_a_neighbour_that_leaves(bench: Bench, add_it: Callable[..., str]) -> str:
    bench.add("Gone soon", temperature=1.0, max_tokens=2)
    gone = bench.add("Gone sooner", temperature=1.0, max_tokens=12)
    request_id = add_it()
    bench.step()
    bench.abort(gone)
    return request_id


def preempted_twice(bench: Bench, add_it: Callable[..., str]) -> str:
    request_id = add_it()
    for num_steps in (2, 3):
        for _ in range(num_steps):
            bench.step()
        bench.evict()
    return request_id


def with_its_prefix_cached(bench: Bench, add_it: Callable[..., str]) -> str:
    add_it()
    bench.run()
    return add_it()


SITUATIONS = (
    beside_an_unseeded_one,
    beside_a_seeded_one,
    after_seven_others,
    three_steps_late,
    with_a_neighbour_that_leaves,
    preempted_twice,
    with_its_prefix_cached,
)
"""Ways in which a request may meet others: each adds it with `add_it` and returns its id."""


def play(bench: Bench, situation: Callable[[Bench, Callable[..., str]], str]) -> list[int]:
    """The ids of the request with seed 11 in one situation."""

    def add_it() -> str:
        return bench.add(PROMPT, temperature=0.8, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True)

    request_id = situation(bench, add_it)
    bench.run()
    return bench.ids(request_id)


def test_o15_a_seed_belongs_to_its_request(real: Started, real_canary: Canary) -> None:
    bench = real_bench(real, canary=real_canary, max_num_seqs=8)
    alone = bench.ask(PROMPT, temperature=0.8, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True).outputs[0].token_ids
    situations = (after_seven_others, preempted_twice)
    assert {situation: play(bench, situation) for situation in situations} == dict.fromkeys(situations, alone)
    bench.after_check()


def test_o15_four_times_over(tiny: Started) -> None:
    bench = tiny_bench(tiny)
    alone = bench.ask(PROMPT, temperature=0.8, top_p=0.95, seed=11, max_tokens=8, ignore_eos=True).outputs[0].token_ids
    for _ in range(4):
        assert {situation: play(bench, situation) for situation in SITUATIONS} == dict.fromkeys(SITUATIONS, alone)
    bench.after_check()


def test_o15_one_seed_and_one_prompt_give_one_answer_and_two_seeds_do_not(tiny: Started) -> None:
    bench = tiny_bench(tiny)
    ids = [bench.add(PROMPT, temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in (3, 3, 4, 3 + 2**32)]
    bench.run()
    answers = [tuple(bench.ids(request_id)) for request_id in ids]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3
    bench.after_check()


def test_unseeded_requests_differ_and_a_seeded_one_does_not_shift_them(tiny: Started, tiny_folder: Path) -> None:
    def unseeded(*, with_a_seeded_one: bool) -> list[tuple[int, ...]]:
        bench = tiny_bench(tiny)
        ids = []
        for _ in range(3):
            if with_a_seeded_one:
                bench.add(PROMPT, temperature=1.0, seed=5, max_tokens=3)
            ids.append(bench.add(PROMPT, temperature=1.0, seed=None, max_tokens=12, ignore_eos=True))
        bench.run()
        return [tuple(bench.ids(request_id)) for request_id in ids]

    answers = unseeded(with_a_seeded_one=False)
    assert len(set(answers)) == 3
    assert unseeded(with_a_seeded_one=True) == answers


@pytest.mark.parametrize("on_the_real_model", [False, True])
def test_o16_top_k_edges(real: Started, real_canary: Canary, tiny: Started, on_the_real_model: bool) -> None:
    """Each beside greedy requests: off is off, above the vocabulary is off, 1 is greedy."""
    bench = real_bench(real, canary=real_canary) if on_the_real_model else tiny_bench(tiny)
    vocab = bench.runner.vocab
    greedy = bench.add(PROMPT, max_tokens=6, ignore_eos=True)
    ids = {
        k: bench.add(PROMPT, temperature=0.9, seed=7, top_k=k, max_tokens=6, ignore_eos=True)
        for k in (None, -1, 0, 1, vocab - 1, vocab, vocab + 1, 10**9)
    }
    bench.run()
    off = bench.ids(ids[None])
    assert bench.ids(ids[1]) == bench.ids(greedy) != off
    assert all(bench.ids(ids[k]) == off for k in (-1, 0, vocab, vocab + 1, 10**9))
    assert len(bench.ids(ids[vocab - 1])) == 6
    assert bench.ask(PROMPT, max_tokens=6, ignore_eos=True).outputs[0].token_ids == bench.ids(greedy)
    bench.after_check()


@pytest.mark.parametrize("top_k", [-2, 0.5, 1.0, "5", True, 2**31, [1]])
def test_o16_top_k_that_is_no_count_is_refused(top_k: Any) -> None:
    with pytest.raises(InvalidRequestError, match="top_k must be") as caught:
        SamplingParams(top_k=top_k)
    assert caught.value.param == "top_k"


def test_min_tokens_keeps_end_tokens_and_stop_ids_away(tiny: Started) -> None:
    """The sampler bans them, so that an answer does not merely go on past one."""
    bench = tiny_bench(tiny)
    likely = bench.ask(PROMPT, max_tokens=40, ignore_eos=True).outputs[0].token_ids
    stops = sorted(set(likely[:12]))
    answer = bench.ask(PROMPT, max_tokens=40, min_tokens=10, stop_token_ids=stops).outputs[0]
    assert not set(answer.token_ids[:10]) & {*stops, *tiny.intake.eos_token_ids}
    assert len(answer.token_ids) >= 10
    bench.after_check()


def test_o55_ids_beyond_the_tokenizer_are_never_sampled(tmp_path: Path, programs: Path) -> None:
    """A head of 448 rows over a tokenizer of 384 ids, 2,000 tokens at temperature 2."""
    write_tiny_llama(tmp_path, vocab_size=448, tokenizer_vocab_size=384)
    started = start_tiny(tmp_path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    bench = Bench(started.engine.runner, started.intake.tokenizer, eos_token_ids=started.intake.eos_token_ids)
    ids = [bench.add([5 + index], temperature=2.0, seed=index, max_tokens=250, ignore_eos=True) for index in range(8)]
    bench.run()
    drawn = [token_id for request_id in ids for token_id in bench.ids(request_id)]
    assert len(drawn) == 2000
    assert max(drawn) < 384
    assert len(set(drawn)) > 300
    # They may stand in a prompt: the model has rows for them, and they have no text.
    answer = bench.ask([400, 447, 5], max_tokens=3)
    assert answer.outputs[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidRequestError, match="from 0 to 447"):
        bench.add([448])
    bench.after_check()
    started.engine.close()
