"""The kinds of quantized matrices, each with what its numbers stand for. All are [out, in], the inputs side by side."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int8, UInt8

LEVELS = 127
"""The largest number that int8 quantization uses: symmetric, so that -128 never occurs."""

LOW_LEVELS = 128
"""A number of a row is a high and a low int8, `high * LOW_LEVELS + low`: 15 bits."""

ROW_LEVELS = LEVELS * LOW_LEVELS

LEAST_PEAK = 1e-30
"""A row or matrix row with no number as large as this counts as zeros: levels divided by a smaller one may be infinite."""


class Int8Weights(NamedTuple):
    """One scale an output channel: `weight[o, i] = values[o, i] * scales[o]`.

    Rows of activations are quantized as well, to 15 bits in two int8 parts, see `quantize_rows`.
    """

    values: Int8[Array | np.ndarray, "*layers out in"]
    scales: Float[Array | np.ndarray, "*layers out"]


class Int4Weights(NamedTuple):
    """Weights alone, one scale and zero point a group of inputs.

    `weight[o, i] = (nibble(o, i) - zeros[g, o]) * scales[g, o]` for the group `g = i // size`, where `size` is `in` over the number of
    groups. Nibbles are -8 to 7 in two's complement: byte j of a row holds input 2j in its low half and 2j + 1 in its high half, which are
    the bytes of an array of int4. Zero points are whole numbers from -8 to 8, of the scales' type; both lie as checkpoints store them, so
    that those of neighbouring outputs lie side by side.
    """

    values: UInt8[Array | np.ndarray, "*layers out half"]
    scales: Float[Array | np.ndarray, "*layers groups out"]
    zeros: Float[Array | np.ndarray, "*layers groups out"]


class Fp8Weights(NamedTuple):
    """Weights alone, float8_e4m3fn with one scale an output channel: `weight[o, i] = values[o, i] * scales[o]`."""

    values: Float[Array | np.ndarray, "*layers out in"]
    scales: Float[Array | np.ndarray, "*layers out"]


type Weights = Int8Weights | Int4Weights | Fp8Weights
