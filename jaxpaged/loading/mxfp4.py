"""Checkpoints that keep experts in MXFP4, seen as if they were not quantized (Open Compute Project, Microscaling Formats 1.0).

32 numbers of a row share one byte, the exponent of a power of two plus 127; each has 4 bits, one of 16 values, two to a byte, the lower
half first. Every result is exact in bfloat16 and in float32.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype, StoredTensor, some_of

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES_PER_SCALE = 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [..., scales, 16] and uint8 [..., scales] -> float32 [..., scales * 32]."""
    pairs = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    numbers = pairs.reshape(*scales.shape, 2 * _BYTES_PER_SCALE)
    return np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127).reshape(*scales.shape[:-1], -1)


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """A view of a checkpoint, in which `x_blocks` [experts, out, scales, 16] and `x_scales` are `x` [experts, in, out].

    Raises:
        CheckpointError: of a pair one tensor is missing, or has another shape; by name.
    """
    names = checkpoint.names()
    stems = {name.removesuffix(end) for name in names for end in (_BLOCKS, _SCALES) if name.endswith(end)}
    faults = []
    for stem in sorted(stems):
        missing = [stem + end for end in (_BLOCKS, _SCALES) if stem + end not in names]
        if missing:
            faults.append(f"{missing[0]} is missing")
            continue
        blocks, scales = checkpoint.shape(stem + _BLOCKS), checkpoint.shape(stem + _SCALES)
        if len(blocks) != 4 or blocks != (*scales, _BYTES_PER_SCALE):
            faults.append(f"{stem + _BLOCKS} has shape {list(blocks)} beside scales of shape {list(scales)}")
        if {checkpoint.dtype(stem + end) for end in (_BLOCKS, _SCALES)} != {np.dtype(np.uint8)}:
            faults.append(f"{stem + _BLOCKS} and its scales should hold bytes")
        if stem in names:
            faults.append(f"{stem} is there twice, in 4 bits and whole")
    faults += [
        f"{name} holds bytes" for name in sorted(names) if checkpoint.dtype(name) == np.uint8 and not name.endswith((_BLOCKS, _SCALES))
    ]
    if faults:
        raise CheckpointError(f"the weights in 4 bits do not fit together: {some_of(faults)}")
    return _Dequantized(checkpoint, stems)


class _Dequantized:
    """See `checkpoint.Checkpoint`."""

    def __init__(self, inner: Checkpoint, stems: set[str]) -> None:
        self._inner, self._stems = inner, stems
        self.hf_config: dict[str, Any] = inner.hf_config
        self.generation_config: dict[str, Any] = inner.generation_config
        self.native_dtype: NativeDtype = inner.native_dtype
        self.tensors = _seen_tensors(inner.tensors, stems)

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name not in self._stems:
            return self._inner.read_rows(name, start, stop)
        blocks, scales = (self._inner.read_rows(name + end, start, stop) for end in (_BLOCKS, _SCALES))
        return dequantize(blocks, scales).swapaxes(1, 2)

    def release(self, name: str) -> None:
        for stored in (name + _BLOCKS, name + _SCALES) if name in self._stems else (name,):
            self._inner.release(stored)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> "_Dequantized":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _seen_tensors(stored: Mapping[str, StoredTensor], stems: set[str]) -> dict[str, StoredTensor]:
    tensors = {name: tensor for name, tensor in stored.items() if name.removesuffix(_BLOCKS).removesuffix(_SCALES) not in stems}
    for stem in stems:
        num_experts, num_out, num_scales, _ = stored[stem + _BLOCKS].shape
        tensors[stem] = StoredTensor((num_experts, num_scales * 2 * _BYTES_PER_SCALE, num_out), np.dtype(np.float32))
    return tensors
