"""The largest logits of each row, found by maxima of blocks of ids: a sort of the whole vocabulary would take far longer."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

NUM_TOP = 128
"""Largest logits looked at before the whole vocabulary is."""
_FEW_IDS = 32 * NUM_TOP
"""So many are searched at once, without blocks."""
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
    return jnp.where(jnp.any(jnp.isnan(maxima), axis=1), jnp.nan, jnp.max(maxima, axis=1))


def find_largest(logits: Float[Array, "rows vocab"], maxima: Float[Array, "rows blocks"]) -> Largest:
    """The largest logits of each row.

    Args:
        logits: float32.
        maxima: `block_maxima` of them.
    """
    values, ids = _largest_of(logits, maxima)
    return Largest(values, ids, highest_of(maxima))


def first_of_the_highest(logits: Float[Array, "rows vocab"], highest: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """What `argmax` gives, which is slow on CPU."""
    blocks = in_blocks(logits)
    ids = jnp.arange(blocks.shape[1] * blocks.shape[2], dtype=jnp.int32).reshape(blocks.shape[1:])
    return jnp.min(jnp.min(jnp.where(blocks == highest[:, None, None], ids, logits.shape[1]), axis=1), axis=1)


def in_blocks(logits: Float[Array, "rows vocab"]) -> Array:
    """The logits as [rows, ids of a block, blocks]: maxima over whole vectors, since every so many ids are of one block."""
    num_rows, vocab = logits.shape
    size = _block_size(vocab)
    num_blocks = -(-vocab // size)
    return jnp.pad(logits, ((0, 0), (0, num_blocks * size - vocab)), constant_values=-jnp.inf).reshape(num_rows, size, num_blocks)


def _block_size(vocab: int) -> int:
    """About the size that makes the searches of blocks of blocks, of blocks and of ids equally long; if it can be, a divisor."""
    best = max(2, round((vocab / NUM_TOP) ** (1 / 3)))
    sizes = sorted(range(max(2, best // 2), 2 * best + 1), key=lambda size: abs(size - best))
    return next((size for size in sizes if vocab % size == 0), best)


def _largest_of(values: Array, maxima: Array) -> tuple[Array, Array]:
    """They lie in as many blocks as there are of them, those with the largest maxima; likewise these, in blocks of blocks."""
    num_rows, count = values.shape
    num_blocks = maxima.shape[1]
    if count <= _FEW_IDS or num_blocks <= NUM_TOP:
        top, at = lax.top_k(values, min(NUM_TOP, count))
        return top, at.astype(jnp.int32)
    chosen = _largest_of(maxima, jnp.max(in_blocks(maxima), axis=1))[1][:, None, :]
    blocks = in_blocks(values)
    own = jnp.take_along_axis(blocks, chosen, axis=2).reshape(num_rows, -1)
    ids = (jnp.arange(blocks.shape[1], dtype=jnp.int32)[:, None] * num_blocks + chosen).reshape(num_rows, -1)
    top, at = lax.top_k(own, NUM_TOP)
    return top, jnp.take_along_axis(ids, at, axis=1)


def _swap_negatives(bits: Array) -> Array:
    """Bits of floats to integers in their order, and back."""
    return bits ^ (bits >> 31 & jnp.int32(_ALL_BUT_SIGN))
