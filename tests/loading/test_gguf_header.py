"""The GGUF header reader: what it reads, and that a broken file costs neither time nor memory."""

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.gguf_header import read_gguf_header
from tests.tiny_model import write_tiny_gguf

MIB = 2**20


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_0", embedding_type="Q8_0", tie=False)
    return tmp_path / "tiny.gguf"


def test_header_equals_that_of_the_gguf_package(tiny: Path) -> None:
    header = read_gguf_header(tiny)
    theirs = gguf.GGUFReader(tiny)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, field in fields.items():
        ours = header.metadata[name]
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents(), name
    assert header.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.ggml_type, ours.start, ours.stop - ours.start) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    scalars = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": 2**63 + 1,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "naïve 東京",
    }
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.strings", ["a", "ü", "long" * 9])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_header(tmp_path / "types.gguf").metadata
    for kind, value in scalars.items():
        read = metadata[f"a.{kind}"]
        assert read == value, kind
        assert type(read) is type(value), kind
    assert metadata["a.strings"] == ["a", "ü", "long" * 9]
    numbers = metadata["a.numbers"]
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [1, -2, 3]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _start(num_tensors: int = 0, num_metadata: int = 0, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def _tensor(name: str = "t", dims: tuple[int, ...] = (32,), ggml_type: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)


def _padded(header: bytes, num_bytes: int) -> bytes:
    return header + bytes(-len(header) % 32 + num_bytes)


MANY = 10**9
BROKEN: dict[str, tuple[bytes, str]] = {
    "another format": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "three bytes": (b"GGU", "cut"),
    "cut after the counts": (_start(2, 3), "announces 3 metadata entries"),
    "10^9 metadata items": (_start(0, MANY) + bytes(10_000), "announces 1000000000 metadata entries"),
    "10^9 tensors": (_start(MANY, 0) + bytes(10_000), "announces 1000000000 tensors"),
    "counts that look negative": (_start(2**64 - 1, 2**64 - 1) + bytes(10_000), "announces"),
    "a key past the end": (_start(0, 1) + struct.pack("<Q", 5_000) + bytes(100), "cut"),
    "a key of 2^63 bytes": (_start(0, 1) + struct.pack("<Q", 2**63) + bytes(100), "metadata key of 9223372036854775808 bytes"),
    "a text of 2^64 - 1 bytes": (_start(0, 1) + _string("k") + struct.pack("<IQ", 8, 2**64 - 1) + bytes(100), "should end at byte"),
    "10^9 texts": (_start(0, 1) + _string("k") + struct.pack("<IIQ", 9, 8, MANY) + bytes(10_000), "announces 1000000000 strings"),
    "10^9 numbers": (_start(0, 1) + _string("k") + struct.pack("<IIQ", 9, 4, MANY) + bytes(10_000), "announces 1000000000 numbers"),
    "a list of lists": (_start(0, 1) + _string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(100), "unknown type 9"),
    "an unknown type": (_start(0, 1) + _string("k") + struct.pack("<I", 77) + bytes(100), "unknown type 77"),
    "a key twice": (_start(0, 2) + 2 * (_string("k") + struct.pack("<IB", 0, 1)) + bytes(100), "'k' twice"),
    "a key that is no UTF-8": (_start(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(100), "not UTF-8"),
    "a text that is no UTF-8": (_start(0, 1) + _string("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe" + bytes(9), "not UTF-8"),
    "alignment 0": (_start(0, 1) + _string("general.alignment") + struct.pack("<II", 4, 0) + bytes(64), "general.alignment 0"),
    "alignment 24": (_start(0, 1) + _string("general.alignment") + struct.pack("<II", 4, 24) + bytes(64), "general.alignment 24"),
    "offset past the end": (_padded(_start(1) + _tensor(offset=2**40), 4096), "tensor t should end at byte"),
    "offset 2^64 - 32": (_padded(_start(1) + _tensor(offset=2**64 - 32), 4096), "tensor t should end at byte"),
    "offset off the alignment": (_padded(_start(1) + _tensor(offset=7), 4096), "not a multiple of the alignment"),
    "size past the end": (_padded(_start(1) + _tensor(dims=(32, 2**40)), 4096), "tensor t should end at byte"),
    "a size that wraps to 0": (_padded(_start(1) + _tensor(dims=(2**32, 2**32)), 4096), "tensor t should end at byte"),
    "a size of 0": (_padded(_start(1) + _tensor(dims=(32, 0)), 4096), "does not fit blocks"),
    "no dimension": (_padded(_start(1) + _tensor(dims=()), 4096), "0 dimensions"),
    "a thousand dimensions": (_padded(_start(1) + _string("t") + struct.pack("<I", 1000), 9000), "1000 dimensions"),
    "half a block": (_padded(_start(1) + _tensor(dims=(48,), ggml_type=2), 4096), "blocks of 32"),
    "a tensor twice": (_padded(_start(2) + 2 * _tensor(), 4096), "tensor t twice"),
    "tensors that overlap": (_padded(_start(2) + _tensor("a") + _tensor("b", offset=64), 4096), "a and b share bytes"),
    "data cut by one byte": (_padded(_start(1) + _tensor(), 127), "tensor t should end at byte"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_at_once(tmp_path: Path, fault: str) -> None:
    content, complaint = BROKEN[fault]
    _assert_refused_cheaply(tmp_path, content, complaint)


def _assert_refused_cheaply(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=complaint) as refusal:
            read_gguf_header(path)
        seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in refusal.value.message
    assert seconds < 1
    assert peak < 2 * len(content) + 5 * MIB


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(lambda: _start(0, 1) + _string("k") + struct.pack("<IIQ", 9, 8, 2**20 + 1) + _string("ab") * (2**20 + 1), id="texts"),
        pytest.param(lambda: _start(0, 2**18) + b"".join(_string(f"{n:x}") + b"\0\0\0\0\1" for n in range(2**18)), id="metadata"),
        pytest.param(lambda: _start(2**18) + b"".join(_tensor(f"{n:x}") for n in range(2**18)), id="tensors"),
    ],
)
def test_more_items_than_any_model_has_are_refused_though_the_file_holds_them(tmp_path: Path, item: Callable[[], bytes]) -> None:
    _assert_refused_cheaply(tmp_path, item(), "are possible")


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_cut_file_is_refused_wherever_it_is_cut(tiny: Path, share: float) -> None:
    content = tiny.read_bytes()
    tiny.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="cut"):
        read_gguf_header(tiny)


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf_header(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="empty"):
        read_gguf_header(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_gguf_header(tmp_path)
    with pytest.raises(CheckpointError, match="not a plain file"):
        read_gguf_header(Path("/dev/zero"))
    (tmp_path / "link.gguf").symlink_to("nowhere.gguf")
    with pytest.raises(CheckpointError, match=r"symbolic link to nowhere\.gguf"):
        read_gguf_header(tmp_path / "link.gguf")


def test_versions_and_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    for version in (1, 4):
        path.write_bytes(_start(version=version) + bytes(64))
        with pytest.raises(UnsupportedModelError, match=f"version {version}"):
            read_gguf_header(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        read_gguf_header(path)
    path.write_bytes(_padded(_start(1) + _tensor("blk.0.attn_q.weight", ggml_type=4711), 4096))
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.weight has the unknown storage type 4711"):
        read_gguf_header(path)


def test_version_2_is_read(tiny: Path) -> None:
    content = bytearray(tiny.read_bytes())
    three = read_gguf_header(tiny)
    content[4] = 2
    tiny.write_bytes(content)
    assert read_gguf_header(tiny).tensors == three.tensors
