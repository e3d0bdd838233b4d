"""What the cache folder asks of the disk: space, durable files, removal, and refusals told in one sentence."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jaxpaged.errors import ConfigError, DownloadError
from jaxpaged.loading.progress import format_bytes

SPARE_BYTES = 16 * 2**20
UNFINISHED = ".part"
"""Ends the names of files that are being written."""


@contextmanager
def disk_errors(home: Path) -> Iterator[None]:
    """Turn what the operating system refuses in the cache folder into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DownloadError(f"cannot write to the cache folder {home}: {reason}; free some space there or set JAXPAGED_HOME") from error


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raises DownloadError when the file system of `folder` has less than `num_bytes` (and a little more) free."""
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes + SPARE_BYTES:
        raise DownloadError(
            f"no disk space: {what} needs {format_bytes(num_bytes + SPARE_BYTES)} in {folder}, {format_bytes(free_bytes)} are free; "
            "free some space or set JAXPAGED_HOME to a folder on a larger disk"
        )


def make_private_folder(folder: Path) -> bool:
    """Makes a folder for this user alone, if need be, and says whether files can be kept in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK)


def bound_folder(folder: Path, max_bytes: int) -> None:
    """Removes the oldest files below a folder until what is left takes `max_bytes` at most; whoever reads one meanwhile makes it anew."""
    files = []
    for path in folder.rglob("*"):
        try:
            state = path.lstat()
        except OSError:  # another process was quicker
            continue
        if stat.S_ISREG(state.st_mode):
            files.append((state.st_mtime, state.st_size, path))
    excess = sum(size for _, size, _ in files) - max_bytes
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        with suppress(OSError):
            path.unlink()
            excess -= size


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears as `path` at the end of the block, in place of one that is there; nothing of it stays if the block fails.

    Several processes may write the same one: the last wins. It is not forced onto the disk: who reads it notices if a crash of the machine
    left it in parts.
    """
    descriptor, unfinished = tempfile.mkstemp(prefix=f"{path.name}.", suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def remove_tree(path: Path) -> None:
    """Remove a file, link or folder, if it is there; links are not followed."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass


def is_younger(path: Path, limit_s: float) -> bool:
    """Whether `path` is there and was changed less than `limit_s` seconds ago."""
    try:
        return time.time() - path.stat().st_mtime < limit_s
    except OSError:
        return False


def sync_tree(folder: Path) -> None:
    """Have every file and folder below `folder` on the disk before going on."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))


def sync(path: Path) -> None:
    """Have one file, or the names in one folder, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_taken(destination: Path) -> None:
    """Raises ConfigError when something is there already, whatever it is."""
    if os.path.lexists(destination):
        raise ConfigError(f"{destination} is there already: name a folder that is not, or remove it")
