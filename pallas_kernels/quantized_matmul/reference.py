"""Quantized matmul written to be believed: the matrix as what its numbers stand for, times rows as what theirs do, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.quantized_matmul.group_weights import Q4Weights, Q8Weights, widened
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.weights import LOW_LEVELS, Fp8Weights, Int4Weights, Int8Weights


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Int8Weights | Int4Weights | Fp8Weights | Q4Weights | Q8Weights,
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`."""
    if layer is not None:
        weights = jax.tree.map(lambda stacked: stacked[layer], weights)
    rows = x.astype(jnp.float32)
    if isinstance(weights, Int8Weights | Q4Weights | Q8Weights):
        high, low, scales = quantize_rows(x)
        rows = (high.astype(jnp.float32) * LOW_LEVELS + low) * scales[:, None]
    return jnp.einsum("ri,oi->ro", rows, dequantize(weights), precision=jax.lax.Precision.HIGHEST)


def dequantize(weights: Int8Weights | Int4Weights | Fp8Weights | Q4Weights | Q8Weights) -> Float[Array, "out in"]:
    """One matrix in float32."""
    if isinstance(weights, Q4Weights | Q8Weights):
        return widened(weights)
    if not isinstance(weights, Int4Weights):
        return jnp.asarray(weights.values).astype(jnp.float32) * weights.scales[:, None]
    pairs = jnp.asarray(weights.values)
    nibbles = jnp.stack([pairs & 15, pairs >> 4], axis=-1).reshape(pairs.shape[0], -1)
    signed = (nibbles ^ 8).astype(jnp.float32) - 8
    scales, zeros = (jnp.repeat(part.astype(jnp.float32).T, signed.shape[1] // len(part), axis=1) for part in weights[1:])
    return (signed - zeros) * scales
