"""Reads what a GGUF file says about itself: metadata and the list of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. No size, count or offset is
believed before it was compared with the length of the file, so that a broken file costs neither time nor memory.
"""

import struct
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.mapped_file import MappedFile

MetadataValue = bool | int | float | str | list[str] | np.ndarray

_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9

# Python objects are several times as large as their bytes in the file. These limits, far above any real file (Gemma has 0.8
# million tokens and merges, the largest mixtures some thousand tensors), keep the header in memory under 50 MB + the file's size.
_MAX_STRINGS = 2**20
_MAX_ITEMS = 2**15
_MAX_NAME_BYTES = 2**16
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GgufTensor(NamedTuple):
    """Where one tensor lies: `shape` is in numpy's order (rows first), `start` and `stop` are bytes of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    start: int
    stop: int


class GgufHeader(NamedTuple):
    """Metadata (arrays of numbers as numpy arrays, arrays of strings as lists) and tensors by their GGUF names."""

    metadata: dict[str, MetadataValue]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header of the file at `path`.

    Raises:
        CheckpointError: the file is missing, no GGUF, cut, or contradicts itself.
        UnsupportedModelError: an old version, a big-endian file, or a storage type that is unknown.
    """
    file = MappedFile(path)
    try:
        return parse_gguf_header(file)
    finally:
        file.close()


def parse_gguf_header(file: MappedFile) -> GgufHeader:
    """As `read_gguf_header`, of a file that is open."""
    return _Parser(file).header()


class _Parser:
    """A position in the file; each method reads one thing and moves behind it."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._path = file.path
        self._buffer = file.buffer
        self._size = file.size
        self._position = 0
        self._strings_left = _MAX_STRINGS

    def header(self) -> GgufHeader:
        self._magic_and_version()
        num_tensors, num_metadata = self._u64("number of tensors"), self._u64("number of metadata entries")
        # An entry takes at least a length (8), a type (4) and a value (1); a tensor 8 + 4 + 8 + 4 + 8.
        self._check_count(num_metadata, 13, "metadata entries", _MAX_ITEMS)
        self._check_count(num_tensors, 32, "tensors", _MAX_ITEMS)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_metadata):
            key = self._name("metadata key")
            if key in metadata:
                self._refuse(f"has the metadata key {key!r} twice")
            metadata[key] = self._value(self._u32(f"type of {key!r}"), key)
        return GgufHeader(metadata, self._tensors(num_tensors, self._alignment(metadata)))

    def _magic_and_version(self) -> None:
        if self._bytes(4, "magic number") != b"GGUF":
            self._refuse("is not a GGUF file (it does not begin with 'GGUF')")
        version = self._u32("version")
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self._path} is a big-endian GGUF file; only little-endian files are read")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self._path} has GGUF version {version}; versions 2 and 3 are read")

    def _alignment(self, metadata: dict[str, MetadataValue]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            self._refuse(f"has general.alignment {alignment!r}, which is not a power of two up to 2^20")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        described: list[tuple[str, list[int], int, int]] = []
        for _ in range(count):
            name = self._name("tensor name")
            num_dimensions = self._u32(f"dimensions of {name}")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                self._refuse(f"gives tensor {name} {num_dimensions} dimensions (1 to {_MAX_DIMENSIONS} are possible)")
            dimensions = [self._u64(f"shape of {name}") for _ in range(num_dimensions)]
            ggml_type = self._u32(f"type of {name}")
            described.append((name, dimensions, ggml_type, self._u64(f"offset of {name}")))
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dimensions, ggml_type, offset in described:
            if name in tensors:
                self._refuse(f"has the tensor {name} twice")
            if offset % alignment:
                self._refuse(f"puts tensor {name} at offset {offset}, which is not a multiple of the alignment {alignment}")
            start = data_start + offset
            stop = start + self._num_bytes(name, dimensions, ggml_type)
            if stop > self._size:
                self._refuse(f"is cut or wrong: tensor {name} should end at byte {stop}, the file has {self._size}")
            tensors[name] = GgufTensor(name, tuple(reversed(dimensions)), ggml_type, start, stop)
        self._check_overlap(tensors)
        return tensors

    def _num_bytes(self, name: str, dimensions: list[int], ggml_type: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # late: the package takes 0.15 s to import

        try:
            block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
        except (ValueError, KeyError):
            raise UnsupportedModelError(f"{self._path}: tensor {name} has the unknown storage type {ggml_type}") from None
        if 0 in dimensions or dimensions[0] % block_values:
            self._refuse(f"gives tensor {name} the shape {dimensions[::-1]}, which does not fit blocks of {block_values} values")
        num_values = 1
        for dimension in dimensions:
            num_values *= dimension
        return num_values // block_values * block_bytes

    def _check_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for before, after in zip(ordered, ordered[1:], strict=False):
            if after.start < before.stop:
                self._refuse(f"is wrong: the tensors {before.name} and {after.name} share bytes")

    def _value(self, value_type: int, key: str) -> MetadataValue:
        if value_type in _SCALARS:
            scalar: bool | int | float = self._numbers(_SCALARS[value_type], 1, key)[0].item()
            return scalar
        if value_type == _STRING:
            return self._strings(1, key)[0]
        if value_type == _ARRAY:
            item_type, count = self._u32(f"item type of {key!r}"), self._u64(f"length of {key!r}")
            if item_type == _STRING:
                return self._strings(count, key)
            if item_type in _SCALARS:
                return self._numbers(_SCALARS[item_type], count, key)
            self._refuse(f"has an array of the unknown type {item_type} in {key!r}")
        self._refuse(f"has the unknown type {value_type} in {key!r}")

    def _numbers(self, dtype: np.dtype, count: int, key: str) -> np.ndarray:
        self._check_count(count, dtype.itemsize, f"numbers in {key!r}", self._size)
        start, self._position = self._position, self._position + count * dtype.itemsize
        stored = self._file.view(start, self._position)
        return (stored if dtype.kind == "b" else stored.view(dtype)).astype(dtype)

    def _strings(self, count: int, key: str) -> list[str]:
        self._check_count(count, 8, f"strings in {key!r}", self._strings_left)
        self._strings_left -= count
        # 100,000 times in a real file, hence in one loop without calls.
        buffer, position, size, unpack = self._buffer, self._position, self._size, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                stop = position + 8 + unpack(buffer, position)[0]
                if stop > size:
                    self._refuse(f"is cut or wrong: a string of {key!r} should end at byte {stop}, the file has {size}")
                strings.append(buffer[position + 8 : stop].decode())
                position = stop
        except struct.error:
            self._refuse(f"ends inside {key!r}")
        except UnicodeDecodeError:
            self._refuse(f"has a string in {key!r} that is not UTF-8")
        self._position = position
        return strings

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if length > _MAX_NAME_BYTES:
            self._refuse(f"has a {what} of {length} bytes at byte {self._position}")
        try:
            return self._bytes(length, what).decode()
        except UnicodeDecodeError:
            self._refuse(f"has a {what} that is not UTF-8 at byte {self._position}")

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack(self._bytes(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack(self._bytes(8, what))[0]
        return value

    def _bytes(self, count: int, what: str) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > self._size:
            self._refuse(f"is cut: it ends at byte {self._size}, inside the {what}")
        return self._buffer[start : self._position]

    def _check_count(self, count: int, least_bytes: int, what: str, limit: int) -> None:
        """Refuses a count whose items could not lie in the rest of the file, before anything of that length exists."""
        possible = min((self._size - self._position) // least_bytes, limit)
        if count > possible:
            self._refuse(f"is cut or wrong: it announces {count} {what}, at most {possible} are possible")

    def _refuse(self, fault: str) -> NoReturn:
        raise CheckpointError(f"{self._path} {fault}")
