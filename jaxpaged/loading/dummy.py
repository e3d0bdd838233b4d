"""Random weights from a config alone (`load_format="dummy"`): to measure speed and to see whether a model fits, without its files."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.loading.checkpoint import NativeDtype, StoredTensor
from jaxpaged.loading.fill import ShapeDtype, aligned_empty
from jaxpaged.loading.model_config import read_folder_config, read_generation_config

_DRAWN = 2**20 + 7
"""Numbers that are drawn; an odd count, so that rows of any width differ. Repeated, they are as fast as copying."""

_NATIVE: Mapping[str, NativeDtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


class DummyCheckpoint:
    """See `checkpoint.Checkpoint`: a folder's configs, and no tensors. `draw` makes the parameters instead."""

    def __init__(self, folder: Path) -> None:
        """Reads the configs. Raises what `model_config.read_folder_config` does."""
        self.hf_config: dict[str, Any] = read_folder_config(folder)
        self.generation_config: dict[str, Any] = read_generation_config(folder)
        named = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype")
        self.native_dtype: NativeDtype = _NATIVE.get(named, "float32") if isinstance(named, str) else "float32"
        self.tensors: dict[str, StoredTensor] = {}

    def names(self) -> set[str]:
        return set()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def dtype(self, name: str) -> np.dtype:
        raise KeyError(name)

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        raise KeyError(name)

    def release(self, name: str) -> None:
        raise KeyError(name)

    def close(self) -> None:
        pass

    def __enter__(self) -> "DummyCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def draw(expected: Mapping[str, ShapeDtype], seed: int) -> dict[str, np.ndarray]:
    """Parameters that let activations neither grow nor vanish much, the same for one seed, on every machine.

    Args:
        expected: parameter path -> shape and type.

    Returns:
        Parameter path -> array of 64-byte aligned memory: ones for norms, zeros for biases, even draws between +-sqrt(3 / inputs) for the
        rest, whose last axis is the inputs.
    """
    drawn = np.random.default_rng(seed).random(_DRAWN, np.float32) * 2 - 1
    turns = {path: turn for turn, path in enumerate(sorted(expected))}
    return {path: _make(path, like, drawn, turns[path]) for path, like in expected.items()}


def _make(path: str, like: ShapeDtype, drawn: np.ndarray, turn: int) -> np.ndarray:
    array = aligned_empty(like.shape, np.dtype(like.dtype))
    if path.endswith("norm.weight"):
        array[...] = 1
    elif path.endswith("bias"):
        array[...] = 0
    else:
        scaled = np.roll(drawn * np.float32((3 / like.shape[-1]) ** 0.5), turn * 1009).astype(array.dtype)
        flat = array.reshape(prod(like.shape))
        for first in range(0, flat.size, _DRAWN):
            part = flat[first : first + _DRAWN]
            part[...] = scaled[: part.size]
    return array
