"""Folders for what is made from a model's files (a converted tokenizer): inside a pulled model, or away from a user's own."""

import atexit
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from jaxpaged.loading.disk import is_younger, remove_tree

KEPT_S = 86400.0
SOURCE = "source"
_TEMPORARY = "jaxpaged-"


def derived_in(model_folder: Path) -> Path:
    """A writable folder in a pulled model; it goes when the model goes."""
    return _writable(model_folder / "derived")


def derived_for(path: Path, home: Path) -> Path:
    """A writable folder below `home` for what is made from a user's own file or folder; another one once that has changed."""
    path = path.resolve()
    digest = hashlib.sha256(repr((str(path), _state(path))).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    folder = home / "derived" / digest
    is_new = not folder.is_dir()
    made = _writable(folder)
    if is_new:
        try:
            (made / SOURCE).write_text(str(path), encoding="utf-8", errors="surrogateescape")
            _sweep(str(path), keep=folder)
        except OSError:
            pass
    return made


def outlives_process(folder: Path) -> bool:
    """Whether what lies in a folder that this module gave is there for the next process, too."""
    return not folder.name.startswith(_TEMPORARY)


def _sweep(source: str, *, keep: Path) -> None:
    """Remove what was made of sources that are gone, and of earlier states of `source`; a day old, so that nobody is using it."""
    for folder in keep.parent.iterdir():
        if folder == keep or is_younger(folder, KEPT_S):
            continue
        try:
            owner = (folder / SOURCE).read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            owner = ""
        if owner == source or not os.path.lexists(owner):
            remove_tree(folder)


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells that a user's file, or a file of a user's folder, has changed."""
    state = []
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        try:
            status = file.stat()
        except OSError:
            continue
        state.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(state)


def _writable(folder: Path) -> Path:
    """`folder`, made; where that cannot be written, a temporary folder that goes with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix=_TEMPORARY)
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)
