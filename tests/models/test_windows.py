"""Models with windowed layers against numpy: pages behind a window are given back, spoiled, and given to others."""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import CacheConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.kv_groups import FULL, KVGroup
from jaxpaged.model_runner import ModelRunner
from jaxpaged.settings import StepLimits
from jaxpaged.step_program import LoadedModel
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, NarrowRunner
from tests.models import numpy_llama
from tests.models.cases import FAMILY_CASES, golden_logits
from tests.models.paged_model import PagedModel, load, with_config
from tests.text.vocabularies import byte_level
from tests.tiny_model import Tensors, write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("quick_programs")]

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "theta": 10_000.0}
WINDOWS = {
    "full": (None,) * 4,
    "all": (32,) * 4,
    "alternating": (32, None) * 2,
    "one of four": (32, 32, 32, None),
    "of two lengths": (7, None, 40, None),
}
ATOL = 1e-4
BUCKET = 64
PROMPT = np.random.default_rng(0).integers(3, 259, 150).tolist()


class Windowed(NamedTuple):
    """A tiny model with windows, and its weights by name."""

    windows: tuple[int | None, ...]
    loaded: LoadedModel
    tensors: Tensors

    def truth(self, token_ids: list[int]) -> np.ndarray:
        """Logits [tokens, vocab] as numpy has them."""
        return numpy_llama.logits(self.tensors, token_ids, windows=self.windows, **SHAPE)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Tensors]:
    folder = tmp_path_factory.mktemp("windowed")
    tensors = write_tiny_llama(folder, layers=4, tie=False, has_tokenizer=False, **SHAPE)
    return load(folder), tensors


@pytest.fixture(scope="module", params=[name for name in WINDOWS if name != "full"])
def windowed(weights: tuple[LoadedModel, Tensors], request: pytest.FixtureRequest) -> Windowed:
    return make(weights, WINDOWS[request.param])


def make(weights: tuple[LoadedModel, Tensors], windows: tuple[int | None, ...]) -> Windowed:
    loaded, tensors = weights
    return Windowed(windows, with_config(loaded, loaded.config._replace(windows=windows)), tensors)


def test_the_truth_itself_equals_golden_logits(tmp_path: Path) -> None:
    case = next(case for case in FAMILY_CASES if case.name == "llama")
    tensors = case.write(tmp_path, **case.options)
    shape = {name: case.options[name] for name in SHAPE}
    logits = numpy_llama.logits(tensors, case.token_ids, windows=(None,) * case.options["layers"], **shape)
    np.testing.assert_allclose(logits[list(case.positions)], golden_logits(case), atol=ATOL)


@pytest.mark.parametrize("chunk", [7, 40])
def test_logits_equal_numpy_in_chunks_of_every_length(windowed: Windowed, chunk: int) -> None:
    model = PagedModel(windowed.loaded, context=160, num_pages=64, seed=chunk)
    logits = model.feed_all(model.start(PROMPT), chunk, BUCKET)
    np.testing.assert_allclose(logits, windowed.truth(PROMPT), atol=ATOL)


def test_logits_in_one_chunk_equal_numpy(weights: tuple[LoadedModel, Tensors]) -> None:
    alternating = make(weights, WINDOWS["alternating"])
    model = PagedModel(alternating.loaded, context=160)
    np.testing.assert_allclose(model.feed_all(model.start(PROMPT), 150, 150), alternating.truth(PROMPT), atol=ATOL)


def test_windows_show_in_the_logits(weights: tuple[LoadedModel, Tensors]) -> None:
    """Or the tests here would prove nothing: from the end of the first window on, no two of these models agree."""
    truths = [make(weights, windows).truth(PROMPT) for windows in WINDOWS.values()]
    for index, one in enumerate(truths):
        for other in truths[:index]:
            np.testing.assert_allclose(one[:7], other[:7])
            assert np.abs(one - other).max(axis=1)[40:].min() > 0.01


def test_decodes_and_chunks_in_one_step_equal_numpy(windowed: Windowed) -> None:
    model = PagedModel(windowed.loaded, context=160, num_pages=64, seed=3)
    prompts = [PROMPT[:length] for length in (150, 120, 41, 33, 3)]
    sequences = [model.start(prompt) for prompt in prompts]
    parts: list[list[np.ndarray]] = [[] for _ in prompts]
    turn = 0
    while any(sequence.num_uncomputed_tokens for sequence in sequences):
        rows = []
        for index, sequence in enumerate(sequences):
            count = min(sequence.num_uncomputed_tokens, 30 if turn % len(sequences) == index else 1)
            if count:
                rows.append((index, sequence, count))
        rows.sort(key=lambda row: row[2] > 1)
        for (index, *_), logits in zip(rows, model.feed([row[1:] for row in rows], BUCKET), strict=True):
            parts[index].append(logits)
        turn += 1
    for prompt, own in zip(prompts, parts, strict=True):
        np.testing.assert_allclose(np.concatenate(own), windowed.truth(prompt), atol=ATOL)


MIXED = (32, None, 32, None)
NUM_PAGES = 65
POISON = float("nan")


@pytest.fixture(scope="module")
def mixed(weights: tuple[LoadedModel, Tensors]) -> Windowed:
    return make(weights, MIXED)


@pytest.fixture(scope="module")
def runner(mixed: Windowed) -> ModelRunner:
    """A real runner with two groups, full and windowed."""
    page_bytes = 2 * 2 * SHAPE["kv_heads"] * 16 * SHAPE["head_dim"] * 4
    limits = StepLimits(max_model_len=400, max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(4, 64))
    cache = CacheConfig(memory=NUM_PAGES * page_bytes)
    return ModelRunner(mixed.loaded, limits=limits, cache=cache, num_ids=byte_level().vocab_size, max_parallel=2)


class PoisonedBench(Bench):
    """A bench whose free pages, and page 0, hold NaN whenever a step begins. Counts pages that were given back behind a window."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, **options: Any) -> None:
        narrow = {name: options.pop(name) for name in ("num_pages", "max_num_batched_tokens") if name in options}
        self.num_given_back = self.most_windowed = 0
        super().__init__(NarrowRunner(runner, after=self.spoil, **narrow), tokenizer, **options)

    def spoil(self) -> None:
        runner = self.runner.inner  # type: ignore[attr-defined]
        for sequence in self.engine.scheduler.sequences:
            windowed = sequence.tables[1]
            self.num_given_back += windowed.count(0)
            self.most_windowed = max(self.most_windowed, len(windowed) - windowed.count(0))
        # A fixed number of pages, so that nothing is compiled again and again.
        spoiled = np.resize([0, *self.engine.pages._free], NUM_PAGES)
        pool = KVCache(*(pages.at[:, jnp.asarray(spoiled)].set(POISON) for pages in runner.pool))
        runner._state = runner._state._replace(cache=pool)


def check(bench: Bench, mixed: Windowed, prompts: dict[str, list[int]]) -> None:
    """Every id of every answer is one that numpy finds best, given those before it."""
    for request_id, prompt in prompts.items():
        answer = bench.ids(request_id)
        logits = mixed.truth([*prompt, *answer])[len(prompt) - 1 : -1, : byte_level().vocab_size]
        assert np.all(logits.max(axis=1) - logits[np.arange(len(answer)), answer] < ATOL), request_id


PROMPTS = {f"r{length}": PROMPT[150 - length :] for length in (1, 31, 32, 33, 64, 100, 149)}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("chunk", [64, 13])
def test_the_engine_answers_as_numpy_with_every_free_page_spoiled(runner: ModelRunner, mixed: Windowed, chunk: int, in_flight: int) -> None:
    assert runner.kv_groups == (FULL, KVGroup(32))
    assert runner.pool.k.shape[:2] == (2, NUM_PAGES)
    bench = PoisonedBench(
        runner,
        byte_level(),
        enable_prefix_caching=False,
        max_in_flight=in_flight,
        max_num_batched_tokens=chunk,
        canary_prompt=(5,) * 40,
        canary_tokens=4,
    )
    for request_id, prompt in PROMPTS.items():
        bench.add(prompt, request_id=request_id, max_tokens=60, ignore_eos=True)
    bench.run()
    check(bench, mixed, PROMPTS)
    assert bench.num_given_back > 500
    # A window of 32 in pages of 16, the chunk that is computed, and what a step in flight has yet to be seen to do.
    assert bench.most_windowed <= 3 + -(-chunk // 16) * in_flight
    bench.after_check()


def test_preempted_requests_answer_as_numpy(runner: ModelRunner, mixed: Windowed) -> None:
    """In a pool that holds two of the longest: pages are taken away, with windows half way."""
    bench = PoisonedBench(
        runner, byte_level(), enable_prefix_caching=False, max_in_flight=2, num_pages=36, canary_prompt=(5,) * 40, canary_tokens=4
    )
    for request_id, prompt in PROMPTS.items():
        bench.add(prompt, request_id=request_id, max_tokens=60, ignore_eos=True)
    sequences, num_steps = bench.engine.scheduler.sequences, 0
    while bench.engine.has_work:
        bench.step()
        num_steps += 1
        if num_steps % 30 == 0:
            bench.evict()
    check(bench, mixed, PROMPTS)
    assert sum(sequence.num_preemptions for sequence in sequences) >= 5
    bench.after_check()


def test_a_cached_prefix_needs_only_the_window(runner: ModelRunner, mixed: Windowed) -> None:
    """Whole pages behind the window of the first request are other requests' by the time the second one comes."""
    bench = PoisonedBench(runner, byte_level(), max_in_flight=2, canary_prompt=(5,) * 40, canary_tokens=4)
    prompts = {"first": PROMPT[:149], "others": PROMPT[3:100], "again": PROMPT[:149], "longer": [*PROMPT[:140], *PROMPT[:10]]}
    for request_id, prompt in prompts.items():
        bench.add(prompt, request_id=request_id, max_tokens=20, ignore_eos=True)
        bench.run()
    check(bench, mixed, prompts)
    assert [bench.last[request_id].num_cached_tokens for request_id in prompts] == [0, 0, 144, 128]
    bench.after_check()


def test_a_windowed_model_answers_beyond_its_pool(weights: tuple[LoadedModel, Tensors]) -> None:
    """350 tokens would take 22 pages, and the pool has 11; page tables are as long as the context all the same."""
    windowed = make(weights, WINDOWS["all"])
    num_pages = 12
    page_bytes = 2 * 4 * SHAPE["kv_heads"] * 16 * SHAPE["head_dim"] * 4
    limits = StepLimits(max_model_len=400, max_num_seqs=2, max_num_batched_tokens=32, token_buckets=(32,))
    cache = CacheConfig(memory=num_pages * page_bytes)
    runner = ModelRunner(windowed.loaded, limits=limits, cache=cache, num_ids=byte_level().vocab_size, max_parallel=1)
    assert (runner.num_pages, runner.layouts[0].max_pages) == (num_pages, 25)
    bench = Bench(runner, byte_level(), enable_prefix_caching=False, max_in_flight=2, canary_tokens=4)
    bench.add(PROMPT, request_id="long", max_tokens=200, ignore_eos=True)
    bench.run()
    assert len(bench.ids("long")) == 200
    check(bench, windowed, {"long": PROMPT})
    bench.after_check()
