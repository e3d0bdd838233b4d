"""From a model's name to files on this disk: found, or fetched once and kept. How names are read: `model_names`.

A model that was pulled is used without any look at the network. `pull` is the one that asks again: it checks every hash of
what is there, and takes what a hub branch is now.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError, ConfigError, DownloadError, JaxpagedError, ModelNotFoundError
from jaxpaged.loading.cache_folder import CachedModel, CacheFolder
from jaxpaged.loading.derived_files import derived_for, derived_in
from jaxpaged.loading.disk import disk_errors
from jaxpaged.loading.file_choice import FileChoice, choose_files, choose_tokenizer_files
from jaxpaged.loading.model_names import HubSource, LocalSource, PypiSource, RegistrySource, Source, not_pulled, read_name, shown
from jaxpaged.loading.progress import Progress, progress_on
from jaxpaged.loading.registry import read_registry
from jaxpaged.loading.wheel_contents import file_sha256

GGUF_MAGIC = b"GGUF"
TOKENIZER_OF = "tokenizer of "
CONFIG_OF = "config of "


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model's files are.

    Attributes:
        name: the model's name as it is shown; a short name, hub id, or the path as given.
        kind: gguf, folder, or orbax.
        path: the GGUF file, or the folder with config.json and safetensors or an Orbax checkpoint.
        tokenizer_path: folder or file of another tokenizer than the model's own; None otherwise.
        cache_path: a writable folder for what is derived from these files; it is never beside a user's own.
    """

    name: str
    kind: str
    path: Path
    tokenizer_path: Path | None
    cache_path: Path


class PulledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `jaxpaged ls`. `pulled_at_s` is wall-clock time."""

    name: str
    source: str
    num_bytes: int
    path: Path
    pulled_at_s: float


def resolve(model: ModelConfig, *, progress: Progress | None = None) -> ModelFiles:
    """The files of `model`, fetched if they are not here yet.

    Args:
        progress: draws a fetch; None draws on standard error, and nothing is drawn when nothing is fetched.

    Raises:
        ModelNotFoundError: nothing goes by that name; the nearest are offered.
        CheckpointError, UnsupportedModelError: what is there is no model we read.
        ConfigError: options that contradict the name.
        DownloadError: it could not be fetched, or would have to be and `model.offline` forbids it.
    """
    cache = CacheFolder()
    source = read_name(model.model, read_registry(), revision=model.revision, known=_pulled_names(cache))
    if isinstance(source, RegistrySource) and model.load_format == "safetensors":
        raise ConfigError(f"load_format=safetensors, but {source.name} is a GGUF file", param="load_format")
    found = _find(source, cache, model.load_format)
    if found is None:
        _require_online(source, model)
        found = _fetch(source, cache, model.load_format, model.hf_token, progress_on() if progress is None else progress)
    if model.load_format in ("gguf", "safetensors") and (found.kind == "gguf") != (model.load_format == "gguf"):
        raise ConfigError(f"load_format={model.load_format}, but {shown(model.model)} is not stored so", param="load_format")
    if model.tokenizer is None:
        return found
    return msgspec.structs.replace(found, tokenizer_path=_resolve_tokenizer(model.tokenizer, model, cache, progress))


def pull(name: str, *, revision: str | None = None, token: str | None = None, progress: Progress | None = None) -> ModelFiles:
    """Make `name` available offline: fetch it, or check the hashes of what is here and fetch again what is not right.

    A local file or folder is looked at and left where it is.

    Raises:
        as `resolve`.
    """
    cache = CacheFolder()
    source = read_name(name, read_registry(), revision=revision, known=_pulled_names(cache))
    progress = progress_on() if progress is None else progress
    if isinstance(source, LocalSource):
        return _local_files(source, cache, "auto")
    if not isinstance(source, HubSource):
        found = cache.find(source.name)
        if found is not None and found.manifest.fingerprint == _fingerprint(source) and _is_intact(found):
            return _pulled_files(found)
        if found is not None:
            progress.note(f"{source.name} in the cache is not what it should be; pulling it again")
    return _fetch(source, cache, "auto", token, progress, is_refresh=True)


def list_models() -> list[PulledModel]:
    """The models in the cache folder, by name."""
    return [
        PulledModel(
            name=model.manifest.name,
            source=model.manifest.source,
            num_bytes=model.num_bytes,
            path=model.path,
            pulled_at_s=model.manifest.pulled_at_s,
        )
        for model in CacheFolder().models()
    ]


def remove(name: str) -> PulledModel | None:
    """Remove a pulled model from the cache folder; a user's own files and the hub's own cache are never touched.

    Returns:
        What was removed; None if only the rest of an interrupted pull was.

    Raises:
        ModelNotFoundError: no such model was pulled; the nearest that were are offered.
    """
    cache = CacheFolder()
    listed = {model.name: model for model in list_models()}
    for candidate in _canonical_names(name):
        with disk_errors(cache.home):
            if cache.remove(candidate):
                return listed.get(candidate)
    raise not_pulled(name, listed)


def _canonical_names(name: str) -> Iterable[str]:
    yield name
    try:
        source = read_name(name, read_registry())
    except ModelNotFoundError:
        return
    if not isinstance(source, LocalSource) and source.name != name:
        yield source.name


def _find(source: Source, cache: CacheFolder, load_format: str) -> ModelFiles | None:
    """What is on this disk already, without a look at the network."""
    if isinstance(source, LocalSource):
        return _local_files(source, cache, load_format)
    found = cache.find(_cache_name(source, load_format))
    if found is not None and found.manifest.fingerprint == _fingerprint(source):
        return _pulled_files(found)
    if not isinstance(source, HubSource):
        return None
    if load_format == "dummy" and (whole := cache.find(source.name)) is not None:
        return _pulled_files(whole)
    from jaxpaged.loading.hub import find_in_hub_cache

    snapshot = find_in_hub_cache(source.repo, source.revision)
    try:
        return None if snapshot is None else _folder_files(source.name, snapshot, cache, load_format, source.wanted)
    except JaxpagedError:  # not all of it is there, or other files of it than are wanted
        return None


def _require_online(source: Source, model: ModelConfig) -> None:
    if model.offline:
        raise DownloadError(f"{source.name} was never pulled, and offline is on; run `jaxpaged pull {source.name}` with a network first")


def _fetch(
    source: Source, cache: CacheFolder, load_format: str, token: str | None, progress: Progress, *, is_refresh: bool = False
) -> ModelFiles:
    assert not isinstance(source, LocalSource)
    name = _cache_name(source, load_format)
    started_s = time.time()
    try:
        with disk_errors(cache.home), cache.lock(name, on_wait=lambda: progress.note(f"another process is pulling {name}; waiting for it")):
            found = cache.find(name)
            is_due = is_refresh and found is not None and found.manifest.pulled_at_s < started_s
            if found is None or is_due or found.manifest.fingerprint != _fingerprint(source):
                found = _fetch_locked(source, name, cache, load_format, token, progress)
    finally:
        progress.close()
    return _pulled_files(found)


def _fetch_locked(
    source: RegistrySource | PypiSource | HubSource, name: str, cache: CacheFolder, load_format: str, token: str | None, progress: Progress
) -> CachedModel:
    if isinstance(source, HubSource):
        return _fetch_from_hub(source, name, cache, load_format, token, progress)
    from jaxpaged.loading.pypi import stage_pinned, stage_unpinned

    staging = cache.stage(name)
    try:
        if isinstance(source, RegistrySource):
            staged = stage_pinned(name, source.entry.source, staging, progress)
        else:
            staged = stage_unpinned(source.requirement, staging, progress, load_format)
        return cache.install(name, staging, staged, fingerprint=_fingerprint(source))
    finally:
        cache.discard(name)


def _fetch_from_hub(
    source: HubSource, name: str, cache: CacheFolder, load_format: str, token: str | None, progress: Progress
) -> CachedModel:
    from jaxpaged.loading.hub import describe, source_label, stage_repository

    found = describe(source.repo, source.revision, token)
    old = cache.find(name)
    if old is not None and old.manifest.source == source_label(found) and _is_intact(old):
        progress.note(f"{name} is up to date")
        return old
    choice = _choose_of_hub(source, [file.name for file in found.files], name, load_format)
    staging = cache.stage(name, resume=found.commit)
    staged = stage_repository(found, choice, staging, token, progress)
    return cache.install(name, staging, staged, fingerprint=_fingerprint(source))


def _choose_of_hub(source: HubSource, names: list[str], name: str, load_format: str) -> FileChoice:
    where = f"the hub model {source.repo}"
    if name.startswith(TOKENIZER_OF):
        return choose_tokenizer_files(names, where)
    return choose_files(names, where, load_format=load_format, wanted=source.wanted)


def _cache_name(source: RegistrySource | PypiSource | HubSource, load_format: str) -> str:
    """Models of one hub repository that consist of different files have different names in the cache."""
    if not isinstance(source, HubSource):
        return source.name
    if load_format == "dummy":
        return f"{CONFIG_OF}{source.name}"
    if load_format == "gguf" and source.wanted is None:
        return msgspec.structs.replace(source, wanted="gguf").name
    return source.name


def _fingerprint(source: Source) -> str:
    return source.entry.source.member_sha256 if isinstance(source, RegistrySource) else source.name


def _is_intact(model: CachedModel) -> bool:
    return all(file_sha256(model.folder / "files" / file.path) == file.sha256 for file in model.manifest.files)


def _pulled_files(model: CachedModel) -> ModelFiles:
    manifest = model.manifest
    return ModelFiles(name=manifest.name, kind=manifest.kind, path=model.path, tokenizer_path=None, cache_path=derived_in(model.folder))


def _local_files(source: LocalSource, cache: CacheFolder, load_format: str) -> ModelFiles:
    if source.path.is_dir():
        return _folder_files(source.name, source.path, cache, load_format, None)
    if not source.path.is_file():
        raise CheckpointError(f"{shown(source.name)} is neither a file nor a folder")
    try:
        with source.path.open("rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC or source.path.suffix.lower() == ".gguf"
    except OSError as error:
        raise CheckpointError(f"cannot read {shown(source.name)}: {error.strerror}") from error
    if not is_gguf:
        raise CheckpointError(f"{shown(source.name)} is not a GGUF file; give a .gguf file, or the folder that has config.json")
    return ModelFiles(name=source.name, kind="gguf", path=source.path, tokenizer_path=None, cache_path=derived_for(source.path, cache.home))


def _folder_files(name: str, folder: Path, cache: CacheFolder, load_format: str, wanted: str | None) -> ModelFiles:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {shown(name)}: {error.strerror}") from error
    choice = choose_files(names, f"the folder {shown(name)}", load_format=load_format, wanted=wanted)
    path = folder / choice.files[0] if choice.kind == "gguf" else folder
    return ModelFiles(name=name, kind=choice.kind, path=path, tokenizer_path=None, cache_path=derived_for(path, cache.home))


def _resolve_tokenizer(text: str, model: ModelConfig, cache: CacheFolder, progress: Progress | None) -> Path:
    """A folder or file here, the tokenizer of a pulled model, or the tokenizer files of a hub model."""
    source = read_name(text, read_registry(), known=_pulled_names(cache))
    if isinstance(source, LocalSource):
        return source.path
    name = f"{TOKENIZER_OF}{source.name}"
    found = cache.find(source.name) or cache.find(name)
    if found is not None:
        return found.path
    _require_online(source, model)
    drawn = progress_on() if progress is None else progress
    if not isinstance(source, HubSource):
        return _fetch(source, cache, "auto", model.hf_token, drawn).path
    with disk_errors(cache.home), cache.lock(name):
        return (cache.find(name) or _fetch_from_hub(source, name, cache, "auto", model.hf_token, drawn)).path


def _pulled_names(cache: CacheFolder) -> list[str]:
    return [model.manifest.name for model in cache.models()]
