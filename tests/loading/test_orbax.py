"""`jaxpaged convert`: the same weights to the bit, whole or not at all, and restored as any sharding wants them."""

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxpaged import cli, convert_model
from jaxpaged.config import ModelConfig
from jaxpaged.convert_model import convert
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.load_progress import INTERVAL_S, LoadProgress
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.orbax_checkpoint import MANIFEST, OrbaxCheckpoint
from jaxpaged.loading.progress import SilentProgress
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import DescribedModel, convert_weights, describe_model
from jaxpaged.model_source import ModelSource
from tests.models.cases import FAMILY_CASES, VARIANT_CASES
from tests.test_architecture import import_closure
from tests.tiny_model import write_tiny_gguf, write_tiny_llama

pytestmark = pytest.mark.jax

CASES = {case.name: case for case in (*FAMILY_CASES, *VARIANT_CASES)}
IN_EVERY_RUN = ("gemma3", "phi3", "gptoss-mxfp4", "llama-tied-with-head", "llama-bfloat16", "qwen")
"""What differs in storage: windows and bases by kind, fused tensors, 4 bits, a head of its own, 16 bits, a tokenizer of its own kind."""


def converted(source: Path, destination: Path, **model: str) -> Path:
    config = ModelConfig(model=str(source), **model)
    convert(config, resolve(config), destination, SilentProgress())
    return destination


def read(folder: Path, **model: str) -> tuple[DescribedModel, dict[str, np.ndarray]]:
    config = ModelConfig(model=str(folder), **model)
    with open_checkpoint(resolve(config)) as checkpoint:
        described = describe_model(config, checkpoint, is_gpu=False)
        return described, convert_weights(checkpoint, described)


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    for path, array in one.items():
        assert array.dtype == other[path].dtype, path
        assert array.tobytes() == other[path].tobytes(), path


def check_family(name: str, folder: Path) -> None:
    source = folder / "source"
    CASES[name].write(source, **CASES[name].options)
    described, arrays = read(source)
    again, restored = read(converted(source, folder / "converted"))
    assert again.facts == described.facts
    assert_same(arrays, restored)


@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_weights_and_facts_are_the_same(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.mark.tier("long", area="models")
@pytest.mark.parametrize("name", CASES.keys() - set(IN_EVERY_RUN))
def test_weights_and_facts_of_every_other_family_are_the_same(name: str, tmp_path: Path) -> None:
    check_family(name, tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder / "source", generation_eos=[2, 5], generation_config={"temperature": 0.5})
    return converted(folder / "source", folder / "converted")


def test_what_lies_beside_the_weights_comes_along(llama: Path) -> None:
    source = llama.parent / "source"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (llama / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((llama / "generation_config.json").read_bytes()) == {"temperature": 0.5, "eos_token_id": [2, 5]}
    assert not (llama / "model.safetensors").exists()
    assert [path.name for path in llama.parent.iterdir() if path.name.startswith(".")] == []


def test_another_type_at_conversion_and_at_the_start(llama: Path, tmp_path: Path) -> None:
    (_, whole), (_, half) = read(llama), read(llama, dtype="bfloat16")
    assert_same(half, {path: array.astype(ml_dtypes.bfloat16) for path, array in whole.items()})
    _, stored = read(converted(llama, tmp_path / "half", dtype="bfloat16"))
    assert_same(stored, half)


def test_a_gguf_file_becomes_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    described, arrays = read(path)
    folder = converted(path, tmp_path / "converted")
    again, restored = read(folder)
    assert again.facts == described.facts
    assert_same(arrays, restored)
    assert (folder / "tokenizer.json").is_file()


def test_a_part_is_read_without_the_rest(llama: Path) -> None:
    described, arrays = read(llama)
    for path, parameter in OrbaxCheckpoint(llama).stored_parameters(described.structure().expected).items():
        whole = arrays[path]
        assert (parameter.shape, parameter.dtype, parameter.nbytes) == (whole.shape, whole.dtype, whole.nbytes)
        part = parameter[(slice(None),) * (whole.ndim - 1) + (slice(3, 7),)][slice(0, 2),]
        expected = whole[..., 3:7][:2]
        assert part.nbytes == expected.nbytes
        np.testing.assert_array_equal(np.asarray(part), expected)
        assert np.asarray(part[slice(1, 1),]).shape[0] == 0


def test_a_second_start_maps_what_the_first_one_kept(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path))
    config = ModelConfig(model=str(llama))

    def load() -> tuple[np.ndarray, ...]:
        model = ModelSource(resolve(config), config, is_gpu=False, num_threads=1).load()
        return tuple(np.asarray(leaf) for leaf in model.params)

    first = load()
    monkeypatch.setattr(OrbaxCheckpoint, "read_parameters", None)
    for one, other in zip(first, load(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_orbax_is_imported_only_where_it_is_needed() -> None:
    for module in ("jaxpaged.build", "jaxpaged.convert_model", "jaxpaged.cli"):
        assert not [name for name in import_closure(module) if name.split(".")[0] == "orbax"], module


def broken(llama: Path, folder: Path) -> Path:
    shutil.copytree(llama, folder)
    return folder


def test_what_does_not_fit_the_config_is_told_at_once(llama: Path, tmp_path: Path) -> None:
    folder = broken(llama, tmp_path / "other")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "attention_bias": True}))
    with pytest.raises(
        CheckpointError, match=r"layers\.attention\.q\.bias is missing.*layers\.mlp\.up\.weight has shape \[2, .*instead of \[3,"
    ):
        read(folder)


@pytest.mark.parametrize("part", ["orbax", "orbax/d", "orbax/manifest.ocdbt", MANIFEST])
def test_what_is_gone_is_told_in_one_sentence(part: str, llama: Path, tmp_path: Path) -> None:
    folder = broken(llama, tmp_path / "damaged")
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("manifest", "message"), [("{}", "is malformed"), ('{"format":"x","dtype":"float32","num_bytes":1,"id":""}', "'x'")]
)
def test_another_manifest_is_refused(manifest: str, message: str, llama: Path, tmp_path: Path) -> None:
    folder = broken(llama, tmp_path / "other")
    (folder / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match=message):
        read(folder)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("bug")])
def test_a_conversion_that_fails_leaves_nothing(
    failure: BaseException, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, *_: object) -> None:
        (folder / "half").write_text("half")
        raise failure

    monkeypatch.setattr(convert_model, "write_parameters", fail)
    expected = CheckpointError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected) as caught:
        converted(llama, tmp_path / "deep" / "er")
    if isinstance(failure, OSError):
        assert "No space left on device (free some space)" in str(caught.value)
    assert list((tmp_path / "deep").iterdir()) == []


def test_what_a_killed_conversion_left_goes_with_the_next(llama: Path, tmp_path: Path) -> None:
    dead, alive = tmp_path / f".new.{2**22 + 1}.part", tmp_path / f".new.{os.getppid()}.part"
    for left in (dead, alive):
        left.mkdir()
    converted(llama, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "new"]


def test_refusals_of_the_command(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: object) -> str:
        assert cli.main(["convert", *map(str, arguments)]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("there", "link"):
        assert "is there already: name a folder that is not" in refused(llama, tmp_path / name)
    assert "nothing" in refused(tmp_path / "nothing", tmp_path / "new")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(llama, tmp_path / "file" / "new")
    monkeypatch.setattr(convert_model.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    assert "no disk space: the weights need " in refused(llama, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError):
        converted(llama, tmp_path / "there")


def test_how_far_a_load_is_is_said_every_second() -> None:
    now = [0.0]
    said: list[tuple[str, int, int]] = []
    progress = LoadProgress("tiny", lambda *told: said.append(told), clock=lambda: now[0])
    meter = progress.meter(1000)
    for _ in range(10):
        now[0] += INTERVAL_S / 4
        meter.advance(100)
    assert said == [
        ("loading tiny: 400 B of 1.0 kB (40 %), 400 B/s, 1.5 s left", 400, 1000),
        ("loading tiny: 800 B of 1.0 kB (80 %), 400 B/s, 0.5 s left", 800, 1000),
    ]


def test_a_load_of_unknown_size_says_how_much_is_done() -> None:
    said: list[tuple[str, int, int]] = []
    now = [0.0]
    meter = LoadProgress("tiny", lambda *told: said.append(told), clock=lambda: now[0]).meter(None)
    now[0] += 2 * INTERVAL_S
    meter.advance(400)
    ((message, done, total),) = said
    assert message.startswith("loading tiny: 400 B")
    assert "%" not in message
    assert (done, total) == (400, 0)
