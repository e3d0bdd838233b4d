"""Programs as files: what tracing made of a Python function, kept so that the next start need not trace it again.

Tracing holds the interpreter lock and takes most of a warm start; what it makes is a few ten kilobytes a program.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax import export

from jaxpaged.loading.disk import make_private_folder
from jaxpaged.source_digest import source_digest
from pallas_kernels import native
from pallas_kernels.dispatch import Choice, selecting

_DIGEST_BYTES = hashlib.sha256().digest_size

# Types that may stand among a program's arguments or results. The names are part of the files.
serialized_as = export.register_namedtuple_serialization


class _Traced(NamedTuple):
    """A program, and which kernels it was traced with."""

    program: export.Exported
    choices: frozenset[Choice]


class TracedPrograms:
    """A folder of traced programs; without a folder, or where it cannot be read or written, programs are traced each time.

    A file's name tells all that went into the tracing (the package's own source, versions, JAX's settings, the device's kind, and what
    the caller names); a damaged file is traced anew. Several threads may ask at once.

    Attributes:
        choices: the kernels that the programs so far were traced with.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder if folder is None or make_private_folder(folder) else None
        self.choices: set[Choice] = set()

    def lower(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        donate: int,
        fixed: str,
        name: str = "program",
        kernels: Mapping[str, str] = MappingProxyType({}),
    ) -> jax.stages.Lowered:
        """Lowers `run(*args)`, tracing it only if no file has it.

        Args:
            run: a function of arrays.
            args: shapes and types of its arguments.
            donate: the argument whose memory the results take over.
            fixed: all that `run` was built from besides packaged source, in words: equal words mean equal programs.
            name: what traces call it.
            kernels: op -> the implementation that is asked for.

        Raises:
            UnsupportedKernelError: an op does not take what is asked for.
        """
        path = None if self._folder is None else self._folder / _file_name(f"{fixed}\0{sorted(kernels.items())}", args, donate)
        traced = None if path is None else _read(path)
        if traced is None:
            # Custom calls of our own: their names are those of this code, which is in the file's name.
            allowed = [export.DisabledSafetyCheck.custom_call(name) for name in native.TARGETS]
            with selecting(kernels) as choices:
                # A function of its own: JAX would give back what `run` was traced to before, with other kernels.
                program = export.export(jax.jit(lambda *args: run(*args), donate_argnums=donate), disabled_checks=allowed)(*args)
            traced = _Traced(program, frozenset(choices))
            if path is not None:
                _write(path, traced)
        self.choices.update(traced.choices)
        call = _named(traced.program.call, name)
        return jax.jit(call, donate_argnums=donate).lower(*args)

    def lower_unkept(self, run: Any, args: tuple[Any, ...], *, kernels: Mapping[str, str] = MappingProxyType({})) -> jax.stages.Lowered:
        """Lowers a jitted function that no file can hold, such as one over several devices.

        Raises:
            UnsupportedKernelError: an op does not take what is asked for.
        """
        with selecting(kernels) as choices:
            lowered: jax.stages.Lowered = run.lower(*args)
        self.choices.update(choices)
        return lowered


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        return call(*args)

    named.__name__ = name
    return named


def _file_name(fixed: str, args: tuple[Any, ...], donate: int) -> str:
    shapes, treedef = jax.tree.flatten(args)
    device = jax.devices()[0]
    settings = sorted(jax.config.values.items())
    versions = (jax.__version__, jax.lib.__version__, importlib.metadata.version("flax"))
    parts = (source_digest(), versions, settings, device.platform, device.device_kind, fixed, str(treedef), str(shapes), donate)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _read(path: Path) -> _Traced | None:
    """The program in a file; None if there is no such file or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        return None
    choices, _, program = content.partition(b"\n")
    kept = (Choice(op, implementation, tuple(refused)) for op, implementation, refused in json.loads(choices))
    return _Traced(export.deserialize(bytearray(program)), frozenset(kept))


def _write(path: Path, traced: _Traced) -> None:
    """Keeps a program whole or not at all, behind a line with its kernels; a full disk stops nothing."""
    content = json.dumps(sorted(traced.choices)).encode() + b"\n" + bytes(traced.program.serialize())
    with contextlib.suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
