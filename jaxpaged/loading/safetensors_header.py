"""Reads what a safetensors file says about itself: the names, types, shapes and places of its tensors.

Format: https://huggingface.co/docs/safetensors (length of the header in 8 bytes, header in JSON, data). As in the reference reader,
the tensors must cover the data without a gap or an overlap, so a cut or padded file shows.
"""

from math import prod
from typing import Annotated, NamedTuple

import msgspec

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.mapped_file import MappedFile

_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2} | {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}

# Python objects are many times as large as their text. These limits, above any real file (the largest have some thousand
# tensors), keep a hostile header in memory under 50 MB + the file's size.
_MAX_JSON_BYTES = 16 * 2**20
_MAX_COLONS = 2**17
_MAX_COMMAS = 2**18

_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[_Offset], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Offset, _Offset]


class StoredBytes(NamedTuple):
    """Where a tensor lies: bytes [start, stop) of the file, and how to read them."""

    dtype_name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_safetensors_header(file: MappedFile) -> dict[str, StoredBytes]:
    """Returns the tensors of an open file by name.

    Raises:
        CheckpointError: the file is cut, has no valid header, or a header that contradicts the file's length.
        UnsupportedModelError: a tensor has a storage type that is unknown.
    """
    path = file.path
    if file.size < 8:
        raise CheckpointError(f"{path} is cut: it has {file.size} bytes")
    header_bytes = int.from_bytes(file.buffer[:8], "little")
    data_start = 8 + header_bytes
    if data_start > file.size:
        raise CheckpointError(f"{path} is cut or no safetensors file: a header of {header_bytes} bytes in a file of {file.size}")
    text = bounded_json(header_bytes, file.buffer[8 : min(data_start, 8 + _MAX_JSON_BYTES)], f"the header of {path}")
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a malformed header: {error!s:.200}") from None
    tensors: dict[str, StoredBytes] = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(f"{path}: tensor {name:.200} has the unknown storage type {entry.dtype:.60}")
        if end - begin != prod(entry.shape) * _ITEM_BYTES[entry.dtype]:
            raise CheckpointError(f"{path}: tensor {name:.200}, {entry.dtype} of shape {entry.shape}, cannot take {end - begin} bytes")
        if begin != position:
            raise CheckpointError(f"{path}: tensor {name:.200} begins at byte {begin} of the data, where {position} is due")
        position = end
        tensors[name] = StoredBytes(entry.dtype, tuple(entry.shape), data_start + begin, data_start + end)
    if data_start + position != file.size:
        raise CheckpointError(f"{path} is cut or wrong: by its header it has {data_start + position} bytes, in fact {file.size}")
    return tensors


def bounded_json(num_bytes: int, text: bytes, what: str) -> bytes:
    """Returns `text`, unless it would make too many objects when decoded. Raises CheckpointError then."""
    if num_bytes > _MAX_JSON_BYTES or text.count(b":") > _MAX_COLONS or text.count(b",") > _MAX_COMMAS:
        raise CheckpointError(f"{what} is no real one: {num_bytes} bytes, {text.count(b':')} entries")
    return text
