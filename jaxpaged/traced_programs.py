"""Programs as files: what tracing made of a Python function, kept so that the next start need not trace it again.

Tracing holds the interpreter lock and takes most of a warm start; what it makes is a few ten kilobytes a program.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import export

from jaxpaged.loading.disk import make_private_folder
from jaxpaged.source_digest import source_digest
from pallas_kernels import native

_DIGEST_BYTES = hashlib.sha256().digest_size

# Types that may stand among a program's arguments or results. The names are part of the files.
serialized_as = export.register_namedtuple_serialization


class TracedPrograms:
    """A folder of traced programs; without a folder, or where it cannot be read or written, programs are traced each time.

    A file's name tells all that went into the tracing (the package's own source, versions, JAX's settings, the device's kind, and what
    the caller names); a damaged file is traced anew. Several threads may ask at once.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder if folder is None or make_private_folder(folder) else None

    def lower(self, run: Callable[..., Any], args: tuple[Any, ...], *, donate: int, fixed: str) -> jax.stages.Lowered:
        """Lowers `run(*args)`, tracing it only if no file has it.

        Args:
            run: a function of arrays.
            args: shapes and types of its arguments.
            donate: the argument whose memory the results take over.
            fixed: all that `run` was built from besides packaged source, in words: equal words mean equal programs.
        """
        path = None if self._folder is None else self._folder / _file_name(fixed, args, donate)
        exported = None if path is None else _read(path)
        if exported is None:
            # Custom calls of our own: their names are those of this code, which is in the file's name.
            allowed = [export.DisabledSafetyCheck.custom_call(name) for name in native.TARGETS]
            exported = export.export(jax.jit(run, donate_argnums=donate), disabled_checks=allowed)(*args)
            if path is not None:
                _write(path, exported)
        return jax.jit(exported.call, donate_argnums=donate).lower(*args)


def _file_name(fixed: str, args: tuple[Any, ...], donate: int) -> str:
    shapes, treedef = jax.tree.flatten(args)
    device = jax.devices()[0]
    settings = sorted(jax.config.values.items())
    versions = (jax.__version__, jax.lib.__version__, importlib.metadata.version("flax"))
    parts = (source_digest(), versions, settings, device.platform, device.device_kind, fixed, str(treedef), str(shapes), donate)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _read(path: Path) -> export.Exported | None:
    """The program in a file; None if there is no such file or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, program = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(program).digest() != digest:
        return None
    return export.deserialize(bytearray(program))


def _write(path: Path, exported: export.Exported) -> None:
    """Keeps a program whole or not at all; a full disk stops nothing."""
    program = bytes(exported.serialize())
    with contextlib.suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(program).digest() + program)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
