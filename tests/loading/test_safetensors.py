"""Safetensors folders: values, and every way in which the files can be incomplete (field case O-50)."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.mapped_file import MappedFile
from jaxpaged.loading.safetensors_checkpoint import SafetensorsCheckpoint
from jaxpaged.loading.safetensors_header import read_safetensors_header
from tests.tiny_model import save_safetensors, write_tiny_llama

MIB = 2**20
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_equal_what_was_written(tmp_path: Path, dtype: Any, shards: int) -> None:
    tensors = write_tiny_llama(tmp_path, dtype=dtype, shards=shards)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == tensors.keys()
        assert checkpoint.native_dtype == dtype
        for name, array in tensors.items():
            assert checkpoint.shape(name) == array.shape
            assert checkpoint.dtype(name) == array.dtype
            assert checkpoint.read(name).dtype == array.dtype
            np.testing.assert_array_equal(checkpoint.read(name), array, err_msg=name)
            np.testing.assert_array_equal(checkpoint.read_rows(name, 3, 7), array[3:7], err_msg=name)


def test_the_maker_writes_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    tensors = write_tiny_llama(tmp_path, dtype="float16")
    theirs = load_file(tmp_path / "model.safetensors")
    assert theirs.keys() == tensors.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(array, tensors[name])


def test_native_dtype_is_that_of_most_values(tmp_path: Path) -> None:
    tensors = write_tiny_llama(tmp_path, dtype="bfloat16")
    norms = {name: array.astype(np.float32) if "norm" in name else array for name, array in tensors.items()}
    save_safetensors(tmp_path / "model.safetensors", norms)
    assert sum(array.dtype == np.float32 for array in norms.values()) == 5
    assert SafetensorsCheckpoint(tmp_path).native_dtype == "bfloat16"


def test_views_stay_valid_after_release_and_close(tmp_path: Path) -> None:
    tensors = write_tiny_llama(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    views = {name: checkpoint.read(name) for name in tensors}
    for name in tensors:
        checkpoint.release(name)
    checkpoint.close()
    for name, array in tensors.items():
        np.testing.assert_array_equal(views[name], array)
        assert not views[name].flags.writeable


def _remove_second(folder: Path) -> None:
    (folder / SECOND).unlink()


def _remove_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def _name_unknown_file(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00007-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _add_stale_shard(folder: Path) -> None:
    save_safetensors(folder / "model-00004-of-00004.safetensors", {"old.weight": np.zeros(3, np.float32)})


def _add_stale_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))


def _promise_a_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = SECOND
    (folder / INDEX).write_text(json.dumps(index))


def _link_to_nowhere(folder: Path) -> None:
    _remove_second(folder)
    (folder / SECOND).symlink_to(folder / "blobs" / "4711")


def _cut_second(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:-1])


def _empty_second(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"")


def _pad_second(folder: Path) -> None:
    with open(folder / SECOND, "ab") as file:
        file.write(b"\0")


def _name_parent_file(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    save_safetensors(folder.parent / "secret.safetensors", {"model.norm.weight": np.zeros(64, np.float32)})
    (folder / INDEX).write_text(json.dumps(index))


def _name_endless_file(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "x" * 5000 + ".safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def _link_in_a_circle(folder: Path) -> None:
    _remove_second(folder)
    (folder / SECOND).symlink_to(folder / SECOND)


def _make_second_a_folder(folder: Path) -> None:
    _remove_second(folder)
    (folder / SECOND).mkdir()


def _break_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ["model.norm.weight"]}')


def _empty_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


def _add_whole_file(folder: Path) -> None:
    save_safetensors(folder / "model.safetensors", {"old.weight": np.zeros(3, np.float32)})


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_remove_second, f"{SECOND} is missing"),
    (_remove_index, rf"holds model-00001.* but no {INDEX}"),
    (_name_unknown_file, r"model-00007-of-00003\.safetensors is missing"),
    (_add_stale_shard, r"model-00004-of-00004\.safetensors is there and .* does not name it"),
    (_add_stale_tensor, r"model-00003-of-00003\.safetensors holds model\.norm\.weight, which .* does not place there"),
    (_promise_a_tensor, rf"{SECOND} lacks lm_head\.weight"),
    (_link_to_nowhere, f"{SECOND} is a symbolic link to nowhere"),
    (_cut_second, f"{SECOND} is cut"),
    (_empty_second, f"{SECOND} is empty"),
    (_pad_second, f"{SECOND} is cut or wrong"),
    (_name_parent_file, r"names '\.\./secret\.safetensors'"),
    (_name_endless_file, "xxx is missing"),
    (_link_in_a_circle, f"{SECOND} is a symbolic link to nowhere"),
    (_make_second_a_folder, f"{SECOND} is not a plain file"),
    (_break_index, f"{INDEX} has no valid 'weight_map'"),
    (_empty_index, f"{INDEX} has an empty 'weight_map'"),
    (_add_whole_file, rf"holds both model\.safetensors and {INDEX}"),
]


@pytest.mark.parametrize(("damage", "complaint"), FAULTS, ids=[damage.__name__.strip("_") for damage, _ in FAULTS])
def test_what_is_missing_or_left_over_is_named(tmp_path: Path, damage: Callable[[Path], None], complaint: str) -> None:
    folder = tmp_path / "model"
    write_tiny_llama(folder, shards=3)
    SafetensorsCheckpoint(folder).close()
    damage(folder)
    with pytest.raises(CheckpointError, match=complaint):
        SafetensorsCheckpoint(folder)


def test_all_missing_shards_are_named_at_once(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=3)
    _remove_second(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003.safetensors is missing; .*00003-of-00003.safetensors is missing"):
        SafetensorsCheckpoint(tmp_path)


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    tensors = write_tiny_llama(tmp_path / "blobs", shards=2)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    assert SafetensorsCheckpoint(tmp_path / "snapshot").names() == tensors.keys()


def test_other_files_of_a_repository_do_not_disturb(tmp_path: Path) -> None:
    tensors = write_tiny_llama(tmp_path, shards=2)
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md"):
        (tmp_path / name).write_bytes(b"whatever")
    assert SafetensorsCheckpoint(tmp_path).names() == tensors.keys()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "a.ckpt"])
def test_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*run code"):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        SafetensorsCheckpoint(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", {})
    with pytest.raises(CheckpointError, match="has no weights"):
        SafetensorsCheckpoint(tmp_path)


def test_a_single_file_beside_shards_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    save_safetensors(tmp_path / SECOND, {"old.weight": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=SECOND):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int8, ml_dtypes.float8_e8m0fnu])
def test_other_storage_types_are_refused_by_tensor_name(tmp_path: Path, dtype: Any) -> None:
    tensors = write_tiny_llama(tmp_path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    save_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight \((I64|F64|I8|F8_E8M0)\)"):
        SafetensorsCheckpoint(tmp_path)


def _entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS: dict[str, tuple[object, str]] = {
    "a list": ([], "malformed header"),
    "no entry": ({"t": 3}, "malformed header"),
    "no shape": ({"t": {"dtype": "F32", "data_offsets": [0, 8]}}, "malformed header"),
    "negative size": ({"t": _entry(shape=(-2,))}, "malformed header"),
    "negative offset": ({"t": _entry(offsets=(-8, 0))}, "malformed header"),
    "one offset": ({"t": _entry(offsets=(0,))}, "malformed header"),
    "offsets as text": ({"t": _entry(offsets=("0", "8"))}, "malformed header"),
    "a size of 2^70": ({"t": _entry(shape=(2**70,))}, "malformed header"),
    "nine dimensions": ({"t": _entry(shape=(1,) * 8 + (2,))}, "malformed header"),
    "too few bytes": ({"t": _entry(shape=(3,))}, r"F32 of shape \[3\], cannot take 8 bytes"),
    "a product that wraps": ({"t": _entry(shape=(2**32, 2**32))}, "cannot take 8 bytes"),
    "offsets that run backwards": ({"t": _entry(offsets=(8, 0))}, "cannot take -8 bytes"),
    "past the end": ({"t": _entry(shape=(2**20,), offsets=(0, 2**22))}, "is cut or wrong"),
    "a gap": ({"t": _entry(offsets=(8, 16))}, "begins at byte 8 of the data, where 0 is due"),
    "an overlap": ({"a": _entry(), "b": _entry(shape=(1,), offsets=(4, 8))}, "b begins at byte 4 of the data, where 8 is due"),
    "bytes left": ({"t": _entry(shape=(1,), offsets=(0, 4))}, "is cut or wrong"),
}


@pytest.mark.parametrize("fault", BAD_HEADERS)
def test_a_header_that_contradicts_the_file_is_refused(tmp_path: Path, fault: str) -> None:
    header, complaint = BAD_HEADERS[fault]
    text = json.dumps(header).encode()
    _assert_refused_cheaply(tmp_path, len(text).to_bytes(8, "little") + text + bytes(8), complaint)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\x02", "is cut"),
        ((2**63).to_bytes(8, "little") + bytes(100), "a header of 9223372036854775808 bytes"),
        ((101).to_bytes(8, "little") + bytes(100), "a header of 101 bytes"),
        ((100).to_bytes(8, "little") + bytes(100), "malformed header"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "malformed header"),
        ((3_000_008).to_bytes(8, "little") + b'{"a":' + b"[[],[]," * 428_572 + bytes(100), "is no real one"),
        ((17 * MIB).to_bytes(8, "little") + bytes(17 * MIB), "is no real one"),
        ((4 * MIB).to_bytes(8, "little") + b'{"a":0,"b":0,'.ljust(16) * (MIB // 4), "is no real one"),
        ((4 * MIB).to_bytes(8, "little") + b'{"t":{"shape":[' + b"0," * (2 * MIB - 15) + bytes(15), "is no real one"),
    ],
    ids=["1 byte", "2^63", "1 too many", "zeros", "deep", "lists", "17 MiB", "many names", "many sizes"],
)
def test_a_hostile_header_costs_neither_time_nor_memory(tmp_path: Path, content: bytes, complaint: str) -> None:
    _assert_refused_cheaply(tmp_path, content, complaint)


def _assert_refused_cheaply(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    file = MappedFile(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=complaint) as refusal:
            read_safetensors_header(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        file.close()
    assert str(path) in refusal.value.message
    assert peak < 2 * len(content) + 5 * MIB


def test_an_unknown_storage_type_is_named(tmp_path: Path) -> None:
    text = json.dumps({"t": _entry(dtype="F3")}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(UnsupportedModelError, match="tensor t has the unknown storage type F3"):
        read_safetensors_header(MappedFile(tmp_path / "a.safetensors"))
