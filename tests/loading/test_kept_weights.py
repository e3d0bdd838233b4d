"""Converted weights in a file: what comes back is what was kept, to the bit, or nothing."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from jaxpaged.errors import DownloadError
from jaxpaged.loading import kept_model, kept_weights
from jaxpaged.loading.derived_files import derived_for, outlives_process
from jaxpaged.loading.disk import require_space
from jaxpaged.loading.kept_model import KeptModel
from jaxpaged.loading.kept_weights import map_weights, write_weights
from jaxpaged.loading.sources import ModelFiles, remove


class Facts(msgspec.Struct, frozen=True):
    """Something to keep."""

    windows: tuple[int | None, ...]
    norm_eps: float


FACTS = Facts((None, 3), 9.999999747378752e-06)


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Sizes that fill no word, no line and no piece; NaN of odd bits among the values."""
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FC12345, 0xFF800001, 0x80000000], np.uint32).view(np.float32)
    return {
        "norm.weight": rng.standard_normal(7).astype(np.float32),
        "layers.mlp.up.weight": rng.standard_normal((3, 5, 7)).astype(ml_dtypes.bfloat16),
        "embedding.weight": rng.standard_normal((11, 13)).astype(np.float16),
        "odd": odd,
        "empty": np.empty((0, 3), np.float32),
    }


def bits(given: dict[str, np.ndarray] | None) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    assert given is not None
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in given.items()]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces to an array."""
    monkeypatch.setattr(kept_weights, "_PIECE_BYTES", 64)


def test_what_was_kept_comes_back_to_the_bit_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weights(path, arrays())
    for num_threads in (1, 3):
        mapped = map_weights(path, num_threads=num_threads)
        assert bits(mapped) == bits(arrays())
        assert mapped is not None
        for array in mapped.values():
            assert array.ctypes.data % 64 == 0, "jax would copy it"
            assert not array.flags.writeable
    assert os.listdir(tmp_path) == ["weights"]


def test_a_column_of_a_larger_array_is_kept_as_it_reads(tmp_path: Path) -> None:
    large = np.arange(30, dtype=np.float32).reshape(5, 6)
    write_weights(tmp_path / "weights", {"columns": large[:, 1:3]})
    assert bits(map_weights(tmp_path / "weights")) == bits({"columns": large[:, 1:3].copy()})


def every_byte_changed(content: bytes) -> list[bytes]:
    return [content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :] for at in range(len(content))]


def test_no_changed_byte_and_no_cut_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    kept = {"norm.weight": arrays()["norm.weight"], "odd": arrays()["odd"]}
    write_weights(path, kept)
    content = path.read_bytes()
    num_harmless = 0
    for changed in every_byte_changed(content):
        path.write_bytes(changed)
        found = map_weights(path)
        if found is not None:
            num_harmless += 1
            assert bits(found) == bits(kept), "only what fills up to a multiple of 64 may change"
    assert num_harmless == 64 - 28 + 64 - 12
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        assert map_weights(path) is None
    path.write_bytes(content + b"\0")
    assert map_weights(path) is None
    path.unlink()
    assert map_weights(path) is None
    path.mkdir()
    assert map_weights(path) is None


def test_pieces_that_were_never_written_are_noticed(tmp_path: Path) -> None:
    """What a crash of the machine may leave: the right size, and zeros in the middle."""
    path = tmp_path / "weights"
    write_weights(path, {"long": np.arange(1, 101, dtype=np.float32)})
    content = bytearray(path.read_bytes())
    content[64:128] = bytes(64)
    path.write_bytes(content)
    assert map_weights(path) is None


def test_what_is_mapped_outlives_its_name(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_weights(path, arrays())
    mapped = map_weights(path)
    write_weights(path, arrays(seed=1))
    assert bits(mapped) == bits(arrays())
    path.unlink()
    assert bits(mapped) == bits(arrays())


def model(folder: Path, content: bytes = b"GGUF model") -> ModelFiles:
    """A model whose derived files go below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.gguf"
    if not path.exists():
        path.write_bytes(content)
    (folder / "derived").mkdir(exist_ok=True)
    return ModelFiles(name="m", kind="gguf", path=path, tokenizer_path=None, cache_path=folder / "derived")


def kept(files: ModelFiles, *, max_weight_bytes: int = 2**20) -> KeptModel:
    return KeptModel(files, max_weight_bytes=max_weight_bytes)


def fill(files: ModelFiles, options: object = "float32") -> None:
    kept(files).keep_description(FACTS, options)
    kept(files).keep_weights(arrays(), options)


def test_a_description_that_json_would_change_is_not_kept(tmp_path: Path) -> None:
    files = model(tmp_path)
    kept(files).keep_description(Facts((), float("inf")), "float32")
    assert list(files.cache_path.iterdir()) == []


def finds(files: ModelFiles, options: object = "float32") -> tuple[bool, bool]:
    """Whether description and weights are there; if they are, they are right."""
    description = kept(files).read_description(Facts, options)
    weights = kept(files).map_weights(options, num_threads=1)
    assert description in (None, FACTS)
    assert weights is None or bits(weights) == bits(arrays())
    return description is not None, weights is not None


def test_they_are_found_again_for_the_same_model_and_options_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model(tmp_path)
    assert finds(files) == (False, False)
    fill(files)
    assert finds(files) == (True, True)
    assert finds(files, "bfloat16") == (False, False)
    monkeypatch.setattr(kept_model, "source_digest", lambda: "another line of code")
    assert finds(files) == (False, False)


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_bytes(b"GGUF model, longer"),
    "as long": lambda path: path.write_bytes(b"GGUF MODEL"),
    "replaced": lambda path: (path.with_suffix(".new").write_bytes(b"GGUF model"), os.replace(path.with_suffix(".new"), path)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_converted_anew(tmp_path: Path, change: str) -> None:
    files = model(tmp_path)
    fill(files)
    times = (files.path.stat().st_atime_ns, files.path.stat().st_mtime_ns)
    CHANGES[change](files.path)
    os.utime(files.path, ns=times)
    assert finds(files) == (False, False)


def test_a_file_of_a_folder_counts(tmp_path: Path) -> None:
    files = model(tmp_path / "home")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    files = ModelFiles(name="m", kind="folder", path=folder, tokenizer_path=None, cache_path=files.cache_path)
    fill(files)
    assert finds(files) == (True, True)
    (folder / "model.safetensors").write_bytes(b"x")
    assert finds(files) == (False, False)


def test_a_model_that_changes_while_it_is_converted_is_not_kept(tmp_path: Path) -> None:
    files = model(tmp_path)
    before = kept(files)
    files.path.write_bytes(b"GGUF other")
    before.keep_weights(arrays(), "float32")
    before.keep_description(FACTS, "float32")
    assert list(files.cache_path.iterdir()) == []


def test_what_is_too_large_or_switched_off_is_not_kept(tmp_path: Path) -> None:
    files = model(tmp_path)
    num_bytes = sum(array.nbytes for array in arrays().values())
    kept(files, max_weight_bytes=num_bytes - 1).keep_weights(arrays(), "float32")
    kept(files, max_weight_bytes=0).keep_description(FACTS, "float32")
    assert list(files.cache_path.iterdir()) == []
    kept(files, max_weight_bytes=num_bytes).keep_weights(arrays(), "float32")
    assert kept(files, max_weight_bytes=0).map_weights("float32", num_threads=1) is None
    assert finds(files) == (False, True)


def test_a_damaged_description_is_found_out_again(tmp_path: Path) -> None:
    files = model(tmp_path)
    fill(files)
    (path,) = files.cache_path.glob("model-*.json")
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:80] + bytes([content[80] ^ 1]) + content[81:], bytes(64) + content[64:]):
        path.write_bytes(damaged)
        assert finds(files) == (False, True)
    fill(files)
    assert finds(files) == (True, True)


def test_the_newest_two_stay_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    files = model(tmp_path)
    old, young = (files.cache_path / f"weights-{name}.bin.x.part" for name in ("a", "b"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    for index, options in enumerate(("one", "two", "three")):
        kept(files).keep_weights(arrays(), options)
        for path in files.cache_path.glob("weights-*.bin"):
            if path.stat().st_mtime > 10**6:
                os.utime(path, (1000 + index, 1000 + index))
        if options == "two":
            assert finds(files, "one") == (False, True)  # used: now the newest
    assert [finds(files, options)[1] for options in ("one", "two", "three")] == [True, False, True]
    assert (old.exists(), young.exists()) == (False, True)


def test_no_space_or_a_folder_that_takes_no_files_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model(tmp_path)
    asked: list[int] = []

    def refuse_space(folder: Path, num_bytes: int, what: str) -> None:
        asked.append(num_bytes)
        require_space(folder, 2**60, what)

    with monkeypatch.context() as patch:
        patch.setattr(kept_model, "require_space", refuse_space)
        with pytest.raises(DownloadError):
            refuse_space(tmp_path, 1, "")
        kept(files).keep_weights(arrays(), "float32")
    assert asked[1] == 2 * sum(array.nbytes for array in arrays().values())
    assert list(files.cache_path.iterdir()) == []

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((tempfile, "mkstemp"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            fill(files)
        assert list(files.cache_path.iterdir()) == [], "half a file stays"
    gone = ModelFiles(name="m", kind="gguf", path=files.path, tokenizer_path=None, cache_path=tmp_path / "nowhere")
    fill(gone)
    assert finds(gone) == (False, False)


def test_nothing_is_kept_in_a_folder_that_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, so that no folder can be made below it")
    files = model(tmp_path / "model")
    folder = derived_for(files.path, tmp_path / "home")
    assert not outlives_process(folder)
    assert outlives_process(files.cache_path)
    files = ModelFiles(name="m", kind="gguf", path=files.path, tokenizer_path=None, cache_path=folder)
    fill(files)
    assert finds(files) == (False, False)


def fill_often(files: ModelFiles) -> None:
    for _ in range(8):
        fill(files)


def test_two_processes_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files = model(tmp_path)
    processes = [multiprocessing.get_context("spawn").Process(target=fill_often, args=(files,)) for _ in range(2)]
    for process in processes:
        process.start()
    num_found = 0
    while any(process.is_alive() for process in processes):
        num_found += all(finds(files))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert finds(files) == (True, True)
    assert len(list(files.cache_path.iterdir())) == 2
    assert num_found > 0


def test_rm_of_the_model_removes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "models" / "m"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "model.gguf").write_bytes(b"GGUF model")
    (folder / "manifest.json").write_text(
        '{"name":"m","source":"s","fingerprint":"f","kind":"gguf","files":[{"path":"model.gguf","num_bytes":10,"sha256":"0"}],"pulled_at_s":1}'
    )
    files = model(folder)
    fill(files)
    assert finds(files) == (True, True)
    assert remove("m") is not None
    assert list((tmp_path / "home").rglob("weights-*")) == []
