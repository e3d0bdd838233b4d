"""Quantized matmul for any device that XLA compiles for.

int8 is multiplied as int8: widening the weights inside the program never paid on the CPU. Weights of fewer bits are widened, a fallback
that saves memory and not time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.reference import dequantize
from pallas_kernels.quantized_matmul.weights import LOW_LEVELS, Fp8Weights, Int4Weights, Int8Weights

_BY_ROWS_OF_BOTH = (((1,), (1,)), ((), ()))


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Int8Weights | Int4Weights | Fp8Weights,
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`."""
    if layer is not None:
        weights = jax.tree.map(lambda stacked: lax.dynamic_index_in_dim(stacked, layer, keepdims=False), weights)
    num_rows = x.shape[0]
    if num_rows == 1 and not isinstance(weights, Int8Weights):  # XLA's CPU backend needs 200 ms for a step of one-row dots
        x = jnp.pad(x, ((0, 1), (0, 0)))
    if isinstance(weights, Int8Weights):
        parts = quantize_rows(x)
        both = jnp.concatenate([parts.high, parts.low])
        summed = lax.dot_general(both, weights.values, _BY_ROWS_OF_BOTH, preferred_element_type=jnp.int32).astype(jnp.float32)
        high, low = jnp.split(summed, 2)
        return (high * LOW_LEVELS + low) * weights.scales * parts.scales[:, None]
    if isinstance(weights, Fp8Weights):
        # Every e4m3 number is one of bfloat16 and float32; the scale goes into the sum.
        summed = _float_dot(x, jnp.asarray(weights.values).astype(x.dtype)) * weights.scales
    else:
        summed = _float_dot(x, dequantize(weights).astype(x.dtype))
    return summed[:num_rows]


def _float_dot(x: Float[Array, "rows in"], matrix: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # never TF32
    return lax.dot_general(x, matrix, _BY_ROWS_OF_BOTH, precision=precision, preferred_element_type=jnp.float32)
