"""Compiles the CPU kernels, `*/*.cc` of this package, into one library beside this file.

    python pallas_kernels/native/build.py

Needs a C++17 compiler (`$CXX`, c++, g++ or clang++) and the headers that come with jaxlib; imports nothing but the standard library.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent
BUILT = Path(__file__).parent / "built"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-w")
# GCC 12's partial redundancy elimination moves accumulators of the inner loops out of registers.
GCC_FLAGS = ("-fno-tree-pre",)
TIMEOUT_S = 300


class Library(NamedTuple):
    """The library, or why there is none. Just one of the two is set."""

    path: Path | None
    missing: str | None


def sources() -> list[Path]:
    """What is compiled and what it includes, in a fixed order."""
    return sorted((*PACKAGE.glob("*/*.cc"), *PACKAGE.glob("*/*.h")))


def library_path() -> Path:
    """Where the library of these sources, this jaxlib and this kind of processor is, or would be: a wheel brings it there."""
    digest = hashlib.sha256(repr((FLAGS, GCC_FLAGS, platform.machine(), sys.platform, _jaxlib_version())).encode())
    for source in sources():
        digest.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return BUILT / f"kernels-{digest.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Of this user, for what cannot be written beside this file. Raises RuntimeError where there is no home."""
    home = os.environ.get("JAXPAGED_HOME")
    return (Path(home).expanduser() if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpaged") / "kernels"


def find_or_build() -> Library:
    """The library, compiled now if nobody has; several processes may do so at once."""
    path = library_path()
    if path.is_file():
        return Library(path, None)
    found, headers = compiler(), _headers()
    kept = _kept_path(path.name)
    if kept is not None and _is_own(kept):
        return Library(kept, None)
    if found is None:
        return Library(None, "no C++ compiler was found")
    if headers is None:
        return Library(None, "jaxlib's headers were not found")
    problem = ""
    for place in (path, kept):
        if place is None:
            continue
        try:
            _build_at(place, found, headers)
        except OSError as error:
            problem = f"the library cannot be written: {error}"
        except subprocess.SubprocessError as error:
            told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            return Library(None, f"{found} failed: {next((line for line in told if 'error' in line), told[-1] if told else '')}")
        else:
            return Library(place, None)
    return Library(None, problem)


def _kept_path(name: str) -> Path | None:
    """Its place in the cache; None where there is no home."""
    try:
        return cache_folder() / name
    except RuntimeError:
        return None


def _is_own(path: Path) -> bool:
    """Whether it is there, and nobody but this user (or root) can have put it there: it is code that we would run."""
    try:
        found = [os.stat(path), os.stat(path.parent)]
    except OSError:
        return False
    return all(each.st_uid in (os.getuid(), 0) and not each.st_mode & 0o022 for each in found)


def _build_at(path: Path, compiler: str, headers: Path) -> None:
    """Compiles. Beside this file older ones are removed; the cache may serve several installations. Raises OSError: no place for it."""
    is_cached = path.parent != BUILT
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=is_cached)
    if is_cached:
        path.parent.chmod(0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _compile(compiler, headers, made)
        os.replace(made, path)
    for older in path.parent.glob("kernels-*.so"):
        if older != path and not is_cached:
            with contextlib.suppress(OSError):
                older.unlink()


def _compile(compiler: str, headers: Path, made: Path) -> None:
    """Each unit by itself, as many at once as there are processors, and then all of them into `made`."""
    is_gcc = "clang" not in subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    command = [compiler, *FLAGS, *(GCC_FLAGS if is_gcc else ())]
    units = [source for source in sources() if source.suffix == ".cc"]
    objects = [str(made.parent / f"{unit.parent.name}-{unit.stem}.o") for unit in units]

    def run(arguments: list[str]) -> None:
        subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [["-isystem", str(headers), "-c", str(unit), "-o", made_of_it] for unit, made_of_it in zip(units, objects, strict=True)]
        list(pool.map(run, jobs))
    run(["-shared", *objects, "-o", str(made)])


def compiler() -> str | None:
    """The C++ compiler's path."""
    wanted = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (wanted,) if wanted else ("c++", "g++", "clang++"))), None)


def _headers() -> Path | None:
    """The folder that jaxlib's `xla/ffi/api/ffi.h` is in."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "include"
    return folder if (folder / "xla" / "ffi" / "api" / "ffi.h").is_file() else None


def _jaxlib_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("jaxlib")
    return ""


def main() -> None:
    """Compiles, and says what came of it; without a compiler that is no failure."""
    library = find_or_build()
    print(f"CPU kernels: {library.missing or library.path}")


if __name__ == "__main__":
    main()
