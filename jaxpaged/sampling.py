"""Logits to token ids, on the device, with every parameter a row of data: no combination compiles anything new.

A row's choice depends on its own logits and parameters alone. One uniform number per row comes from (seed, position) and picks a
token by inverse CDF over block sums; there is no noise over the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxpaged.batch import SamplingRows
from jaxpaged.counted_loops import counted_loop
from jaxpaged.kept_ids import Kept, KeptByLargest, kept_by_largest, scale, search_kept
from jaxpaged.largest_logits import block_maxima, find_largest, first_of_the_highest, highest_of
from jaxpaged.request import GREEDY_TEMPERATURE
from pallas_kernels.gpu_target import platform

NUM_FEW = 4
"""Rows whose whole vocabulary is looked at together: what is read again and again stays in a core's cache."""
MAX_GROUPS = 8
"""Of so many rows or more, where a batch is wide."""
MAX_GPU_GROUPS = 4
"""On a GPU, which has room for more rows at a time, and a program that grows with the number of groups."""
CDF_BLOCK = 128
NO_ID = -1
"""What a row gives whose logits are NaN or all forbidden; the engine ends it with an error."""


class _Choice(NamedTuple):
    """The drawn id of each row, and what it was drawn from."""

    ids: Int32[Array, "rows"]
    kept: Kept


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
    return lax.cond(jnp.any(rows.banned_ids < vocab), _ban, lambda logits, _: logits, logits, rows.banned_ids)


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
    weights = by_largest.kept.weights(scale(largest.values, largest.highest, rows.temperature))
    ids, weights = lax.sort((largest.ids, weights), num_keys=1)
    among_largest = _Choice(jnp.take_along_axis(ids, _pick(weights, draw)[:, None], axis=1)[:, 0], by_largest.kept)

    def among_all(logits: Array, rows: SamplingRows, highest: Array, by_largest: KeptByLargest, draw: Array) -> _Choice:
        kept, weights = search_kept(scale(logits, highest, rows.temperature), by_largest, rows.top_k, rows.top_p)
        return _Choice(_pick(weights, draw), kept)

    is_wide = wanted & (~by_largest.is_known | by_largest.reaches_beyond)
    return _for_rows(is_wide, among_all, (logits, rows, largest.highest, by_largest, draw), among_largest)


def _for_rows(is_wanted: Bool[Array, "rows"], work: Callable[..., _Choice], arrays: tuple, others: _Choice) -> _Choice:
    """`work` of the rows of `arrays` that want it, group by group; `others` for the rest. Groups without such a row cost nothing."""
    num_rows = is_wanted.shape[0]
    size = min(num_rows, max(NUM_FEW, -(-num_rows // (MAX_GPU_GROUPS if platform() == "gpu" else MAX_GROUPS))))
    num_groups = -(-num_rows // size)
    order = jnp.argsort(~is_wanted, stable=True).astype(jnp.int32)
    groups = jnp.pad(order, (0, num_groups * size - num_rows), constant_values=num_rows).reshape(num_groups, size)

    def of_group(result: _Choice, group: Array, arrays: tuple) -> _Choice:
        own = work(*jax.tree.map(lambda array: array.at[group].get(mode="clip"), arrays))
        at = jnp.where(is_wanted.at[group].get(mode="clip"), group, num_rows)
        return jax.tree.map(lambda result, own: result.at[at].set(own, mode="drop"), result, own)

    def step(index: Array, result: _Choice) -> _Choice:
        group = lax.dynamic_index_in_dim(groups, index, keepdims=False)
        return lax.cond(is_wanted[group[0]], of_group, lambda result, *_: result, result, group, arrays)

    return counted_loop(num_groups, step, others)


def uniform(seed: UInt32[Array, "rows 2"], position: Int32[Array, "rows"]) -> Float[Array, "rows"]:
    """One number in [0, 1) per row, from its 64-bit seed (low word, high word) and the position of the token to choose."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    return jax.vmap(one)(seed, position)


def _pick(weights: Float[Array, "rows vocab"], draw: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """The first id whose running sum passes `draw` of the total: first the block, then the place in it."""
    num_rows, vocab = weights.shape
    if vocab <= CDF_BLOCK:
        ends = jnp.cumsum(weights, axis=-1)
        return _place(weights, ends, draw * ends[:, -1])
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
    return (block * CDF_BLOCK).astype(jnp.int32) + _place(own, jnp.cumsum(own, axis=-1), rest)


def _place(weights: Array, ends: Array, rest: Float[Array, "rows"]) -> Int32[Array, "rows"]:
    """The first place whose running sum passes `rest`; as sums in another order differ in the last bit, never one past all weight."""
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.minimum(jnp.sum(ends <= rest[:, None], axis=-1), last).astype(jnp.int32)
