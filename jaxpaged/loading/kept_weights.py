"""Converted weights in one file, so that a later start maps them instead of converting them again.

The arrays come first, each at a multiple of 64 bytes, where jax on a CPU takes a mapped one as it is; then a list of them as JSON; then
its length, its SHA-256 and a mark. A file appears whole or not at all, and one that is cut or changed is no file: of every piece of an
array the sum of its 64-bit words is compared, which costs a tenth of a second for 500 MB and brings the pages into memory.
"""

import concurrent.futures
import hashlib
import mmap
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once it is imported)
import msgspec
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.disk import whole_file
from jaxpaged.loading.mapped_file import MappedFile

_MARK = b"jaxpaged weights 1\n"
_END = struct.Struct(f"<Q32s{len(_MARK)}s")
_ALIGNMENT_BYTES = 64
_PIECE_BYTES = 16 * 2**20
_WORD_BYTES = 8


class _Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One array: name, type, shape, first byte, and the sum of each piece's words."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    sums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def write_weights(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Makes the file `path` of arrays in their order.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    leaves: list[_Leaf] = []
    with whole_file(path) as file:
        for name, array in arrays.items():
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            start = file.tell()
            file.write(content)
            file.write(bytes(-len(content) % _ALIGNMENT_BYTES))
            leaves.append(_Leaf(name, str(array.dtype), array.shape, start, tuple(map(_sum, _pieces(content)))))
        listed = msgspec.json.encode(leaves)
        file.write(listed + _END.pack(len(listed), hashlib.sha256(listed).digest(), _MARK))


def map_weights(path: Path, *, num_threads: int = 1) -> dict[str, np.ndarray] | None:
    """The arrays of a file in their order: read-only and still a part of it, whatever becomes of its name.

    Args:
        num_threads: pieces that are looked at at the same time.

    Returns:
        None where there is no such file, or it is not whole.
    """
    try:
        file = MappedFile(path)
        leaves = _read_leaves(file)
    except (CheckpointError, msgspec.MsgspecError):
        return None
    if leaves is None:
        return None
    if hasattr(mmap, "MADV_WILLNEED"):
        file.buffer.madvise(mmap.MADV_WILLNEED)
    contents = [file.view(leaf.start, leaf.start + leaf.num_bytes) for leaf in leaves]
    pieces = [piece for content in contents for piece in _pieces(content)]
    with concurrent.futures.ThreadPoolExecutor(num_threads, "jaxpaged-kept") as pool:
        if list(pool.map(_sum, pieces)) != [due for leaf in leaves for due in leaf.sums]:
            return None
    return {leaf.name: content.view(np.dtype(leaf.dtype)).reshape(leaf.shape) for leaf, content in zip(leaves, contents, strict=True)}


def _read_leaves(file: MappedFile) -> list[_Leaf] | None:
    """The list at the end of a file; None where it is not what was written."""
    if file.size < _END.size:
        return None
    length, digest, mark = _END.unpack(file.buffer[file.size - _END.size :])
    if mark != _MARK or length > file.size - _END.size:
        return None
    first = file.size - _END.size - length
    listed = file.buffer[first : first + length]
    if hashlib.sha256(listed).digest() != digest:
        return None
    return msgspec.json.decode(listed, type=list[_Leaf])


def _pieces(content: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]


def _sum(piece: np.ndarray) -> int:
    """The sum of a piece's 64-bit words; numpy lets go of the interpreter lock meanwhile."""
    num_whole = len(piece) - len(piece) % _WORD_BYTES
    last = int.from_bytes(piece[num_whole:].tobytes(), "little")
    return (int(piece[:num_whole].view(np.uint64).sum(dtype=np.uint64)) + last) % 2**64
