"""Logits to token ids, on the device, with every parameter a row of data: no combination compiles anything new.

A row's choice depends on its own logits and parameters alone. One uniform number per row comes from (seed, position) and picks a
token by inverse CDF over block sums; there is no noise over the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxpaged.batch import SamplingRows
from jaxpaged.request import GREEDY_TEMPERATURE

NUM_TOP = 128
"""Largest logits looked at before an exact search over the whole vocabulary is needed."""
CDF_BLOCK = 128
NO_ID = -1
"""What a row gives whose logits are NaN or all forbidden; the engine ends it with an error."""


def sample(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Int32[Array, "rows"]:
    """Chooses one id per row: the largest logit (then the first index) for greedy rows, a draw for the others.

    Args:
        logits: float32.
        rows: parameters, row by row; temperature under 1e-5 is greedy.
        num_ids: ids from here on (a head wider than the tokenizer) are never chosen.

    Returns:
        Token ids; `NO_ID` where no id could be chosen.
    """
    logits = _choosable(logits, rows, num_ids)
    is_greedy = rows.temperature < GREEDY_TEMPERATURE
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ids = lax.cond(
        jnp.all(is_greedy), lambda *_: greedy, lambda logits, rows: jnp.where(is_greedy, greedy, _draw(logits, rows)), logits, rows
    )
    # The maximum of a row with a NaN is NaN, and one of -inf means that every id is forbidden.
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), ids, NO_ID)


def processed_logits(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Float[Array, "rows vocab"]:
    """The logits that rows draw from: over temperature, -inf for what they do not draw. Arguments as for `sample`."""
    logits = _choosable(logits, rows, num_ids)
    temperature = jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    threshold = keep_threshold(scaled, jnp.exp(scaled), rows.top_k, rows.top_p, rows.min_p)
    return jnp.where(scaled >= threshold[:, None], logits / temperature, -jnp.inf)


def _choosable(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Float[Array, "rows vocab"]:
    """The logits with -inf for ids that are no tokens, and for those that a row may not choose."""
    vocab = logits.shape[1]
    if num_ids < vocab:
        logits = jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)
    return lax.cond(jnp.any(rows.banned_ids < vocab), _ban, lambda logits, _: logits, logits, rows.banned_ids)


def _ban(logits: Float[Array, "rows vocab"], banned_ids: Int32[Array, "rows banned"]) -> Float[Array, "rows vocab"]:
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, banned_ids].set(-jnp.inf, mode="drop")


def _draw(logits: Float[Array, "rows vocab"], rows: SamplingRows) -> Int32[Array, "rows"]:
    temperature = jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature)
    # Subtracting the maximum first keeps tiny temperatures finite.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    weights = jnp.exp(scaled)
    threshold = keep_threshold(scaled, weights, rows.top_k, rows.top_p, rows.min_p)
    kept = jnp.where(scaled >= threshold[:, None], weights, 0)
    return _pick(kept, uniform(rows.seed, rows.position))


def uniform(seed: UInt32[Array, "rows 2"], position: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    """One number in [0, 1) per row, from its 64-bit seed (low word, high word) and the position of the token to choose."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    return jax.vmap(one)(seed, position)


def keep_threshold(
    scaled: Float[Array, "rows vocab"],
    weights: Float[Array, "rows vocab"],
    top_k: Int32[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
) -> Float[Array, "rows"]:
    """The lowest scaled logit that min_p, then top_k, then top_p keep; ids that tie with it are all kept.

    The largest `NUM_TOP` logits decide where they can; rows they cannot decide take an exact search over the bits of floats.

    Args:
        scaled: logits minus the row's maximum, over temperature.
        weights: `exp(scaled)`.
        top_k: ids kept; 0 is off.
        top_p: share of the mass that min_p and top_k leave, in (0, 1].
        min_p: share of the largest probability.
    """
    vocab = scaled.shape[1]
    num_top = min(NUM_TOP, vocab)
    top = lax.top_k(scaled, num_top)[0]
    has_k = (top_k > 0) & (top_k < vocab)
    k_in_top = jnp.take_along_axis(top, jnp.clip(top_k - 1, 0, num_top - 1)[:, None], axis=1)[:, 0]
    low = jnp.log(min_p)  # -inf when off
    low = jnp.where(has_k & (top_k <= num_top), jnp.maximum(low, k_in_top), low)

    search_k = has_k & (top_k > num_top)
    low = lax.cond(
        jnp.any(search_k), lambda low: jnp.where(search_k, jnp.maximum(low, _kth_largest(scaled, top_k)), low), lambda low: low, low
    )

    wanted = top_p * jnp.sum(jnp.where(scaled >= low[:, None], weights, 0), axis=-1)
    top_weights = jnp.where(top >= low[:, None], jnp.exp(top), 0)
    mass = jnp.cumsum(top_weights, axis=-1)
    num_needed = jnp.sum(mass < wanted[:, None], axis=-1)
    p_in_top = jnp.take_along_axis(top, jnp.clip(num_needed, 0, num_top - 1)[:, None], axis=1)[:, 0]
    has_p = top_p < 1
    # All that is kept may lie within the top although rounding leaves its sum a little short of what is wanted.
    is_decided = (num_needed < num_top) | (top[:, -1] < low)
    low_p = jnp.where(has_p & is_decided, jnp.maximum(low, p_in_top), low)
    search_p = has_p & ~is_decided
    return lax.cond(
        jnp.any(search_p),
        lambda low: jnp.where(search_p, jnp.fmax(low, _mass_edge(scaled, weights, low, wanted)), low),
        lambda low: low,
        low_p,
    )


def _ordered_bits(x: Float[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(bits: UInt32[Array, "rows"]) -> Float[Array, "rows"]:
    bits = jnp.where(bits >> 31, bits & jnp.uint32((1 << 31) - 1), ~bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


class _Search(NamedTuple):
    """Largest ordered bits found so far that still keep enough, built from the highest bit down."""

    edge: UInt32[Array, "rows"]


def _largest_edge(
    ordered: UInt32[Array, "rows vocab"], amounts: Float[Array, "rows vocab"], wanted: Float[Array, "rows"]
) -> Float[Array, "rows"]:
    """The largest value v such that the amounts of the ids at or above v add up to what is wanted."""

    def step(index: Array, search: _Search) -> _Search:
        candidate = search.edge | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        is_above: Bool[Array, "rows vocab"] = ordered >= candidate[:, None]
        enough = jnp.sum(jnp.where(is_above, amounts, 0), axis=-1) >= wanted
        return _Search(jnp.where(enough, candidate, search.edge))

    start = _Search(jnp.zeros(ordered.shape[0], jnp.uint32))
    return _from_ordered_bits(lax.fori_loop(0, 32, step, start).edge)


def _kth_largest(scaled: Float[Array, "rows vocab"], top_k: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    return _largest_edge(_ordered_bits(scaled), jnp.ones_like(scaled), top_k.astype(jnp.float32))


def _mass_edge(
    scaled: Float[Array, "rows vocab"], weights: Float[Array, "rows vocab"], low: Float[Array, "rows"], wanted: Float[Array, "rows"]
) -> Float[Array, "rows"]:
    kept = jnp.where(scaled >= low[:, None], weights, 0)
    return _largest_edge(_ordered_bits(scaled), kept, wanted)


def _pick(weights: Float[Array, "rows vocab"], draw: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """The first id whose running sum passes `draw` of the total: first the block, then the place in it."""
    num_rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % CDF_BLOCK))).reshape(num_rows, -1, CDF_BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    # The product can round up to the total itself, which no running sum passes.
    target = jnp.minimum(draw * ends[:, -1], jnp.nextafter(ends[:, -1], jnp.float32(0)))
    # Running sums are not exactly monotonic (they are added up in a tree), and can grow by a last bit over blocks that have no weight:
    # only blocks with weight are looked at, and the last of them takes what rounding leaves over.
    has_weight = sums > 0
    passes = has_weight & (ends > target[:, None])
    last_block = sums.shape[1] - 1 - jnp.argmax(has_weight[:, ::-1], axis=-1)
    block = jnp.where(jnp.any(passes, axis=-1), jnp.argmax(passes, axis=-1), last_block)
    row = jnp.arange(num_rows)
    rest = jnp.maximum(target - (ends[row, block] - sums[row, block]), 0)  # below 0 the first id would come out, weight or not
    own = blocks[row, block]
    within = jnp.sum(jnp.cumsum(own, axis=-1) <= rest[:, None], axis=-1)
    # Sums in another order differ in the last bit: never run past the last id that has weight.
    last = CDF_BLOCK - 1 - jnp.argmax(own[:, ::-1] > 0, axis=-1)
    return (block * CDF_BLOCK + jnp.minimum(within, last)).astype(jnp.int32)
