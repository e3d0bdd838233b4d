"""The library of CPU kernels: how it comes about, what becomes of a start without one, and the kernels under sanitizers."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.native import build

pytestmark = pytest.mark.jax

ROOT = Path(__file__).parent.parent.parent
DRIVERS = Path(__file__).parent / "native"


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for libraries that holds none yet, and a cache of none."""
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    return tmp_path / "built"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_no_library(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.find_or_build() == build.Library(None, "no C++ compiler was found")
    assert not own_folder.exists()


def test_a_compiler_that_fails_is_told_by_its_error(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = script(tmp_path / "c++", 'test "$1" = --version || { echo "cpu.cc:1: error: no" >&2; echo more >&2; exit 1; }')
    monkeypatch.setenv("CXX", failing)
    assert build.find_or_build() == build.Library(None, f"{failing} failed: cpu.cc:1: error: no")
    assert list(own_folder.iterdir()) == []


def test_a_library_is_compiled_once_and_replaces_older_ones(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    made = (
        f'test "$1" = --version && exit; for word; do test "$word" = -shared && echo x >> {log}; done; while [ "$1" != -o ]; do shift; done'
    )
    made += '; echo library > "$2"'
    monkeypatch.setenv("CXX", script(tmp_path / "c++", made))
    own_folder.mkdir()
    older = own_folder / "kernels-0123.so"
    older.touch()
    first, second = build.find_or_build(), build.find_or_build()
    assert first == second == build.Library(build.library_path(), None)
    assert [path.name for path in own_folder.iterdir()] == [build.library_path().name]
    assert log.read_text() == "x\n"


@pytest.fixture
def read_only(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing can be written beside the sources, and compiling makes a file. Gives the user's cache."""
    monkeypatch.setattr(build, "BUILT", tmp_path / "file" / "built")
    (tmp_path / "file").touch()
    made = 'test "$1" = --version && exit; while [ "$1" != -o ]; do shift; done; echo library > "$2"'
    monkeypatch.setenv("CXX", script(tmp_path / "c++", made))
    return tmp_path / "home" / "kernels"


def test_where_the_package_is_read_only_the_users_cache_has_the_library(read_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only.mkdir(parents=True, mode=0o755)
    others = read_only / "kernels-0123.so"
    others.touch()
    found = build.find_or_build()
    assert found == build.Library(read_only / build.library_path().name, None)
    assert read_only.stat().st_mode & 0o777 == 0o700
    assert others.exists()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.find_or_build() == found  # and is found again without a compiler


@pytest.mark.parametrize("what", ["library", "folder"])
def test_a_library_that_others_may_write_is_not_run(read_only: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = build.find_or_build().path
    assert path is not None
    (path if what == "library" else read_only).chmod(0o777)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.find_or_build() == build.Library(None, "no C++ compiler was found")


def test_folders_that_cannot_be_made_are_told(read_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "file"))
    found = build.find_or_build()
    assert found.path is None
    assert found.missing is not None
    assert found.missing.startswith("the library cannot be written")


def test_any_change_of_a_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    for name in ("op/cpu.cc", "op/work.h"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    monkeypatch.setattr(build, "PACKAGE", package)
    names = [build.library_path()]
    for name in ("op/cpu.cc", "op/work.h"):
        (package / name).write_text(f"{name} changed")
        names.append(build.library_path())
    assert len(set(names)) == 3


@functools.cache
def _environment() -> dict[str, str]:
    return {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("driver", sorted(path.name for path in DRIVERS.glob("*_driver.cc")))
def test_kernels_under_sanitizers(driver: str, sanitizers: str, tmp_path: Path) -> None:
    compiler = build.compiler()
    assert compiler is not None, "make test-kernels needs a C++ compiler"
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-g", "-w", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread"]
    subprocess.run([compiler, *flags, str(DRIVERS / driver), "-o", str(program)], check=True, timeout=250)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=250, check=False, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout


def test_compiling_needs_nothing_but_the_standard_library() -> None:
    """Set-up runs it as a file, before anything of the project is imported."""
    code = f"import runpy, sys; runpy.run_path({str(ROOT / 'pallas_kernels/native/build.py')!r}); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code], timeout=60, check=False).returncode == 0
