"""Which ids a row draws from: what min_p, then top_k, then top_p keep. No sort; an exact search over the bits of floats where it must be.

An id's weight is the exponential of its scaled logit (less the row's maximum, over temperature) in float32, so the likeliest has 1.
top_p keeps ids by weight: all that weigh as much as the last one needed.

XLA for CPU makes vector code of sums over arrays and of elementwise work, but hardly of a sum fused with what it adds up. So terms are
added slice by slice of the vocabulary (`_sum_of_slices`), in one order whatever the other rows are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxpaged.batch import SamplingRows
from jaxpaged.counted_loops import counted_loop
from jaxpaged.exact_counts import count
from jaxpaged.largest_logits import Largest
from pallas_kernels.gpu_target import platform

_NUM_SLICES = 16
_LEAST_IDS = 512
"""A smaller vocabulary is added up as it is, which compiles faster."""
_BITS_AT_ONCE = 3
_WEIGHT_BITS = 30
"""Weights are at most 1, whose bits are less than 2 ** 30."""


class Kept(NamedTuple):
    """A row keeps ids whose scaled logit is at least `low` and whose weight is at least `weight`. All ties are kept."""

    low: Float[Array, "rows"]
    weight: Float[Array, "rows"]

    def weights(self, scaled: Array) -> Array:
        """Of kept ids; 0 for the others."""
        weights = jnp.exp(scaled)
        return jnp.where((scaled >= self.low[:, None]) & (weights >= self.weight[:, None]), weights, 0)


class KeptByLargest(NamedTuple):
    """What the largest logits tell: `kept` where `is_known`. `low` of other rows is top_k's if these hold it, and `weight` min_p's.

    `reaches_beyond`: where it is known and may hold for ids beyond the largest.
    """

    kept: Kept
    is_known: Bool[Array, "rows"]
    reaches_beyond: Bool[Array, "rows"]


def scale(logits: Array, highest: Float[Array, "rows"], temperature: Float[Array, "rows"]) -> Array:
    """Scaled logits; the highest is 0."""
    # Subtracting the maximum first keeps tiny temperatures finite. XLA divides by a broadcast number now in one way and now in another.
    return (logits - highest[:, None]) * (1 / temperature)[:, None]


def kept_by_largest(logits: Float[Array, "rows vocab"], largest: Largest, rows: SamplingRows, wanted: Bool[Array, "rows"]) -> KeptByLargest:
    """Reads off the largest logits what a row keeps, where they hold all of it.

    Args:
        logits: float32; -inf for what may not be chosen.
        largest: of these logits.
        rows: `temperature` above 0; `top_k` 0 is off; `top_p` is a share of the mass that min_p and top_k leave; `min_p` a share of
            the largest probability.
        wanted: rows whose result matters.
    """
    vocab, top_k = logits.shape[1], rows.top_k
    top = scale(largest.values, largest.highest, rows.temperature)
    num_top = top.shape[1]
    has_k = (top_k > 0) & (top_k < vocab)
    k_in_top = jnp.take_along_axis(top, jnp.clip(top_k - 1, 0, num_top - 1)[:, None], axis=1)[:, 0]
    kept = Kept(jnp.where(has_k & (top_k <= num_top), k_in_top, -jnp.inf), rows.min_p)
    has_p = rows.top_p < 1
    weights = kept.weights(top)
    mass = jnp.cumsum(weights, axis=-1)
    is_k_known = ~has_k | (top_k <= num_top)
    goes_on = (vocab > num_top) & ((weights[:, -1] > 0) | (jnp.exp(top[:, -1]) == 0))

    def mass_of_all(logits: Array) -> Array:
        return jnp.where(
            goes_on, _sum_of_slices(logits, lambda part: kept.weights(scale(part, largest.highest, rows.temperature))), mass[:, -1]
        )

    total = lax.cond(jnp.any(wanted & has_p & goes_on & is_k_known), mass_of_all, lambda _: mass[:, -1], logits)
    num_needed = count(mass < (rows.top_p * total)[:, None])
    p_in_top = jnp.take_along_axis(weights, jnp.clip(num_needed, 0, num_top - 1)[:, None], axis=1)[:, 0]
    # All that is kept may lie within the top although rounding leaves its sum a little short of what is wanted.
    is_known = is_k_known & (~has_p | (num_needed < num_top) | ~goes_on)
    kept = Kept(kept.low, jnp.where(has_p & is_known, jnp.maximum(kept.weight, p_in_top), kept.weight))
    is_last_kept = (top[:, -1] >= kept.low) & (jnp.exp(top[:, -1]) >= kept.weight)
    return KeptByLargest(kept, is_known, is_known & is_last_kept & (vocab > num_top))


def search_kept(
    scaled: Float[Array, "rows vocab"],
    so_far: Kept,
    is_known: Bool[Array, "rows"],
    top_k: Int32[Array, "rows"],
    top_p: Float[Array, "rows"],
) -> tuple[Kept, Float[Array, "rows vocab"]]:
    """What rows keep, over the whole vocabulary, and the weights of that; each row by itself, whatever the others are.

    Args:
        scaled: see `scale`.
        so_far: `KeptByLargest.kept` of these rows.
        is_known: likewise.
        top_k: as in `kept_by_largest`.
        top_p: likewise.
    """
    vocab = scaled.shape[1]
    wants_k = ~is_known & (top_k > 0) & (top_k < vocab)
    wants_p = ~is_known & (top_p < 1)
    low = lax.cond(
        jnp.any(wants_k),
        lambda scaled: jnp.where(wants_k, jnp.maximum(so_far.low, _kth_largest(scaled, top_k)), so_far.low),
        lambda _: so_far.low,
        scaled,
    )
    kept = Kept(low, so_far.weight)
    # Written once: the search reads it again and again.
    weights = lax.optimization_barrier(kept.weights(scaled))

    def edge(weights: Array) -> Array:
        found = _mass_edge(weights, top_p * _sum_of_slices(weights, lambda part: part))
        return jnp.where(wants_p, found, kept.weight)

    weight = lax.cond(jnp.any(wants_p), edge, lambda _: kept.weight, weights)
    return Kept(low, weight), lax.optimization_barrier(jnp.where(weights >= weight[:, None], weights, 0))


def _sum_of_slices(x: Array, terms: Callable[[Array], Array]) -> Array:
    """The sum over the last axis of the terms of `x` [rows, vocab]; these are of any shape [rows, ..., ids] for a slice of ids."""
    if x.shape[1] < _LEAST_IDS or platform() == "gpu":
        return jnp.sum(terms(x), axis=-1)
    size = x.shape[1] // _NUM_SLICES
    total = terms(x[:, :size])
    for index in range(1, _NUM_SLICES):
        total = total + terms(x[:, index * size : (index + 1) * size])
    if x.shape[1] % _NUM_SLICES:
        total = jnp.concatenate([total, terms(x[:, size * _NUM_SLICES :])], axis=-1)
    return jnp.sum(lax.optimization_barrier(total), axis=-1)


def _ordered_bits(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(bits: UInt32[Array, "rows"]) -> Float[Array, "rows"]:
    bits = jnp.where(bits >> 31, bits & jnp.uint32((1 << 31) - 1), ~bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _last_that_has(is_enough: Callable[[Array], Array], num_rows: int, num_bits: int) -> UInt32[Array, "rows"]:
    """The largest number that `is_enough` holds for, which holds for all smaller ones; some bits are tried at once.

    Args:
        is_enough: [rows, candidates] to booleans.
        num_rows: how many rows.
        num_bits: of the number.
    """
    choices = jnp.arange(1, 2**_BITS_AT_ONCE, dtype=jnp.uint32)
    num_steps = -(-num_bits // _BITS_AT_ONCE)

    def step(index: Array, found: Array) -> Array:
        shift = ((num_steps - 1 - index) * _BITS_AT_ONCE).astype(jnp.uint32)
        candidates = found[:, None] | (choices << shift)
        fits = choices <= jnp.uint32(2**num_bits - 1) >> shift
        num_enough = jnp.sum(is_enough(candidates) & fits, axis=1, dtype=jnp.uint32)
        return found | (num_enough << shift)

    return counted_loop(num_steps, step, jnp.zeros(num_rows, jnp.uint32))


def _kth_largest(scaled: Float[Array, "rows vocab"], top_k: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    ordered = lax.optimization_barrier(_ordered_bits(scaled))

    def is_enough(candidates: Array) -> Array:
        # Counts as floats, which are exact here, are the same sums to XLA as those of weights.
        return _sum_of_slices(ordered, lambda part: (part[:, None] >= candidates[:, :, None]).astype(jnp.float32)) >= top_k[:, None]

    return _from_ordered_bits(_last_that_has(is_enough, scaled.shape[0], 32))


def _mass_edge(weights: Float[Array, "rows vocab"], wanted: Float[Array, "rows"]) -> Float[Array, "rows"]:
    """The largest weight such that ids of that weight and more have the mass that is wanted. Floats of one sign are ordered like bits."""

    def is_enough(candidates: Array) -> Array:
        edges = lax.bitcast_convert_type(candidates, jnp.float32)[:, :, None]
        return _sum_of_slices(weights, lambda part: jnp.where(part[:, None] >= edges, part[:, None], 0)) >= wanted[:, None]

    return lax.bitcast_convert_type(_last_that_has(is_enough, weights.shape[0], _WEIGHT_BITS), jnp.float32)
