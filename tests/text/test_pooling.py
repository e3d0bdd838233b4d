"""Sums of hidden states against numpy: any rows, over several steps, whatever lies in padding, other rows and the slots."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.batch import BatchLayout, unpack
from jaxpaged.pooling import keep_sums, pool_rows

pytestmark = pytest.mark.jax

LAYOUT = BatchLayout(num_tokens=24, num_seqs=5, max_pages=1, page_size=16, num_pages=2, num_slots=4)
EMBED = 8


@jax.jit
def pool(hidden: jax.Array, blob: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch = unpack(blob, LAYOUT)
    pooled = pool_rows(hidden, batch, kept)
    return pooled, keep_sums(kept, batch, pooled)


def blob_of(lengths: list[int], kv_lens: list[int], pool_starts: list[int], pool_slots: list[int]) -> np.ndarray:
    """A step of rows of these lengths; everything else in it is zero."""
    blob = np.zeros(LAYOUT.blob_size, np.int32)
    ends = np.cumsum([0, *lengths]).tolist()
    missing = LAYOUT.num_seqs - len(lengths)
    values = {
        "cu_q_lens": ends + [ends[-1]] * missing,
        "kv_lens": kv_lens + [0] * missing,
        "pool_starts": pool_starts + [LAYOUT.num_tokens] * missing,
        "pool_slots": pool_slots + [LAYOUT.num_slots] * missing,
    }
    at = 0
    for name, shape in LAYOUT.fields:
        size = int(np.prod(shape))
        if name in values:
            blob[at : at + size] = values[name]
        at += size
    return blob


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_steps_give_the_sums_of_numpy(dtype: str) -> None:
    """Prompts in chunks of every length, side by side; padding, and what earlier owners left in the slots, is NaN."""
    rng, numbers = random.Random(1), np.random.default_rng(1)
    kept = jnp.full((LAYOUT.num_slots, EMBED), np.nan, jnp.float32)
    prompts: dict[int, list[np.ndarray]] = {}  # by slot
    kinds: dict[int, str | None] = {}
    num_checked = 0
    for _ in range(60):
        rows = rng.sample(range(LAYOUT.num_slots), rng.randint(0, 4))
        hidden = np.full((LAYOUT.num_tokens, EMBED), np.nan, np.float32)
        lengths, kv_lens, starts, slots = [], [], [], []
        for slot in rows:
            if slot not in prompts or rng.random() < 0.3:
                prompts[slot], kinds[slot] = [], rng.choice(("mean", "mean", "last", None))
            length, first = rng.randint(1, 6), sum(lengths)
            states = numbers.normal(size=(length, EMBED)).astype(dtype).astype(np.float32)
            hidden[first : first + length] = states
            prompts[slot].extend(states)
            lengths.append(length)
            kv_lens.append(len(prompts[slot]))
            starts.append({"mean": first, "last": first + length - 1, None: LAYOUT.num_tokens}[kinds[slot]])
            slots.append(slot if kinds[slot] == "mean" else LAYOUT.num_slots)
        blob = blob_of(lengths, kv_lens, starts, slots)
        pooled, kept = pool(hidden.astype(dtype), blob, kept)
        sums = np.asarray(pooled)
        for index, slot in enumerate(rows):
            states = np.stack(prompts[slot]).astype(np.float64)
            expected = {"mean": states.sum(0), "last": states[-1], None: np.zeros(EMBED)}[kinds[slot]]
            np.testing.assert_allclose(sums[index], expected, rtol=0, atol=1e-5)
            num_checked += kinds[slot] is not None
        assert not sums[len(rows) :].any()
    assert num_checked > 60


def test_a_row_that_is_no_number_spoils_itself_alone() -> None:
    hidden = np.ones((LAYOUT.num_tokens, EMBED), np.float32)
    hidden[4, 2], hidden[9, 0] = np.nan, np.inf
    blob = blob_of([3, 3, 3, 3], [3, 3, 3, 3], [0, 3, 6, 9], [0, 1, 2, 3])
    pooled, kept = pool(jnp.asarray(hidden), blob, jnp.zeros((LAYOUT.num_slots, EMBED), jnp.float32))
    sums = np.asarray(pooled)
    assert np.array_equal(sums[[0, 2]], np.full((2, EMBED), 3.0))
    assert np.isnan(sums[[1, 3]]).all()
    assert np.array_equal(sums[:4], np.asarray(kept), equal_nan=True)


def test_a_step_in_which_nobody_asks_leaves_the_slots_alone() -> None:
    kept = jnp.asarray(np.random.default_rng(0).normal(size=(LAYOUT.num_slots, EMBED)), jnp.float32)
    hidden = jnp.full((LAYOUT.num_tokens, EMBED), np.nan, jnp.float32)
    nobody = blob_of([2, 3], [2, 3], [LAYOUT.num_tokens] * 2, [LAYOUT.num_slots] * 2)
    pooled, after = pool(hidden, nobody, kept)
    assert not np.asarray(pooled).any()
    assert np.array_equal(np.asarray(after), np.asarray(kept))
