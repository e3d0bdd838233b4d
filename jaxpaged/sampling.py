"""Logits to token ids, on the device, with every parameter a row of data: no combination compiles anything new.

A row's choice depends on its own logits and parameters alone. One uniform number per row comes from (seed, position) and picks a
token by inverse CDF over block sums; there is no noise over the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxpaged.batch import SamplingRows
from jaxpaged.counted_loops import counted_loop
from jaxpaged.exact_counts import count, first_place, last_place
from jaxpaged.kept_ids import Kept, kept_by_largest, scale, search_kept
from jaxpaged.largest_logits import block_maxima, find_largest, first_of_the_highest, highest_of
from jaxpaged.packed_columns import as_columns, from_columns
from jaxpaged.request import GREEDY_TEMPERATURE
from pallas_kernels.gpu_target import platform

NUM_FEW = 4
"""Rows whose whole vocabulary is looked at together: what is read again and again stays in a core's cache."""
MAX_GROUPS = 8
"""Of so many rows or more, where a batch is wide."""
MAX_GPU_GROUPS = 4
"""On a GPU, which has room for more rows at a time, and a program that grows with the number of groups."""
CDF_BLOCK = 128
THREEFRY_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
NO_ID = -1
"""What a row gives whose logits are NaN or all forbidden; the engine ends it with an error."""


class _Choice(NamedTuple):
    """The drawn id of each row, and what it was drawn from."""

    ids: Int32[Array, "rows"]
    kept: Kept


class _Stretch(NamedTuple):
    """A part of a row's ids, in their order, in which its draw falls.

    `rest`: the sum of weights in it that the draw passes. `first`: the first of the ids, where they are neighbours.
    """

    weights: Array
    rest: Array
    first: Array
    kept: Kept


class _Asked(NamedTuple):
    """What `_among_all` looks for in a row; few enough for one kernel to put them side by side."""

    highest: Array
    temperature: Array
    top_k: Array
    top_p: Array
    so_far: Kept
    is_known: Array
    draw: Array


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
    greedy = lax.cond(jnp.any(is_greedy), first_of_the_highest, lambda *_: nothing, logits, highest)
    drawn = lax.cond(jnp.all(is_greedy), lambda *_: nothing, lambda *args: _draw(*args).ids, logits, maxima, rows, ~is_greedy)
    # The highest of a row with a NaN is NaN, and one of -inf means that every id is forbidden.
    return jnp.where(jnp.isfinite(highest), jnp.where(is_greedy, greedy, drawn), NO_ID)


def processed_logits(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Float[Array, "rows vocab"]:
    """The logits that rows draw from: over temperature, -inf for what they do not draw. Arguments as for `sample`."""
    logits = _choosable(logits, rows, num_ids)
    return jnp.where(is_kept(logits, rows), logits / _temperature(rows)[:, None], -jnp.inf)


def is_kept(logits: Float[Array, "rows vocab"], rows: SamplingRows) -> Bool[Array, "rows vocab"]:
    """Which ids rows draw from; greedy rows as if at temperature 1. Arguments as for `sample`."""
    maxima = block_maxima(logits)
    low, weight = _draw(logits, maxima, rows, jnp.ones(logits.shape[0], bool)).kept
    scaled = scale(logits, highest_of(maxima), _temperature(rows))
    return (scaled >= low[:, None]) & (jnp.exp(scaled) >= weight[:, None])


def _temperature(rows: SamplingRows) -> Float[Array, "rows"]:
    return jnp.where(rows.temperature < GREEDY_TEMPERATURE, 1.0, rows.temperature)


def _choosable(logits: Float[Array, "rows vocab"], rows: SamplingRows, num_ids: int) -> Float[Array, "rows vocab"]:
    """The logits with -inf for ids that are no tokens, and for those that a row may not choose."""
    vocab = logits.shape[1]
    if num_ids < vocab:
        logits = jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)
    return lax.cond(jnp.any(count(rows.banned_ids < vocab) > 0), _ban, lambda logits, _: logits, logits, rows.banned_ids)


def _ban(logits: Float[Array, "rows vocab"], banned_ids: Int32[Array, "rows banned"]) -> Float[Array, "rows vocab"]:
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, banned_ids].set(-jnp.inf, mode="drop")


def _draw(
    logits: Float[Array, "rows vocab"], maxima: Float[Array, "rows blocks"], rows: SamplingRows, wanted: Bool[Array, "rows"]
) -> _Choice:
    """A row that keeps none but its largest logits draws among these alone: the same id, but for the last bits of sums."""
    rows = rows._replace(temperature=_temperature(rows))
    largest = find_largest(logits, maxima)
    by_largest = kept_by_largest(logits, largest, rows, wanted)
    draw = uniform(rows.seed, rows.position)
    ids, weights = lax.sort((largest.ids, by_largest.kept.weights(scale(largest.values, largest.highest, rows.temperature))), num_keys=1)
    is_wide = wanted & (~by_largest.is_known | by_largest.reaches_beyond)
    if logits.shape[1] <= CDF_BLOCK:  # the largest are all there are
        ends = jnp.cumsum(weights, axis=-1)
        place = _place(weights, ends, draw * ends[:, -1])
        return _Choice(jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0], by_largest.kept)
    asked = _Asked(largest.highest, rows.temperature, rows.top_k, rows.top_p, by_largest.kept, by_largest.is_known, draw)
    nothing = jnp.zeros_like(draw)
    stretch = _for_rows(is_wide, _among_all, logits, asked, _Stretch(weights, nothing, nothing.astype(jnp.int32), by_largest.kept))
    # One place for both kinds of rows, so that it is compiled once.
    ends = jnp.cumsum(stretch.weights, axis=-1)
    place = _place(stretch.weights, ends, jnp.where(is_wide, stretch.rest, draw * ends[:, -1]))
    chosen = jnp.where(is_wide, stretch.first + place, jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0])
    return _Choice(chosen, stretch.kept)


def _among_all(logits: Array, asked: _Asked) -> _Stretch:
    scaled = scale(logits, asked.highest, asked.temperature)
    kept, weights = search_kept(scaled, asked.so_far, asked.is_known, asked.top_k, asked.top_p)
    return _find_block(weights, asked.draw, kept)


def _for_rows(
    is_wanted: Bool[Array, "rows"], work: Callable[[Array, _Asked], _Stretch], logits: Array, asked: _Asked, others: _Stretch
) -> _Stretch:
    """`work` of the rows that want it, group by group; `others` for the rest. Groups without such a row cost nothing."""
    num_rows = is_wanted.shape[0]
    size = min(num_rows, max(NUM_FEW, -(-num_rows // (MAX_GPU_GROUPS if platform() == "gpu" else MAX_GROUPS))))
    num_groups = -(-num_rows // size)
    order = jnp.argsort(~is_wanted, stable=True).astype(jnp.int32)
    groups = jnp.pad(order, (0, num_groups * size - num_rows), constant_values=num_rows).reshape(num_groups, size)
    # As columns of one array a group's parameters are taken, and its results put back, at once.
    columns, results = as_columns(asked), as_columns(others)

    def of_group(results: Array, group: Array, logits: Array, columns: Array) -> Array:
        rows = jnp.minimum(group, num_rows - 1)
        own = work(logits.at[rows].get(mode="clip"), from_columns(columns.at[rows].get(mode="clip"), asked))
        return results.at[jnp.where(is_wanted[rows], group, num_rows)].set(as_columns(own), mode="drop")

    def step(index: Array, results: Array) -> Array:
        group = lax.dynamic_index_in_dim(groups, index, keepdims=False)
        return lax.cond(is_wanted[group[0]], of_group, lambda results, *_: results, results, group, logits, columns)

    return from_columns(counted_loop(num_groups, step, results), others)


def uniform(seed: UInt32[Array, "rows 2"], position: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    """One number in [0, 1) per row, from its 64-bit seed (low word, high word) and the position of the token to choose.

    It is `jax.random.uniform` of the seed's key with the position folded in. JAX's own loops over the rounds compile to a dozen kernels
    in every program; written out, the rounds are one.
    """
    zero = jnp.zeros_like(position, jnp.uint32)
    key = _threefry(seed[:, 0], seed[:, 1], zero, position.astype(jnp.uint32))
    first, second = _threefry(*key, zero, zero)
    # Between 1 and 2: a mantissa of random bits.
    return lax.bitcast_convert_type((first ^ second) >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1


def _threefry(key_0: Array, key_1: Array, x_0: Array, x_1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
    x_0, x_1 = x_0 + key_0, x_1 + key_1
    for group in range(5):
        for distance in THREEFRY_ROTATIONS[group % 2]:
            x_0 = x_0 + x_1
            x_1 = x_0 ^ (x_1 << distance | x_1 >> 32 - distance)
        x_0, x_1 = x_0 + keys[(group + 1) % 3], x_1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x_0, x_1


def _find_block(weights: Float[Array, "rows vocab"], draw: Float[Array, "rows"], kept: Kept) -> _Stretch:
    """The block of ids in which the running sum passes `draw` of the total."""
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
    first = first_place(passes)
    block = jnp.where(first < sums.shape[1], first, last_place(has_weight))
    row = jnp.arange(num_rows)
    rest = jnp.maximum(target - (ends[row, block] - sums[row, block]), 0)  # below 0 the first id would come out, weight or not
    return _Stretch(blocks[row, block], rest, (block * CDF_BLOCK).astype(jnp.int32), kept)


def _place(weights: Array, ends: Array, rest: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """The first place whose running sum passes `rest`; as sums in another order differ in the last bit, never one past all weight."""
    return jnp.minimum(count(ends <= rest[:, None]), last_place(weights > 0))
