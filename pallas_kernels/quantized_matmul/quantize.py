"""Making quantized numbers: rows of activations on the device, matrices on the host when they are loaded."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int8

from pallas_kernels.quantized_matmul.weights import LEAST_PEAK, LEVELS, LOW_LEVELS, ROW_LEVELS, Fp8Weights, Int4Weights, Int8Weights

_BLOCK_BYTES = 4 * 2**20
"""Rows of a matrix that are looked at at a time, in float32."""

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FP8_MAX = float(ml_dtypes.finfo(FP8).max)
_INT4_LEVELS = 15
_INT4_MIDDLE = 8
"""What is taken off unsigned nibbles, which flips their highest bit, and off their zero points."""


class QuantizedRows(NamedTuple):
    """Rows in two int8 parts and a float32 scale each: `x` is about `(high * LOW_LEVELS + low) * scales[:, None]`."""

    high: Int8[Array, "rows in"]
    low: Int8[Array, "rows in"]
    scales: Float[Array, "rows"]


def quantize_rows(x: Float[Array, "rows in"]) -> QuantizedRows:
    """Rows by their largest numbers, halves rounded to even.

    One int8 a number made perplexity 3 to 4 % worse, where quantized weights alone make 0.4 %: models have rows in which a few numbers are
    far larger than the others. A second part costs nothing where weights are read for few rows.

    A row that holds NaN or an infinity has the scale NaN; one of zeros the scale 0.
    """
    wide = x.astype(jnp.float32)
    # Not by the peak: a vectorized maximum of XLA's CPU backend may lose a NaN.
    is_finite = jnp.isfinite(wide).all(axis=1)
    peaks = jnp.max(jnp.abs(wide), axis=1)
    is_tiny = peaks < LEAST_PEAK
    steps = jnp.where(is_tiny, 0, ROW_LEVELS / jnp.where(is_tiny, 1, peaks))
    whole = lax.round(wide * steps[:, None], lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    high = (whole + LOW_LEVELS // 2) >> 7
    scales = jnp.where(is_tiny, 0, peaks * jnp.float32(1 / ROW_LEVELS))
    low = whole - high * LOW_LEVELS
    return QuantizedRows(high.astype(jnp.int8), low.astype(jnp.int8), jnp.where(is_finite, scales, jnp.nan))


def quantize_int8(weight: np.ndarray) -> Int8Weights:
    """A matrix, or a stack of them [..., out, in], in int8; takes the result and a few megabytes of memory.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    values, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    for block in _blocks(rows):
        wide = rows[block].astype(np.float32)
        peaks = _peaks(wide)
        scales[block] = peaks / np.float32(LEVELS)
        values[block] = np.rint(wide * (np.float32(LEVELS) / np.where(peaks == 0, 1, peaks))[:, None])
    return Int8Weights(values.reshape(weight.shape), scales.reshape(weight.shape[:-1]))


def quantize_fp8(weight: np.ndarray) -> Fp8Weights:
    """A matrix, or a stack of them, in float8_e4m3fn; arguments and errors as for `quantize_int8`."""
    rows = weight.reshape(-1, weight.shape[-1])
    values, scales = np.empty(rows.shape, FP8), np.empty(len(rows), np.float32)
    for block in _blocks(rows):
        wide = rows[block].astype(np.float32)
        peaks = _peaks(wide)
        scales[block] = peaks / np.float32(_FP8_MAX)
        values[block] = (wide * (np.float32(_FP8_MAX) / np.where(peaks == 0, 1, peaks))[:, None]).astype(FP8)
    return Fp8Weights(values.reshape(weight.shape), scales.reshape(weight.shape[:-1]))


def quantize_int4(weight: np.ndarray, group_size: int) -> Int4Weights:
    """A matrix, or a stack of them, in groups of inputs between their smallest and largest weight.

    Raises:
        ValueError: a weight is NaN or infinite, or the inputs are no multiple of the group, or not even.
    """
    if weight.shape[-1] % group_size or weight.shape[-1] % 2:
        raise ValueError(f"{weight.shape[-1]} inputs are no even multiple of groups of {group_size}")
    groups = weight.astype(np.float32).reshape(*weight.shape[:-1], -1, group_size)
    if not np.isfinite(groups).all():
        raise ValueError("a weight is NaN or infinite")
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = (high - low) / np.float32(_INT4_LEVELS)
    scales = np.where(scales < LEAST_PEAK, 1, scales).astype(np.float32)
    zeros = np.rint(-low / scales)
    nibbles = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, _INT4_LEVELS)
    return int4_weights(nibbles.reshape(weight.shape).astype(np.uint8), *(np.swapaxes(part, -1, -2) for part in (scales, zeros)))


def int4_weights(nibbles: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Int4Weights:
    """Weights from numbers that are not packed yet.

    Args:
        nibbles: uint8 [..., out, in], 0 to 15.
        scales: [..., groups, out].
        zeros: zero points [..., groups, out], 0 to 16.
    """
    signed_zeros = (zeros - np.float32(_INT4_MIDDLE)).astype(scales.dtype)
    return Int4Weights(pack_nibbles(nibbles ^ _INT4_MIDDLE), np.ascontiguousarray(scales), np.ascontiguousarray(signed_zeros))


def pack_nibbles(nibbles: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 15 [..., in] as bytes [..., in // 2], the earlier one of a pair in the low half."""
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).astype(np.uint8)


def _blocks(rows: np.ndarray) -> list[slice]:
    num = max(1, _BLOCK_BYTES // (4 * rows.shape[1]))
    return [slice(start, min(start + num, len(rows))) for start in range(0, len(rows), num)]


def _peaks(wide: np.ndarray) -> np.ndarray:
    """The largest absolute value of each row, 0 where it is tiny. Raises ValueError for NaN and infinities."""
    peaks = np.abs(wide).max(1)
    if not np.isfinite(peaks).all():
        raise ValueError("a weight is NaN or infinite")
    return np.where(peaks < LEAST_PEAK, np.float32(0), peaks)
