"""The folder of pulled models: what lies in it, and how a model gets in and out without ever being seen half-written.

$JAXPAGED_HOME/            or jaxpaged/ in the platform's cache folder
  models/<safe name>/      one model: manifest.json, files/, derived/; it appears and disappears by one rename
  staging/<safe name>/     a pull at work, owned by whoever holds the lock; what a killed pull left is cleaned or resumed;
                           each try has a folder of its own in it, for a download tool may outlive a killed pull a little
  locks/<safe name>.lock   held (flock) while that model is pulled or removed; the kernel lets go of it when a process dies
  derived/<hash>/          files made from a user's own model, which is never written beside
"""

import fcntl
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from jaxpaged.errors import ConfigError
from jaxpaged.loading.disk import is_younger, remove_tree, sync, sync_tree

MANIFEST = "manifest.json"
RESUME_MARK = "resume"
RESUME_KEPT_S = 7 * 86400.0
LOCK_POLL_S = 0.1
MAX_SAFE_NAME = 100


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a pulled model: its path below `files/`."""

    path: str
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was pulled, from where. `fingerprint` tells whether it is still what the source asks for."""

    name: str
    source: str
    fingerprint: str
    kind: str
    files: tuple[StoredFile, ...]
    pulled_at_s: float


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """What a fetch has put into `Staging.files`. `kind` is gguf or folder; `source` says where it came from, for the record."""

    kind: str
    files: tuple[StoredFile, ...]
    source: str


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the cache folder."""

    manifest: Manifest
    folder: Path

    @property
    def path(self) -> Path:
        """The GGUF file, or the folder of the files."""
        files = self.folder / "files"
        return files / self.manifest.files[0].path if self.manifest.kind == "gguf" else files

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pull works: `files` becomes the model's files, `work` is for what is thrown away."""

    folder: Path

    @property
    def entry(self) -> Path:
        return self.folder / "entry"

    @property
    def files(self) -> Path:
        return self.entry / "files"

    @property
    def work(self) -> Path:
        return self.folder / "work"


def cache_home() -> Path:
    """$JAXPAGED_HOME, else jaxpaged/ in $XDG_CACHE_HOME or the platform's cache folder. Raises ConfigError when there is no home folder."""
    try:
        if given := os.environ.get("JAXPAGED_HOME"):
            return Path(given).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        if os.path.isabs(xdg):
            return Path(xdg) / "jaxpaged"
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "jaxpaged"
    except RuntimeError as error:
        raise ConfigError(f"no cache folder: {error}; set JAXPAGED_HOME") from error


def safe_name(name: str) -> str:
    """A file name for any text: readable, short, never hidden or a way out of a folder, and different for different names."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", name).lstrip(".-")
    if readable and readable == name and len(name) <= MAX_SAFE_NAME and name == name.lower():
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{readable[:MAX_SAFE_NAME].lower()}-{digest}"


class CacheFolder:
    """The models below one home. Reading takes no lock and makes no folder."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = cache_home() if home is None else home

    def find(self, name: str) -> CachedModel | None:
        """The model pulled under `name`, if its manifest can be read and its files have their sizes."""
        folder = self._model_folder(name)
        model = _read(folder)
        if model is None or model.manifest.name != name or not model.manifest.files:
            return None
        for file in model.manifest.files:
            try:
                if (folder / "files" / file.path).stat().st_size != file.num_bytes:
                    return None
            except OSError:
                return None
        return model

    def models(self) -> list[CachedModel]:
        """Every model with a readable manifest, by name."""
        try:
            folders = sorted((self.home / "models").iterdir())
        except OSError:
            return []
        found = [_read(folder) for folder in folders]
        return sorted((model for model in found if model is not None), key=lambda model: model.manifest.name)

    @contextmanager
    def lock(self, name: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the model's lock; wait for other processes and threads that do, calling `on_wait` once if it comes to that."""
        descriptor = self._open_lock(safe_name(name))
        try:
            has_waited = False
            while not _try_lock(descriptor):
                if not has_waited and on_wait is not None:
                    on_wait()
                has_waited = True
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def stage(self, name: str, *, resume: str | None = None) -> Staging:
        """An empty staging folder for `name`, or with the same `resume` text the one that was left. The lock must be held."""
        self._sweep_staging()
        folder = self.home / "staging" / safe_name(name)
        mark = folder / RESUME_MARK
        if resume is None or not mark.is_file() or mark.read_text(encoding="utf-8") != resume:
            remove_tree(folder)
        staging = Staging(folder=folder / (secrets.token_hex(4) if resume is None else "resumable"))
        for made in (staging.files, staging.work):
            made.mkdir(parents=True, exist_ok=True)
        if resume is not None:
            mark.write_text(resume, encoding="utf-8")
        return staging

    def discard(self, name: str) -> None:
        """Remove the staging folder of `name`. The lock must be held."""
        remove_tree(self.home / "staging" / safe_name(name))

    def install(self, name: str, staging: Staging, staged: Staged, *, fingerprint: str) -> CachedModel:
        """Make the staged files the model `name`, durably and in one rename. The lock must be held."""
        manifest = Manifest(
            name=name, source=staged.source, fingerprint=fingerprint, kind=staged.kind, files=staged.files, pulled_at_s=time.time()
        )
        target = self._model_folder(manifest.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        (staging.entry / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        sync_tree(staging.entry)
        if os.path.lexists(target):
            os.replace(target, staging.folder / "replaced")
        os.replace(staging.entry, target)
        sync(target.parent)
        self.discard(name)
        return CachedModel(manifest=manifest, folder=target)

    def remove(self, name: str) -> bool:
        """Remove the model and what a killed pull of it left; False when there was neither. Nothing outside the cache folder is touched."""
        target = self._model_folder(name)
        staging = self.home / "staging" / safe_name(name)
        model = _read(target)
        if model is not None and model.manifest.name != name:
            return False
        if not os.path.lexists(target) and not staging.is_dir():
            return False
        with self.lock(name):
            remove_tree(staging)
            staging.mkdir(parents=True)
            if os.path.lexists(target):
                os.replace(target, staging / "removed")
            remove_tree(staging)
        return True

    def _model_folder(self, name: str) -> Path:
        return self.home / "models" / safe_name(name)

    def _open_lock(self, safe: str) -> int:
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / f"{safe}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _sweep_staging(self) -> None:
        """Remove what killed pulls of other models left, except what a later pull can still resume."""
        try:
            folders = list((self.home / "staging").iterdir())
        except FileNotFoundError:
            return
        for folder in folders:
            descriptor = self._open_lock(folder.name)
            try:
                if _try_lock(descriptor) and not is_younger(folder / RESUME_MARK, RESUME_KEPT_S):
                    remove_tree(folder)
            finally:
                os.close(descriptor)


def _read(folder: Path) -> CachedModel | None:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    if any(not _is_inside(file.path) for file in manifest.files):
        return None
    return CachedModel(manifest=manifest, folder=folder)


def _is_inside(path: str) -> bool:
    return bool(path) and not os.path.isabs(path) and "\0" not in path and ".." not in Path(path).parts


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
