"""AWQ's and GPTQ's matrices as `Int4Weights`, on the host; scales keep their type.

Both store [in, out] with eight nibbles in an int32 and scales and zero points a group of inputs: GPTQ packs eight inputs of an output,
with zero points that are one less than they mean (Frantar et al. 2022, AutoGPTQ's format 1); AWQ packs eight outputs of an input in an
order of its own (Lin et al. 2023, the layout "GEMM").
"""

import numpy as np

from pallas_kernels.quantized_matmul.quantize import int4_weights
from pallas_kernels.quantized_matmul.weights import Int4Weights

_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble n of a word of AWQ is the output `_AWQ_ORDER[n]` of its eight."""


def from_gptq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None = None) -> Int4Weights:
    """Repacks a matrix of GPTQ.

    Args:
        qweight: int32 [in / 8, out].
        qzeros: int32 [groups, out / 8].
        scales: [groups, out].
        g_idx: group of each input; None: they follow one another.

    Raises:
        ValueError: shapes that do not fit, or inputs that are not in the order of their groups (`desc_act`).
    """
    nibbles = _unpack(qweight.T)  # [out, in]
    _check(nibbles.shape, qzeros, scales)
    num_in, num_groups = nibbles.shape[1], len(scales)
    if g_idx is not None and not np.array_equal(g_idx, np.arange(num_in) // (num_in // num_groups)):
        raise ValueError("inputs in the order of their importance (desc_act) are not supported")
    zeros = _unpack(qzeros).astype(np.float32) + 1
    return int4_weights(nibbles, scales, zeros)


def from_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Int4Weights:
    """Repacks a matrix of AWQ.

    Args:
        qweight: int32 [in, out / 8].
        qzeros: int32 [groups, out / 8].
        scales: [groups, out].

    Raises:
        ValueError: shapes that do not fit.
    """
    nibbles = _in_order(_unpack(qweight)).T
    _check(nibbles.shape, qzeros, scales)
    return int4_weights(nibbles, scales, _in_order(_unpack(qzeros)).astype(np.float32))


def _check(shape: tuple[int, ...], qzeros: np.ndarray, scales: np.ndarray) -> None:
    num_out, num_in = shape
    num_groups = len(scales)
    if scales.shape != (num_groups, num_out) or qzeros.shape != (num_groups, num_out // _PER_WORD) or num_in % num_groups:
        raise ValueError(f"scales {scales.shape} and zero points {qzeros.shape} do not fit {num_out} outputs of {num_in} inputs")


def _unpack(words: np.ndarray) -> np.ndarray:
    """Nibbles [rows, 8 * words] of int32 [rows, words], the lowest first."""
    shifted = np.ascontiguousarray(words).view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)
    return (shifted & 15).astype(np.uint8).reshape(words.shape[0], -1)


def _in_order(nibbles: np.ndarray) -> np.ndarray:
    ordered = np.empty_like(nibbles).reshape(len(nibbles), -1, _PER_WORD)
    ordered[..., _AWQ_ORDER] = nibbles.reshape(ordered.shape)
    return ordered.reshape(nibbles.shape)
