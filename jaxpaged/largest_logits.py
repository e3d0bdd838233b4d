"""The largest logits of each row, found by maxima of blocks of ids: a sort of the whole vocabulary would take far longer."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxpaged.exact_counts import count

NUM_TOP = 128
"""Largest logits looked at before the whole vocabulary is."""
_ALL_BUT_SIGN = 2**31 - 1


class Largest(NamedTuple):
    """The `NUM_TOP` largest logits of each row (all, of a smaller vocabulary), in falling order, with their ids; and the largest."""

    values: Float[Array, "rows top"]
    ids: Int32[Array, "rows top"]
    highest: Float[Array, "rows"]


def block_maxima(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks"]:
    """The largest logit of each block; NaN if there is one. Compared as integers: XLA's maximum of floats may pass over a NaN on CPU."""
    blocks = in_blocks(logits)
    ordered = jnp.where(jnp.isnan(blocks), jnp.int32(_ALL_BUT_SIGN), _swap_negatives(lax.bitcast_convert_type(blocks, jnp.int32)))
    return lax.bitcast_convert_type(_swap_negatives(jnp.max(ordered, axis=1)), jnp.float32)


def highest_of(maxima: Float[Array, "rows blocks"]) -> Float[Array, "rows"]:
    """The largest logit of each row; NaN if there is one."""
    return jnp.where(count(jnp.isnan(maxima)) > 0, jnp.nan, jnp.max(maxima, axis=1))


def find_largest(logits: Float[Array, "rows vocab"], maxima: Float[Array, "rows blocks"]) -> Largest:
    """The largest logits of each row: they lie in as many blocks as there are of them, those with the largest maxima.

    Args:
        logits: float32.
        maxima: `block_maxima` of them.
    """
    num_rows, vocab = logits.shape
    num_top, num_blocks = min(NUM_TOP, vocab), maxima.shape[1]
    highest = highest_of(maxima)
    if num_blocks <= num_top:
        values, ids = lax.top_k(logits, num_top)
        return Largest(values, ids.astype(jnp.int32), highest)
    chosen = lax.top_k(maxima, num_top)[1][:, None, :]
    blocks = in_blocks(logits)
    values = jnp.take_along_axis(blocks, chosen, axis=2).reshape(num_rows, -1)
    ids = (jnp.arange(blocks.shape[1])[:, None] * num_blocks + chosen).reshape(num_rows, -1)
    values, at = lax.top_k(values, num_top)
    return Largest(values, jnp.take_along_axis(ids, at, axis=1).astype(jnp.int32), highest)


def first_of_the_highest(logits: Float[Array, "rows vocab"], highest: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """What `argmax` gives, which is slow on CPU."""
    blocks = in_blocks(logits)
    ids = jnp.arange(blocks.shape[1] * blocks.shape[2], dtype=jnp.float32).reshape(blocks.shape[1:])
    return jnp.min(jnp.where(blocks == highest[:, None, None], ids, logits.shape[1]), axis=(1, 2)).astype(jnp.int32)


def in_blocks(logits: Float[Array, "rows vocab"]) -> Array:
    """The logits as [rows, ids of a block, blocks]: maxima over whole vectors, since every so many ids are of one block."""
    num_rows, vocab = logits.shape
    size = _block_size(vocab)
    num_blocks = -(-vocab // size)
    return jnp.pad(logits, ((0, 0), (0, num_blocks * size - vocab)), constant_values=-jnp.inf).reshape(num_rows, size, num_blocks)


def _block_size(vocab: int) -> int:
    """About the size that costs both searches for the largest the same; if it can be, one that divides the vocabulary."""
    best = max(1, math.isqrt(vocab // NUM_TOP))
    sizes = sorted(range(max(1, best // 2), 2 * best + 1), key=lambda size: abs(size - best))
    return next((size for size in sizes if vocab % size == 0), best)


def _swap_negatives(bits: Array) -> Array:
    """Bits of floats to integers in their order, and back."""
    return bits ^ (bits >> 31 & jnp.int32(_ALL_BUT_SIGN))
