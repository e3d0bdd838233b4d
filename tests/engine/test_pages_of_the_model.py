"""Real keys and values in shared, recycled and padded pages: prefix cache, batch layouts, page sizes, attention back-ends."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpaged.layers.attention
from jaxpaged import events
from jaxpaged.kv_cache import KVCache
from jaxpaged.start import Started
from pallas_kernels.paged_attention import paged_attention
from tests.engine.conftest import tiny_bench
from tests.fakes import Bench, NarrowRunner
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax

SHARED = (0, 1, 15, 16, 17, 31, 32, 33, 160)


def prompts_that_share(count: int) -> list[list[int]]:
    """Prompts whose first 0 to 160 tokens are those of others, and then none."""
    common = [3 + (index * 7) % 380 for index in range(160)]
    rng = random.Random(0)
    prompts = []
    for index in range(count):
        own = [rng.randrange(3, 384) for _ in range(1 + index % 20)]
        prompts.append(common[: SHARED[index % len(SHARED)]] + own)
    return prompts


def answers(bench: Bench, prompts: list[list[int]], *, max_tokens: int = 4) -> list[list[int]]:
    """All at once, greedy."""
    ids = [bench.add(prompt, max_tokens=max_tokens, ignore_eos=True) for prompt in prompts]
    bench.run()
    return [bench.ids(request_id) for request_id in ids]


def num_cached_tokens(bench: Bench) -> int:
    return sum(event.num_cached_tokens for event in bench.events.of(events.RequestFinished))


def test_o37_answers_do_not_depend_on_the_cache(tiny: Started) -> None:
    """100 prompts: without a cache, cold, warm, and warm again after 1,000 others have gone through the pool."""
    prompts = prompts_that_share(100)
    expected = answers(tiny_bench(tiny, enable_prefix_caching=False), prompts)
    bench = tiny_bench(tiny)
    assert answers(bench, prompts) == expected
    cold = num_cached_tokens(bench)
    assert answers(bench, prompts) == expected
    warm = num_cached_tokens(bench) - cold
    assert warm > cold > 1000
    others = [[3 + index % 380, 3 + index // 380, *range(10, 10 + index % 30)] for index in range(1000)]
    answers(bench, others, max_tokens=1)
    before = num_cached_tokens(bench)
    assert answers(bench, prompts) == expected
    assert num_cached_tokens(bench) > before
    bench.after_check()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_whole_prompt_in_the_cache_still_computes_its_last_token(tiny: Started, length: int) -> None:
    bench = tiny_bench(tiny)
    prompt = [3 + 5 * index for index in range(length)]
    first = bench.ask(prompt, max_tokens=1)
    second = bench.ask(prompt, max_tokens=1)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // 16 * 16)
    bench.after_check()


def test_a_reset_of_the_cache_while_requests_run(tiny: Started) -> None:
    prompts = prompts_that_share(18)
    expected = answers(tiny_bench(tiny, enable_prefix_caching=False), prompts, max_tokens=20)
    bench = tiny_bench(tiny)
    ids = [bench.add(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
    while bench.engine.has_work:
        bench.step()
        bench.engine.reset_prefix_cache()
    assert [bench.ids(request_id) for request_id in ids] == expected
    bench.after_check()


def test_a_pool_too_small_for_all_gives_the_same_answers(tiny: Started) -> None:
    """Long answers in a pool that holds a third of them: preempted, resumed, and each at most as often as the rule allows."""
    prompts = prompts_that_share(24)
    expected = answers(tiny_bench(tiny, enable_prefix_caching=False), prompts, max_tokens=60)
    for enable_prefix_caching in (False, True):
        bench = tiny_bench(tiny, num_pages=24, enable_prefix_caching=enable_prefix_caching)
        assert answers(bench, prompts, max_tokens=60) == expected
        num_preempted = len(bench.events.of(events.RequestPreempted))
        assert num_preempted >= 3
        assert num_preempted == sum(output.metrics.num_preemptions for output in bench.last.values())
        # What is computed again is counted apart: neither a prompt that was looked up, nor a miss.
        steps, lost = bench.events.of(events.StepFinished), bench.events.of(events.RequestPreempted)
        num_lost = sum(event.num_computed_tokens for event in lost)
        num_prompt = sum(event.num_prompt_tokens for event in bench.events.of(events.RequestFinished))
        num_recomputed = sum(event.prefill_recompute_tokens for event in steps)
        assert (0 <= num_recomputed < num_lost) if enable_prefix_caching else (num_recomputed == num_lost)
        assert sum(event.prefix_queries_tokens for event in steps) == enable_prefix_caching * num_prompt
        assert sum(event.prefix_hits_tokens for event in steps) == num_cached_tokens(bench)
        bench.after_check()


LENGTHS = (1, 15, 16, 17, 31, 33, 100)
CASES: dict[str, dict[str, Any]] = {
    "page_1": {"page_size": 1, "token_buckets": (16,), "max_num_batched_tokens": 16},
    "page_16": {},
    "page_64": {"page_size": 64, "token_buckets": (16,), "max_num_batched_tokens": 16},
    "reference": {"token_buckets": (16,), "max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module", params=CASES)
def laid_out(
    tiny: Started, tiny_folder: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Runners with other pages or another attention."""
    if request.param == "page_16":
        yield tiny.engine.runner
        return
    calls: list[str] = []

    def attend(*args: Any, **options: Any) -> jax.Array:
        calls.append("reference")
        return paged_attention(*args, **options, implementation="reference")

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "reference":
            programs = tmp_path_factory.mktemp("programs")  # kept programs know nothing of what a test replaces
            patch.setattr(jaxpaged.layers.attention, "paged_attention", attend)
        started = start_tiny(tiny_folder, programs=programs, **CASES[request.param])
    assert bool(calls) == (request.param == "reference")
    yield started.engine.runner
    started.engine.close()


def test_o41_every_row_of_a_batch_equals_its_solo_run(tiny: Started, laid_out: Any) -> None:
    """Batches of 1 to 9 rows of mixed lengths in many orders, 32 decode steps, against the first runs of pages of 16 tokens."""
    prompts = {length: [3 + (length * 11 + index * 5) % 380 for index in range(length)] for length in LENGTHS}
    alone = tiny_bench(tiny, enable_prefix_caching=False)
    expected = {length: alone.ask(prompt, max_tokens=33, ignore_eos=True).outputs[0].token_ids for length, prompt in prompts.items()}
    runner = NarrowRunner(laid_out)
    fill_pool(laid_out, float("nan"))
    bench = Bench(runner, tiny.intake.tokenizer, enable_prefix_caching=False, canary=alone.canary)
    rng = random.Random(1)
    for count in (1, 2, 3, 5, 8, 9):
        orders = [[rng.choice(LENGTHS) for _ in range(count)] for _ in range(2)]
        if count == 3:
            orders += [list(order) for order in itertools.permutations((1, 17, 100))]
        for order in orders:
            got = answers(bench, [prompts[length] for length in order], max_tokens=33)
            assert got == [expected[length] for length in order], order
    bench.after_check()
    fill_pool(laid_out, 0.0)


def fill_pool(runner: Any, number: float) -> None:
    """Fills the whole pool, as if other requests had left it there."""
    pool = KVCache(*(jnp.full(pages.shape, number, pages.dtype) for pages in runner.pool))
    runner._state = runner._state._replace(cache=pool)
