"""Rows times a matrix of groups for any device that XLA compiles for: a fallback that saves memory and not time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.quantized_matmul.group_weights import GROUP, TILE, Q4Weights, Q8Weights, whole_numbers
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.weights import LOW_LEVELS


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Q4Weights | Q8Weights,
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`.

    Sums of a group are whole numbers below 2**24, so that products of float32 are exact in any order; those of eight bits are summed up
    in two parts.
    """
    if layer is not None:
        weights = jax.tree.map(lambda stacked: lax.dynamic_index_in_dim(stacked, layer, keepdims=False), weights)
    num_rows = x.shape[0]
    if num_rows == 1:  # XLA's CPU backend needs 200 ms for a step of one-row dots
        x = jnp.pad(x, ((0, 1), (0, 0)))
    quantized = quantize_rows(x)
    high, low = quantized.high.astype(jnp.float32), quantized.low.astype(jnp.float32)
    whole = high * LOW_LEVELS + low
    has_minima = isinstance(weights, Q4Weights)
    rows = whole if has_minima else jnp.concatenate([high, low])
    num_tiles, num_groups, _ = weights.values.shape

    def add_group(group: Int32[Array, ""], summed: Float[Array, "rows tiles lanes"]) -> Float[Array, "rows tiles lanes"]:
        own = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, group, 1, axis=1), weights)
        numbers = whole_numbers(own)[:, 0]
        products = jnp.einsum("ri,til->rtl", _group_of(rows, group), numbers, precision=lax.Precision.HIGHEST)
        if has_minima:
            summed = summed + products * own.scales[:, 0].astype(jnp.float32)
            of_rows = _group_of(whole, group).sum(axis=1)
            return summed + of_rows[:, None, None] * own.minima[:, 0].astype(jnp.float32)
        of_high, of_low = jnp.split(products, 2)
        return summed + (of_high * LOW_LEVELS + of_low) * own.scales[:, 0].astype(jnp.float32)

    summed = lax.fori_loop(0, num_groups, add_group, jnp.zeros((x.shape[0], num_tiles, TILE), jnp.float32))
    return (summed.reshape(x.shape[0], -1) * quantized.scales[:, None])[:num_rows]


def _group_of(rows: Float[Array, "rows in"], group: Int32[Array, ""]) -> Float[Array, "rows chunk"]:
    return lax.dynamic_slice_in_dim(rows, group * GROUP, GROUP, axis=1)
