"""What earlier starts found out about a model's files and made of them, in the folder for derived files.

Two kinds of file lie there: a description (sizes, end tokens, the settled config) and converted weights. Their names say what they were
made from: the model's files, the options, and this project's code; so whatever changes, the old ones are no longer found. The newest few
stay, and all of them go with the model (`jaxpaged rm`). A folder that cannot be read or written stops nothing.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from jaxpaged.errors import DownloadError
from jaxpaged.loading.derived_files import KEPT_S, outlives_process
from jaxpaged.loading.disk import UNFINISHED, is_younger, require_space, whole_file
from jaxpaged.loading.kept_weights import map_weights, write_weights
from jaxpaged.loading.sources import ModelFiles
from jaxpaged.source_digest import source_digest

_DESCRIPTION, _WEIGHTS = ("model-", ".json"), ("weights-", ".bin")
_MOST_DESCRIPTIONS, _MOST_WEIGHTS = 16, 2
_CONVERTERS = ("gguf", "flax")
_HEAD_BYTES = 2**16
_DIGEST_CHARS = hashlib.sha256().digest_size * 2


class KeptModel:
    """The files kept of one model. Several processes may read and write at once."""

    def __init__(self, files: ModelFiles, *, max_weight_bytes: int) -> None:
        """Looks at the model's files, not into what is kept.

        Args:
            files: the model.
            max_weight_bytes: larger weights are not kept; 0: none are, and no description either.
        """
        self._path = files.path
        self._max_weight_bytes = max_weight_bytes
        is_on = max_weight_bytes > 0 and outlives_process(files.cache_path)
        self._folder = files.cache_path if is_on else None
        self._identity = _identity(files.path) if is_on else ""
        self._made_by = (source_digest(), *map(importlib.metadata.version, _CONVERTERS)) if is_on else ()

    def read_description[T](self, kind: type[T], options: object) -> T | None:
        """What `keep_description` was given for equal options; None if there is nothing, or it is damaged."""
        path = self._file(_DESCRIPTION, options)
        if path is None:
            return None
        try:
            content = path.read_bytes()
            digest, described = content[:_DIGEST_CHARS], content[_DIGEST_CHARS:]
            if hashlib.sha256(described).hexdigest().encode() != digest:
                return None
            described_model = msgspec.json.decode(described, type=kind)
        except (OSError, msgspec.MsgspecError):
            return None
        _note_use(path)
        return described_model

    def keep_description(self, description: msgspec.Struct, options: object) -> None:
        """Keeps what can be told in JSON without loss; anything else is found out again at each start."""
        path = self._file(_DESCRIPTION, options)
        described = msgspec.json.encode(description)
        if path is None or self._has_changed() or not _tells(described, description):
            return
        with contextlib.suppress(OSError), whole_file(path) as file:
            file.write(hashlib.sha256(described).hexdigest().encode() + described)
        self._sweep(_DESCRIPTION, _MOST_DESCRIPTIONS)

    def map_weights(self, options: object, *, num_threads: int) -> dict[str, np.ndarray] | None:
        """The weights that `keep_weights` was given for equal options, mapped; None if there are none, or they are damaged."""
        path = self._file(_WEIGHTS, options)
        if path is None:
            return None
        arrays = map_weights(path, num_threads=num_threads)
        if arrays is not None:
            _note_use(path)
        return arrays

    def keep_weights(self, arrays: Mapping[str, np.ndarray], options: object) -> None:
        """Keeps converted weights if they are not too large, and the disk has twice their size free."""
        path = self._file(_WEIGHTS, options)
        num_bytes = sum(array.nbytes for array in arrays.values())
        if path is None or num_bytes > self._max_weight_bytes or self._has_changed():
            return
        with contextlib.suppress(OSError, DownloadError):
            require_space(path.parent, 2 * num_bytes, "a copy of the converted weights")
            write_weights(path, arrays)
        self._sweep(_WEIGHTS, _MOST_WEIGHTS)

    def _file(self, kind: tuple[str, str], options: object) -> Path | None:
        if self._folder is None:
            return None
        parts = (self._identity, self._made_by, options)
        return self._folder / hashlib.sha256(repr(parts).encode()).hexdigest()[:32].join(kind)

    def _has_changed(self) -> bool:
        """Whether the model's files are no longer those that were looked at at first."""
        return _identity(self._path) != self._identity

    def _sweep(self, kind: tuple[str, str], most: int) -> None:
        """Removes all but the files used last, and what a killed process left half-written. Who has mapped one keeps it."""
        assert self._folder is not None
        prefix, suffix = kind
        with contextlib.suppress(OSError):
            found = [path for path in self._folder.iterdir() if path.name.startswith(prefix)]
            kept = sorted((path for path in found if path.suffix == suffix), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            left = [path for path in found if path.suffix == UNFINISHED and not is_younger(path, KEPT_S)]
            for path in (*kept[most:], *left):
                path.unlink(missing_ok=True)


def _tells(described: bytes, description: msgspec.Struct) -> bool:
    """Whether nothing was lost on the way to JSON, which has no infinity and no numbers as keys."""
    try:
        return bool(msgspec.json.decode(described, type=type(description)) == description)
    except msgspec.MsgspecError:
        return False


def _note_use(path: Path) -> None:
    """Makes a file one of the newest, which stay."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _identity(path: Path) -> str:
    """Tells one state of a model's files from another: names, sizes, times of change and the first 64 KiB of each."""
    digest = hashlib.sha256(repr(str(path.resolve())).encode("utf-8", "surrogateescape"))
    try:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            if not file.is_file():
                continue
            status = file.stat()
            digest.update(repr((file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_HEAD_BYTES))
    except OSError:
        # Whoever opens the model says what is wrong with it; this name is never found again.
        digest.update(os.urandom(16))
    return digest.hexdigest()
