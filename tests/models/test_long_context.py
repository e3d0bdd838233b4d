"""Long contexts through the real engine against numpy, prompt and decode, beside short requests; and what they cost in memory."""

import time
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import CacheConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.model_runner import ModelRunner
from jaxpaged.settings import StepLimits
from jaxpaged.step_program import LoadedModel
from tests.fakes import Bench
from tests.models import numpy_llama
from tests.models.paged_model import load, with_config
from tests.text.vocabularies import byte_level
from tests.tiny_model import Tensors, save_safetensors, write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("quick_programs")]

ATOL = 1e-3
"""Of a logit; logits have a root mean square of about 1."""
NUM_SHORT = 3
THETA = 1_000_000.0
"""A base as stretched models have, or far positions could not be told apart."""


class Shape(NamedTuple):
    """Of a model with random weights. Attention is sharp, so that of many thousand tokens a few decide."""

    hidden: int
    ffw: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    vocab: int = 384

    def write(self, folder: Path, context: int) -> tuple[LoadedModel, Tensors]:
        """The model on disk and in memory, for contexts of up to `context` tokens."""
        sizes = {name: value for name, value in self._asdict().items() if name not in ("windows", "vocab")}
        sizes |= {"vocab_size": self.vocab, "layers": len(self.windows), "context": context, "theta": THETA}
        is_deep = len(self.windows) > MOST_WILD_LAYERS
        tensors = write_tiny_llama(folder, tie=not is_deep, has_tokenizer=False, **sizes)
        for name, tensor in tensors.items():
            if "q_proj" in name:
                tensor *= 2
            if is_deep and ("o_proj" in name or "down_proj" in name):
                tensor *= DEEP_SHARE
        save_safetensors(folder / "model.safetensors", tensors)
        loaded = load(folder)
        return with_config(loaded, loaded.config._replace(windows=self.windows)), tensors

    def truth(self, tensors: Tensors, token_ids: list[int], num_last: int, dtype: type[np.floating]) -> np.ndarray:
        """Logits of the last tokens."""
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "theta": THETA}
        return numpy_llama.logits(tensors, token_ids, windows=self.windows, num_last=num_last, dtype=dtype, **shape)


MOST_WILD_LAYERS = 8
"""A layer of plain random weights doubles what float32 rounds off: over 30 of them numpy's own float32 and float64 part by 0.1."""
DEEP_SHARE = 0.01
"""Of what such a layer adds, in deeper models: rounding stays under a tenth of ATOL there, and a head of its own keeps tokens close."""

# What the last layer sees of the first one is cheap to work out again, though it sees everything.
SMALL = Shape(hidden=64, ffw=64, heads=2, kv_heads=1, head_dim=16, windows=(64, None))
SMOLLM2 = Shape(hidden=576, ffw=1536, heads=9, kv_heads=3, head_dim=64, windows=(None,) * 30, vocab=49_152)
"""SmolLM2-135M, stretched."""


def runner_for(loaded: LoadedModel, *, context: int, pages: int, chunk: int = 512) -> ModelRunner:
    """A runner whose whole pool is NaN before it is used."""
    limits = StepLimits(max_model_len=context, max_num_seqs=4, max_num_batched_tokens=chunk, token_buckets=tuple(sorted({4, chunk})))
    config = loaded.config
    layers = -(-config.layers // len(set(config.windows)))
    page_bytes = 2 * layers * config.kv_heads * 16 * config.head_dim * 4
    runner = ModelRunner(
        loaded, limits=limits, cache=CacheConfig(memory=pages * page_bytes), num_ids=byte_level().vocab_size, max_parallel=2
    )
    assert runner.num_pages == pages
    runner._state = runner._state._replace(cache=KVCache(*(jnp.full_like(pool, jnp.nan) for pool in runner.pool)))
    return runner


def answer_long(
    shape: Shape,
    folder: Path,
    *,
    context: int,
    num_prompt: int,
    num_output: int,
    pages: int,
    chunk: int,
    dtype: type[np.floating] = np.float64,
) -> None:
    """One long request, short ones that decode meanwhile, and the truth of all of them."""
    loaded, tensors = shape.write(folder, context)
    vocab = byte_level().vocab_size
    rng = np.random.default_rng(0)
    prompts = {"long": rng.integers(3, vocab, num_prompt).tolist()}
    prompts |= {f"short{index}": rng.integers(3, vocab, 20 + index).tolist() for index in range(NUM_SHORT)}
    runner = runner_for(loaded, context=context, pages=pages, chunk=chunk)
    bench = Bench(runner, byte_level(), max_in_flight=2, canary_tokens=4)
    for request_id, prompt in prompts.items():
        bench.add(prompt, request_id=request_id, max_tokens=num_output, ignore_eos=True)
    started = time.monotonic()
    bench.run()
    metrics = bench.last["long"].metrics
    assert metrics.first_token_s is not None
    assert metrics.finished_s is not None
    each_s = (metrics.finished_s - metrics.first_token_s) / (num_output - 1)
    print(f"{num_prompt} tokens of prompt in {metrics.first_token_s - started:.1f} s, then {each_s * 1e3:.1f} ms a token")
    for request_id, prompt in prompts.items():
        answer = bench.ids(request_id)
        assert len(answer) == num_output
        logits = shape.truth(tensors, [*prompt, *answer], num_output + 1, dtype)[:-1, :vocab]
        behind_best = logits.max(axis=1) - logits[np.arange(num_output), answer]
        assert behind_best.max() < ATOL, request_id
        if request_id == "long" and shape is SMALL:
            # That answer hangs on tokens from all over the prompt: read another way, each half makes other logits.
            for half in (slice(0, num_prompt // 2), slice(num_prompt // 2, num_prompt)):
                other = [*prompt, *answer]
                other[half] = other[half][::-1]
                changed = shape.truth(tensors, other, num_output + 1, dtype)[:-1, :vocab]
                assert np.abs(changed - logits).max(axis=1).min() > 100 * ATOL
    bench.after_check()


def test_a_long_request_beside_short_ones_answers_as_numpy(tmp_path: Path) -> None:
    answer_long(SMALL, tmp_path, context=131_072, num_prompt=8_000, num_output=8, pages=1_100, chunk=512)


@pytest.mark.tier("long", area="models")
@pytest.mark.timeout(1800)
def test_131072_tokens_with_a_tiny_model(tmp_path: Path) -> None:
    """To the last token of the context."""
    answer_long(SMALL, tmp_path, context=131_072, num_prompt=131_040, num_output=32, pages=8_400, chunk=2_048)


@pytest.mark.tier("long", area="models")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("layers", "chunk"),
    [
        (2, 512),
        (2, 1_000),
        # About 35 minutes of two processors, numpy's part of them more than half.
        (30, 512),
    ],
)
def test_32768_tokens_with_smollm2s_widths(tmp_path: Path, layers: int, chunk: int) -> None:
    answer_long(
        SMOLLM2._replace(windows=SMOLLM2.windows[:layers]),
        tmp_path,
        context=32_768,
        num_prompt=32_752,
        num_output=16,
        pages=2_100,
        chunk=chunk,
        dtype=np.float32,
    )


@pytest.mark.tier("long", area="models")
@pytest.mark.timeout(1800)
def test_all_layers_of_smollm2_over_a_thousand_tokens(tmp_path: Path) -> None:
    answer_long(SMOLLM2, tmp_path, context=32_768, num_prompt=1_000, num_output=16, pages=128, chunk=512, dtype=np.float64)


def test_memory_grows_with_what_is_stored_and_not_with_the_context(tmp_path: Path) -> None:
    """Of a context of 131,072 instead of 2,048 tokens, only page table entries remain, 4 bytes a page; and no more than the pool has."""
    loaded, _ = SMALL.write(tmp_path, 10_000_000)
    sizes = {}
    for context, pages in ((2_048, 20_000), (131_072, 20_000), (10_000_000, 500)):
        runner = runner_for(loaded, context=context, pages=pages, chunk=4)
        (layout,) = runner.layouts
        temporary = runner.programs[layout].memory_analysis().temp_size_in_bytes
        sizes[context, pages] = (4 * layout.blob_size, temporary, runner.pool_bytes)
    short, long = sizes[2_048, 20_000], sizes[131_072, 20_000]
    table_bytes = 4 * 2 * 4 * (131_072 - 2_048) // 16
    assert long[0] - short[0] == table_bytes
    assert long[1] - short[1] <= 2 * table_bytes
    assert long[2] == short[2]
    longest = sizes[10_000_000, 500]
    assert longest[0] - short[0] < 4 * 2 * 4 * 500
    assert longest[1] - short[1] < 2 * 4 * 2 * 4 * 500
