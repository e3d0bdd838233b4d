"""Logits to token ids, on the device, with every parameter a row of data: no combination compiles anything new.

A row's choice depends on its own logits and parameters alone. One uniform number per row comes from (seed, position) and picks a
token by inverse CDF over block sums; there is no noise over the vocabulary.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxpaged.batch import SamplingRows
from jaxpaged.request import GREEDY_TEMPERATURE

NUM_TOP = 128
"""Largest logits looked at before an exact search over the whole vocabulary is needed."""
NUM_FEW = 4
"""Rows that are searched apart from the others, where no more need it."""
CDF_BLOCK = 128
_ALL_BUT_SIGN = 2**31 - 1
NO_ID = -1
"""What a row gives whose logits are NaN or all forbidden; the engine ends it with an error."""


class Largest(NamedTuple):
    """The `NUM_TOP` largest logits of each row (all, of a smaller vocabulary), in falling order, with their ids; and the largest."""

    values: Float[Array, "rows top"]
    ids: Int32[Array, "rows top"]
    highest: Float[Array, "rows"]


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
    maxima = block_maxima(logits)
    highest = highest_of(maxima)
    nothing = jnp.zeros(logits.shape[0], jnp.int32)
    greedy = lax.cond(jnp.any(is_greedy), _first_of_the_highest, lambda *_: nothing, logits, highest)
    drawn = lax.cond(jnp.all(is_greedy), lambda *_: nothing, _draw, logits, maxima, rows)
    # The highest of a row with a NaN is NaN, and one of -inf means that every id is forbidden.
    return jnp.where(jnp.isfinite(highest), jnp.where(is_greedy, greedy, drawn), NO_ID)


def _in_blocks(logits: Float[Array, "rows vocab"]) -> Array:
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


def block_maxima(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows blocks"]:
    """The largest logit of each block; NaN if there is one. Compared as integers: XLA's maximum of floats may pass over a NaN on CPU."""
    blocks = _in_blocks(logits)
    ordered = jnp.where(jnp.isnan(blocks), jnp.int32(_ALL_BUT_SIGN), _swap_negatives(lax.bitcast_convert_type(blocks, jnp.int32)))
    return lax.bitcast_convert_type(_swap_negatives(jnp.max(ordered, axis=1)), jnp.float32)


def highest_of(maxima: Float[Array, "rows blocks"]) -> Float[Array, "rows"]:
    """The largest logit of each row; NaN if there is one."""
    return jnp.where(jnp.any(jnp.isnan(maxima), axis=1), jnp.nan, jnp.max(maxima, axis=1))


def _swap_negatives(bits: Array) -> Array:
    """Bits of floats to integers in their order, and back."""
    return bits ^ (bits >> 31 & jnp.int32(_ALL_BUT_SIGN))


def _first_of_the_highest(logits: Float[Array, "rows vocab"], highest: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """What `argmax` gives, which is slow on CPU."""
    vocab = logits.shape[1]
    return jnp.min(jnp.where(logits == highest[:, None], jnp.arange(vocab, dtype=jnp.int32), vocab), axis=-1)


def processed_logits(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Float[Array, "rows vocab"]:
    """The logits that rows draw from: over temperature, -inf for what they do not draw. Arguments as for `sample`."""
    logits = _choosable(logits, rows, num_ids)
    rows = rows._replace(temperature=jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature))
    largest = find_largest(logits, block_maxima(logits))
    kept = _scaled(logits, largest.highest, rows.temperature) >= keep_threshold(logits, largest, rows)[:, None]
    return jnp.where(kept, logits / rows.temperature[:, None], -jnp.inf)


def _choosable(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Float[Array, "rows vocab"]:
    """The logits with -inf for ids that are no tokens, and for those that a row may not choose."""
    vocab = logits.shape[1]
    if num_ids < vocab:
        logits = jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)
    return lax.cond(jnp.any(rows.banned_ids < vocab), _ban, lambda logits, _: logits, logits, rows.banned_ids)


def _ban(logits: Float[Array, "rows vocab"], banned_ids: Int32[Array, "rows banned"]) -> Float[Array, "rows vocab"]:
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, banned_ids].set(-jnp.inf, mode="drop")


def _draw(logits: Float[Array, "rows vocab"], maxima: Float[Array, "rows blocks"], rows: SamplingRows) -> Int32[Array, "rows"]:
    """A row that keeps none but its largest logits draws among these alone: the same id, but for the last bits of sums."""
    rows = rows._replace(temperature=jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature))
    largest = find_largest(logits, maxima)
    highest = largest.highest
    threshold = keep_threshold(logits, largest, rows)
    draw = uniform(rows.seed, rows.position)
    top = _scaled(largest.values, highest, rows.temperature)
    ids, kept = lax.sort((largest.ids, jnp.where(top >= threshold[:, None], jnp.exp(top), 0)), num_keys=1)
    among_largest = jnp.take_along_axis(ids, _pick(kept, draw)[:, None], axis=1)[:, 0]

    def among_all(logits: Array, highest: Array, temperature: Array, threshold: Array, draw: Array) -> Array:
        scaled = _scaled(logits, highest, temperature)
        return _pick(jnp.where(scaled >= threshold[:, None], jnp.exp(scaled), 0), draw)

    is_wide = (threshold <= top[:, -1]) & (logits.shape[1] > top.shape[1])
    return _for_rows(is_wide, among_all, (logits, highest, rows.temperature, threshold, draw), among_largest)


def _for_rows(is_wanted: Bool[Array, "rows"], work: Callable[..., Array], arrays: tuple[Array, ...], others: Array) -> Array:
    """`work` of the rows of `arrays` that want it, `others` for the rest; nothing is computed for none, and little for few."""
    num_rows = is_wanted.shape[0]

    def of_all(*arrays: Array) -> Array:
        return jnp.where(is_wanted, work(*arrays), others)

    def of_few(*arrays: Array) -> Array:
        few = jnp.argsort(~is_wanted, stable=True)[:NUM_FEW]
        return others.at[few].set(jnp.where(is_wanted[few], work(*(array[few] for array in arrays)), others[few]))

    num_wanted = jnp.sum(is_wanted)
    branches = [lambda *_: others, of_all] if num_rows <= NUM_FEW else [lambda *_: others, of_few, of_all]
    return lax.switch((num_wanted > 0).astype(jnp.int32) + (num_wanted > NUM_FEW), branches, *arrays)


def _scaled(logits: Array, highest: Float[Array, "rows"], temperature: Float[Array, "rows"]) -> Array:
    # Subtracting the maximum first keeps tiny temperatures finite. XLA divides by a broadcast number now in one way and now in another.
    return (logits - highest[:, None]) * (1 / temperature)[:, None]


def find_largest(logits: Float[Array, "rows vocab"], maxima: Float[Array, "rows blocks"]) -> Largest:
    """The largest logits of each row: they lie in as many blocks as there are of them, those with the largest maxima."""
    num_rows, vocab = logits.shape
    num_top, num_blocks = min(NUM_TOP, vocab), maxima.shape[1]
    highest = highest_of(maxima)
    if num_blocks <= num_top:
        values, ids = lax.top_k(logits, num_top)
        return Largest(values, ids.astype(jnp.int32), highest)
    chosen = lax.top_k(maxima, num_top)[1][:, None, :]
    blocks = _in_blocks(logits)
    values = jnp.take_along_axis(blocks, chosen, axis=2).reshape(num_rows, -1)
    ids = (jnp.arange(blocks.shape[1])[:, None] * num_blocks + chosen).reshape(num_rows, -1)
    values, at = lax.top_k(values, num_top)
    return Largest(values, jnp.take_along_axis(ids, at, axis=1).astype(jnp.int32), highest)


def uniform(seed: UInt32[Array, "rows 2"], position: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    """One number in [0, 1) per row, from its 64-bit seed (low word, high word) and the position of the token to choose."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    return jax.vmap(one)(seed, position)


def keep_threshold(logits: Float[Array, "rows vocab"], largest: Largest, rows: SamplingRows) -> Float[Array, "rows"]:
    """The lowest scaled logit (less the row's maximum, over temperature) that min_p, then top_k, then top_p keep; all ties are kept.

    The largest logits decide where they can; rows they cannot decide take an exact search over the bits of floats.

    Args:
        logits: float32; -inf for what may not be chosen.
        largest: of these logits.
        rows: `temperature` above 0; `top_k` 0 is off; `top_p` is a share of the mass that min_p and top_k leave; `min_p` a share of
            the largest probability.
    """
    vocab, top_k, top_p = logits.shape[1], rows.top_k, rows.top_p
    top = _scaled(largest.values, largest.highest, rows.temperature)
    num_top = top.shape[1]
    has_k = (top_k > 0) & (top_k < vocab)
    k_in_top = jnp.take_along_axis(top, jnp.clip(top_k - 1, 0, num_top - 1)[:, None], axis=1)[:, 0]
    low = jnp.log(rows.min_p)  # -inf when off
    low = jnp.where(has_k & (top_k <= num_top), jnp.maximum(low, k_in_top), low)

    scale = (largest.highest, rows.temperature)

    def kth(logits: Array, highest: Array, temperature: Array, low: Array, top_k: Array) -> Array:
        return jnp.maximum(low, _kth_largest(_scaled(logits, highest, temperature), top_k))

    low = _for_rows(has_k & (top_k > num_top), kth, (logits, *scale, low, top_k), low)
    has_p = top_p < 1
    top_weights = jnp.where(top >= low[:, None], jnp.exp(top), 0)
    mass = jnp.cumsum(top_weights, axis=-1)
    reaches_beyond = (top[:, -1] >= low) & (vocab > num_top)

    def mass_of_all(logits: Array) -> Array:
        scaled = _scaled(logits, *scale)
        return jnp.sum(jnp.where(scaled >= low[:, None], jnp.exp(scaled), 0), axis=-1)

    total = lax.cond(
        jnp.any(has_p & reaches_beyond),
        lambda logits: jnp.where(reaches_beyond, mass_of_all(logits), mass[:, -1]),
        lambda _: mass[:, -1],
        logits,
    )
    wanted = top_p * total
    num_needed = jnp.sum(mass < wanted[:, None], axis=-1)
    p_in_top = jnp.take_along_axis(top, jnp.clip(num_needed, 0, num_top - 1)[:, None], axis=1)[:, 0]
    # All that is kept may lie within the top although rounding leaves its sum a little short of what is wanted.
    is_decided = (num_needed < num_top) | ~reaches_beyond
    low_p = jnp.where(has_p & is_decided, jnp.maximum(low, p_in_top), low)

    def edge(logits: Array, highest: Array, temperature: Array, low: Array, wanted: Array) -> Array:
        return jnp.fmax(low, _mass_edge(_scaled(logits, highest, temperature), low, wanted))

    return _for_rows(has_p & ~is_decided, edge, (logits, *scale, low, wanted), low_p)


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


def _mass_edge(scaled: Float[Array, "rows vocab"], low: Float[Array, "rows"], wanted: Float[Array, "rows"]) -> Float[Array, "rows"]:
    return _largest_edge(_ordered_bits(scaled), jnp.where(scaled >= low[:, None], jnp.exp(scaled), 0), wanted)


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
