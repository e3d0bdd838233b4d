"""Quantized matrices whose numbers lie as a kernel walks them: groups of 32 inputs with their own scale, tiles of 16 outputs side by side.

They stand for just what the blocks of GGUF files stand for (`Q4_0`, `Q4_1`, `Q8_0`), which are taken over byte by byte.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Int8, Int32, UInt8

from pallas_kernels.quantized_matmul.weights import LEVELS

GROUP = 32
"""Inputs of a group."""

TILE = 16
"""Outputs of a tile; a matrix has whole tiles, the last of them padded with zeros."""

QUAD = 4
"""Neighbouring inputs that are multiplied by one instruction."""

_MOST = 15


class Q4Weights(NamedTuple):
    """Four bits: `weight[o, i] = nibble(o, i) * scales[t, g, l] + minima[t, g, l]`, `t, l = divmod(o, 16)` and `g = i // 32`.

    Nibbles are 0 to 15. Of the 256 bytes of a tile and group, byte `(q * 16 + l) * 4 + k` holds input `4 * q + k` of the group in its low
    half and input `16 + 4 * q + k` in its high half, for output `l` of the tile.
    """

    values: UInt8[Array | np.ndarray, "*layers tiles groups packed"]
    scales: Float16[Array | np.ndarray, "*layers tiles groups lanes"]
    minima: Float16[Array | np.ndarray, "*layers tiles groups lanes"]


class Q8Weights(NamedTuple):
    """Eight bits: `weight[o, i] = value(o, i) * scales[t, g, l]`, with the letters of `Q4Weights`.

    Of the 512 bytes of a tile and group, byte `(q * 16 + l) * 4 + k` is input `4 * q + k` of the group, for output `l` of the tile.
    """

    values: Int8[Array | np.ndarray, "*layers tiles groups packed"]
    scales: Float16[Array | np.ndarray, "*layers tiles groups lanes"]


def num_tiles(num_out: int) -> int:
    """Tiles of a matrix of so many outputs."""
    return -(-num_out // TILE)


def q4_from_gguf(rows: np.ndarray, *, has_minima: bool) -> Q4Weights:
    """The tiles of rows as they lie in a file.

    Args:
        rows: bytes [out, row_bytes] of `Q4_1` blocks (scale, minimum, 16 bytes), or without minima of `Q4_0` blocks (scale, 16 bytes),
            whose numbers are nibbles less 8; `out` is a multiple of 16.

    Raises:
        ValueError: a scale or minimum is NaN or infinite.
    """
    stored = rows.reshape(len(rows), -1, 20 if has_minima else 18)
    scales = _float16(stored[..., :2])
    # A power of two times a number: exact.
    with np.errstate(over="ignore"):
        minima = _float16(stored[..., 2:4]) if has_minima else scales * np.float16(-8)
    _refuse_no_numbers(scales, minima)
    return Q4Weights(_tiled(stored[..., -16:]), _tiled_groups(scales), _tiled_groups(minima))


def q8_from_gguf(rows: np.ndarray) -> Q8Weights:
    """As `q4_from_gguf`, of `Q8_0` blocks (scale, 32 bytes)."""
    stored = rows.reshape(len(rows), -1, 34)
    scales = _float16(stored[..., :2])
    _refuse_no_numbers(scales)
    return Q8Weights(_tiled(stored[..., 2:]).view(np.int8), _tiled_groups(scales))


def quantize_q4(weight: np.ndarray) -> Q4Weights:
    """A matrix [out, in] between the smallest and the largest number of each group, as `Q4_1` does; `out` is a multiple of 16.

    Raises:
        ValueError: a weight is NaN or infinite, or too large for a scale of float16.
    """
    groups = _groups(weight)
    low, high = groups.min(-1), groups.max(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        scales, minima = ((high - low) / np.float32(_MOST)).astype(np.float16), low.astype(np.float16)
    _refuse_no_numbers(scales, minima)
    wide = scales.astype(np.float32)
    steps = (groups - minima.astype(np.float32)[..., None]) / np.where(wide == 0, 1, wide)[..., None]
    nibbles = np.where(wide[..., None] == 0, 0, np.clip(np.rint(steps), 0, _MOST)).astype(np.uint8)
    packed = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
    return Q4Weights(_tiled(packed), _tiled_groups(scales), _tiled_groups(minima))


def quantize_q8(weight: np.ndarray) -> Q8Weights:
    """A matrix [out, in] by the largest number of each group, as `Q8_0` does; arguments and errors as for `quantize_q4`."""
    groups = _groups(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(groups).max(-1) / np.float32(LEVELS)).astype(np.float16)
    _refuse_no_numbers(scales)
    wide = scales.astype(np.float32)[..., None]
    values = np.where(wide == 0, 0, np.clip(np.rint(groups / np.where(wide == 0, 1, wide)), -LEVELS, LEVELS)).astype(np.int8)
    return Q8Weights(_tiled(values.view(np.uint8)).view(np.int8), _tiled_groups(scales))


def whole_numbers(weights: Q4Weights | Q8Weights) -> Float[Array, "tiles groups in lanes"]:
    """The numbers of one matrix before they are scaled, with the inputs of each group in order."""
    tiles, groups, _ = weights.values.shape
    stored = jnp.asarray(weights.values).reshape(tiles, groups, -1, TILE, QUAD)
    quads = jnp.concatenate([stored & 15, stored >> 4], axis=2) if isinstance(weights, Q4Weights) else stored
    return jnp.swapaxes(quads, 3, 4).reshape(tiles, groups, GROUP, TILE).astype(jnp.float32)


def widened(weights: Q4Weights | Q8Weights) -> Float[Array, "out in"]:
    """One matrix in float32, padding included."""
    numbers = whole_numbers(weights) * jnp.asarray(weights.scales).astype(jnp.float32)[:, :, None]
    if isinstance(weights, Q4Weights):
        numbers += jnp.asarray(weights.minima).astype(jnp.float32)[:, :, None]
    tiles, groups, _, _ = numbers.shape
    return numbers.reshape(tiles, groups * GROUP, TILE).swapaxes(1, 2).reshape(tiles * TILE, groups * GROUP)


def embedded_rows(weights: Q4Weights | Q8Weights, outputs: Int32[Array, "rows"]) -> Float[Array, "rows in"]:
    """The rows of one matrix in float32; zeros for an output that it does not have."""
    tiles, groups, _ = weights.values.shape
    at, lanes = outputs // TILE, outputs % TILE
    stored = jnp.asarray(weights.values).reshape(tiles, groups, -1, TILE, QUAD)
    quads = stored.at[at, :, :, lanes].get(mode="fill", fill_value=0)
    if isinstance(weights, Q4Weights):
        quads = jnp.concatenate([quads & 15, quads >> 4], axis=2)
    numbers = quads.reshape(len(outputs), groups, GROUP).astype(jnp.float32)

    def of_groups(part: Float16[Array | np.ndarray, "tiles groups lanes"]) -> Float[Array, "rows groups 1"]:
        return jnp.asarray(part).at[at, :, lanes].get(mode="fill", fill_value=0).astype(jnp.float32)[..., None]

    rows = numbers * of_groups(weights.scales)
    if isinstance(weights, Q4Weights):
        rows += of_groups(weights.minima)
    return rows.reshape(len(outputs), groups * GROUP)


def _groups(weight: np.ndarray) -> np.ndarray:
    return weight.astype(np.float32).reshape(len(weight), -1, GROUP)


def _float16(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view(np.float16)[..., 0]


def _refuse_no_numbers(*parts: np.ndarray) -> None:
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("a weight is NaN or infinite, or too large for float16")


def _tiled(stored: np.ndarray) -> np.ndarray:
    """Bytes [out, groups, size] -> [tiles, groups, 16 * size], quads of bytes of a tile's outputs side by side."""
    num_out, groups, size = stored.shape
    quads = np.ascontiguousarray(stored).view(np.uint32).reshape(num_out // TILE, TILE, groups, size // QUAD)
    return np.ascontiguousarray(quads.transpose(0, 2, 3, 1)).view(np.uint8).reshape(num_out // TILE, groups, TILE * size)


def _tiled_groups(numbers: np.ndarray) -> np.ndarray:
    """[out, groups] -> [tiles, groups, 16]."""
    num_out, groups = numbers.shape
    return np.ascontiguousarray(numbers.reshape(num_out // TILE, TILE, groups).swapaxes(1, 2))
