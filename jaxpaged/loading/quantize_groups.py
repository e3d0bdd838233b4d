"""Weights of a model with `quantization: int4`: blocks of a GGUF file as they are, everything else quantized to the same format."""

import functools
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.loading.fill import ShapeDtype, TakeTensor, aligned_empty
from pallas_kernels.quantized_matmul.group_weights import (
    GROUP,
    TILE,
    Q4Weights,
    Q8Weights,
    q4_from_gguf,
    q8_from_gguf,
    quantize_q4,
    quantize_q8,
)

_NARROW = {"Q4_0", "Q4_1"}
_WIDE = "Q8_0"
_TABLES = ("embedding.weight", "head.weight")
_LAYER, _EXPERT = "{layer}", "{expert}"
_WEIGHT = ".weight"
_PARTS = (_WEIGHT, ".scales", ".minima")
_BLOCK_NUMBERS = 2**20
"""Weights that are taken at a time: converting takes hardly any memory beside the result."""


@runtime_checkable
class HasBlocks(Protocol):
    """A checkpoint whose tensors may lie in quantized blocks."""

    def block_type(self, name: str) -> str | None:
        """What `gguf` calls the type of a tensor; None where there is no such tensor."""
        ...

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as bytes [rows, row_bytes], in the order of `read_rows`."""
        ...


def eight_bit_parameters(checkpoint: Checkpoint, weights_table: Mapping[str, tuple[str, str]], num_layers: int) -> tuple[str, ...]:
    """Parameters that keep eight bits.

    Those are the ones of which the file has any layer in `Q8_0`, and embedding and head unless it has them in four bits itself: a table
    costs little time, and four bits of it cost more than those of any map.
    """
    found = []
    for name, (path, _) in weights_table.items():
        if _EXPERT in name:
            continue
        names = [name.replace(_LAYER, str(layer)) for layer in range(num_layers)] if _LAYER in name else [name]
        types = {checkpoint.block_type(own) for own in names} if isinstance(checkpoint, HasBlocks) else {None}
        if _WIDE in types or (path in _TABLES and not types <= _NARROW):
            found.append(path)
    return tuple(sorted(found))


class Groups:
    """The tiles of a model's matrices, which are filled tensor by tensor.

    Attributes:
        arrays: parameter path -> array of 64-byte aligned memory.
    """

    def __init__(self, expected: Mapping[str, ShapeDtype]) -> None:
        """Makes the arrays of those parameters that belong to quantized matrices; `expected` as the model has them."""
        self._stems = [path.removesuffix(_PARTS[1]) for path in expected if path.endswith(_PARTS[1])]
        paths = [stem + part for stem in self._stems for part in _PARTS if stem + part in expected]
        self.arrays = {path: aligned_empty(expected[path].shape, np.dtype(expected[path].dtype)) for path in paths}

    @property
    def matrices(self) -> list[str]:
        """Parameter paths of the matrices."""
        return [stem + _WEIGHT for stem in self._stems]

    def from_checkpoint(self, checkpoint: Checkpoint) -> dict[str, TakeTensor]:
        """What `fill` is given so that tensors of matrices become tiles. They lie [out, in] and are taken as they lie."""

        def taking(path: str) -> TakeTensor:
            return lambda name, place: self._take(checkpoint, path, name, place)

        return {path: taking(path) for path in self.matrices}

    def from_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Quantizes the matrices in there, and takes them out of `arrays`.

        Raises:
            CheckpointError: a weight is NaN, infinite, or too large.
        """
        for path in filter(arrays.__contains__, self.matrices):
            whole = arrays.pop(path)
            for place in np.ndindex(whole.shape[:-2]):
                self._put(path, path, place, whole.shape[-2:], functools.partial(self._quantized, path, whole[place]))

    def _quantized(self, path: str, matrix: np.ndarray, rows: slice) -> Q4Weights | Q8Weights:
        own = _padded(matrix[rows])
        return quantize_q4(own) if self._is_narrow(path) else quantize_q8(own)

    def _is_narrow(self, path: str) -> bool:
        return path.removesuffix(_WEIGHT) + _PARTS[2] in self.arrays

    def _take(self, checkpoint: Checkpoint, path: str, name: str, place: tuple[int, ...]) -> int:
        is_narrow = self._is_narrow(path)
        stored = checkpoint.block_type(name) if isinstance(checkpoint, HasBlocks) else None

        def make(rows: slice) -> Q4Weights | Q8Weights:
            if isinstance(checkpoint, HasBlocks):
                if is_narrow and stored in _NARROW:
                    return q4_from_gguf(_padded(checkpoint.read_blocks(name, rows.start, rows.stop)), has_minima=stored == "Q4_1")
                if not is_narrow and stored == _WIDE:
                    return q8_from_gguf(_padded(checkpoint.read_blocks(name, rows.start, rows.stop)))
            wide = _padded(checkpoint.read_rows(name, rows.start, rows.stop))
            return quantize_q4(wide) if is_narrow else quantize_q8(wide)

        return self._put(path, name, place, checkpoint.shape(name), make)

    def _put(
        self, path: str, name: str, place: tuple[int, ...], shape: tuple[int, ...], make: Callable[[slice], Q4Weights | Q8Weights]
    ) -> int:
        """Fills one matrix of a stack from blocks of rows, whole tiles each; returns its bytes."""
        stem = path.removesuffix(_WEIGHT)
        targets = [self.arrays[stem + part][place] for part in _PARTS if stem + part in self.arrays]
        num_out, num_in = shape
        assert targets[0].shape[1] * GROUP == num_in
        tiles_at_a_time = max(1, _BLOCK_NUMBERS // (TILE * num_in))
        for first in range(0, len(targets[0]), tiles_at_a_time):
            tiles = slice(first, min(first + tiles_at_a_time, len(targets[0])))
            try:
                made = make(slice(tiles.start * TILE, min(tiles.stop * TILE, num_out)))
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}, so it cannot be quantized") from None
            for target, part in zip(targets, made, strict=True):
                target[tiles] = part
        return sum(target.nbytes for target in targets)


def _padded(rows: np.ndarray) -> np.ndarray:
    """Rows, or their bytes, with zeros up to a whole tile."""
    missing = -len(rows) % TILE
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows
