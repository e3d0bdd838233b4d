"""Checkpoints that keep weights in 8-bit floats, seen as if they were not quantized.

`x` of shape [out, in] has its scales beside it: `x_scale_inv` (DeepSeek, Qwen) or `x_scale` (compressed-tensors and others), by which its
numbers are multiplied in both. There is one scale for the tensor, one for each row, or one for each block of rows and columns. What is
said of activations (`input_scale`, `k_scale`) is not read: they keep their type here. Without a config that names a method, 8-bit floats
are numbers as they are.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype, StoredTensor, some_of
from jaxpaged.loading.quantization_config import Fp8Scales

FP8_DTYPES = frozenset({np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)})
_ENDINGS = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale")


def dequantized(checkpoint: Checkpoint, scales: Fp8Scales | None) -> Checkpoint:
    """A view of a checkpoint in which weights in 8-bit floats, multiplied by their scales, are float32.

    Args:
        checkpoint: the stored tensors.
        scales: where the scales are; None: there are none.

    Raises:
        CheckpointError: scales are missing, left over, or of another shape; by name.
    """
    tensors = checkpoint.tensors
    weights = {name for name, tensor in tensors.items() if tensor.dtype in FP8_DTYPES}
    if scales is None:
        return _Dequantized(checkpoint, dict.fromkeys(weights), None, set()) if weights else checkpoint
    unread = {name for name in tensors if name.rsplit(".", 1)[-1] in _OF_ACTIVATIONS}
    of_weights: dict[str, str | None] = {}
    faults = []
    for name in sorted(weights):
        found = [name + ending for ending in _ENDINGS if name + ending in tensors]
        if not found:
            faults.append(f"{name + _ENDINGS[0]} or {name + _ENDINGS[1]} is missing")
        elif len(found) > 1:
            faults.append(f"{found[0]} and {found[1]} are both there")
        elif not _fits(tensors[name].shape, tensors[found[0]].shape, scales.block):
            faults.append(f"{found[0]} has shape {list(tensors[found[0]].shape)} beside a weight of shape {list(tensors[name].shape)}")
        else:
            of_weights[name] = found[0]
    for name in sorted(tensors):
        if any(name.endswith(f".weight{ending}") and name.removesuffix(ending) not in weights for ending in _ENDINGS):
            faults.append(f"{name} has no weight in 8-bit floats beside it")
    if faults:
        raise CheckpointError(f"the weights in 8-bit floats do not fit together: {some_of(faults)}")
    return _Dequantized(checkpoint, of_weights, scales.block, unread)


def _fits(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Whether they are one scale, one for each row, or one for each block of a matrix."""
    by_row = scales in (shape[:1], (*shape[:1], 1)) and len(shape) == 2
    by_block = block is not None and len(shape) == 2 and scales == tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    return by_block or by_row or scales in ((), *((1,) * length for length in range(1, len(shape) + 1)))


class _Dequantized:
    """See `checkpoint.Checkpoint`."""

    def __init__(self, inner: Checkpoint, scales: Mapping[str, str | None], block: tuple[int, int] | None, unread: set[str]) -> None:
        self._inner, self._scales, self._block = inner, scales, block
        self.hf_config: dict[str, Any] = inner.hf_config
        self.generation_config: dict[str, Any] = inner.generation_config
        self.native_dtype: NativeDtype = inner.native_dtype
        hidden = unread | {name for name in scales.values() if name is not None}
        self.tensors = {
            name: StoredTensor(tensor.shape, np.dtype(np.float32)) if name in scales else tensor
            for name, tensor in inner.tensors.items()
            if name not in hidden
        }

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self._seen(name, self._inner.read(name), 0)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._seen(name, self._inner.read_rows(name, start, stop), start)

    def _seen(self, name: str, stored: np.ndarray, start: int) -> np.ndarray:
        if name not in self._scales:
            return stored
        numbers, scales_name = stored.astype(np.float32), self._scales[name]
        if scales_name is not None:
            scales = self._inner.read(scales_name).astype(np.float32)
            numbers *= scales.reshape(()) if scales.size == 1 else self._of_rows(scales, numbers, start, self.shape(name)[0])
        return numbers

    def _of_rows(self, scales: np.ndarray, numbers: np.ndarray, start: int, num_rows: int) -> np.ndarray:
        """What to multiply each of the rows from `start` on with, of a matrix of `num_rows`."""
        count, width = numbers.shape
        if scales.size == num_rows:
            return scales.reshape(-1, 1)[start : start + count]
        assert self._block is not None
        of_blocks = scales[np.arange(start, start + count) // self._block[0]]
        return np.repeat(of_blocks, self._block[1], axis=1)[:, :width]

    def release(self, name: str) -> None:
        self._inner.release(name)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> "_Dequantized":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
