"""Writes a model of any format as a folder with an Orbax checkpoint, which every command loads: whole, or not at all."""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError, JaxpagedError
from jaxpaged.host_limits import available_cpus
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype, open_checkpoint
from jaxpaged.loading.disk import SPARE_BYTES, UNFINISHED, refuse_taken, remove_tree, sync_tree
from jaxpaged.loading.file_choice import INDEX_SUFFIX, SIDE_FILES
from jaxpaged.loading.orbax_checkpoint import write_parameters
from jaxpaged.loading.progress import Meter, Progress, folder_growth, format_bytes
from jaxpaged.loading.sources import ModelFiles
from jaxpaged.model_loader import convert_weights, describe_model
from jaxpaged.parameter_sizes import weight_bytes

_WRITTEN_ANEW = frozenset({"config.json", "generation_config.json"})
_OF_THE_STORAGE = ("quantization_config", "compression_config")
"""Keys that say how weights were stored, which is no longer so."""
_NATIVE: Mapping[str, NativeDtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


def convert(config: ModelConfig, files: ModelFiles, destination: Path, progress: Progress) -> int:
    """Converts a model.

    Args:
        config: `dtype` to keep the weights in; "auto": the checkpoint's own, float32 for a GGUF file.
        files: the model.
        destination: a folder that is not there yet; it appears when it is whole.
        progress: draws how far it is.

    Returns:
        Bytes of the weights.

    Raises:
        ConfigError: the destination is there already.
        CheckpointError: the source is malformed, or the destination cannot be written; nothing is left of it.
        UnsupportedModelError: a model that we do not run.
    """
    refuse_taken(destination)
    with open_checkpoint(files, load_format=config.load_format) as checkpoint:
        # No device decides here what "auto" is.
        native: NativeDtype = "float32" if checkpoint.native_dtype == "gguf" else checkpoint.native_dtype
        wanted = native if config.dtype == "auto" else config.dtype
        described = describe_model(msgspec.structs.replace(config, dtype=wanted, max_model_len=None), checkpoint, is_gpu=False)
        num_bytes = weight_bytes(described.description.sizes, {})
        with _staged(destination, num_bytes) as staging:
            with Meter(progress, f"reading {files.name}", num_bytes) as meter:
                arrays = convert_weights(checkpoint, described, num_threads=available_cpus(), on_bytes=meter.advance)
            with Meter(progress, f"writing {destination.name}", num_bytes) as meter, folder_growth(meter, staging):
                write_parameters(staging, arrays, _NATIVE[described.facts.dtype_name])
                meter.update(num_bytes)
            is_tied = bool(described.description.hf_config["tie_word_embeddings"])
            end_ids = _write_tokenizer(files, staging, described.description.eos_token_ids)
            _write_configs(files, checkpoint, staging, described.facts.dtype_name, is_tied=is_tied, end_ids=end_ids)
    return num_bytes


class _staged:
    """A folder beside the destination that takes its name at the end of the block; nothing of it stays if the block fails.

    What a killed process left of the same destination is removed first: its name ends with the number of that process.
    """

    def __init__(self, destination: Path, num_bytes: int) -> None:
        self._destination, self._num_bytes = destination, num_bytes
        self._staging = destination.parent / f".{destination.name}.{os.getpid()}{UNFINISHED}"

    def __enter__(self) -> Path:
        above = self._destination.parent
        try:
            above.mkdir(parents=True, exist_ok=True)
            for left in above.glob(f".{self._destination.name}.*{UNFINISHED}"):
                if not _is_alive(left.name.split(".")[-2]):
                    remove_tree(left)
            free = shutil.disk_usage(above).free
            if free < self._num_bytes + SPARE_BYTES:
                raise CheckpointError(
                    f"no disk space: the weights need {format_bytes(self._num_bytes + SPARE_BYTES)} in {above}, "
                    f"{format_bytes(free)} are free"
                )
            remove_tree(self._staging)
            self._staging.mkdir()
        except OSError as error:
            raise CheckpointError(f"{self._destination} cannot be written: {error.strerror or error}") from error
        return self._staging

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                sync_tree(self._staging)
                refuse_taken(self._destination)
                os.rename(self._staging, self._destination)
        except OSError as failure:
            raise CheckpointError(f"{self._destination} cannot be written: {failure.strerror or failure}") from failure
        finally:
            remove_tree(self._staging)
        if isinstance(error, OSError):
            full = " (free some space)" if error.errno == errno.ENOSPC else ""
            raise CheckpointError(f"{self._destination} cannot be written: {error.strerror or error}{full}") from error


def _is_alive(number: str) -> bool:
    if not number.isdecimal():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _write_tokenizer(files: ModelFiles, folder: Path, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Copies or makes the tokenizer's files and the template; returns all ids that end an answer."""
    source = files.path if files.tokenizer_path is None else files.tokenizer_path
    if source.name == "tokenizer.json":
        source = source.parent
    if source.is_dir():
        for name in sorted(SIDE_FILES - _WRITTEN_ANEW):
            if (source / name).is_file() and not name.endswith(INDEX_SUFFIX):
                shutil.copyfile(source / name, folder / name)
        return eos_token_ids
    from jaxpaged.gguf_tokenizer import load_gguf

    stored = load_gguf(source, files.cache_path)
    (folder / "tokenizer.json").write_text(stored.backend.to_str(), encoding="utf-8")
    special = {"bos_token": stored.bos_token_id, "eos_token": next(iter(stored.eos_token_ids), None)}
    named = {key: stored.backend.id_to_token(index) for key, index in special.items() if index is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named, ensure_ascii=False, indent=2), encoding="utf-8")
    if stored.chat_template is not None:
        (folder / "chat_template.jinja").write_text(stored.chat_template, encoding="utf-8")
    return tuple(dict.fromkeys((*eos_token_ids, *stored.eos_token_ids)))


def _write_configs(
    files: ModelFiles, checkpoint: Checkpoint, folder: Path, dtype_name: str, *, is_tied: bool, end_ids: tuple[int, ...]
) -> None:
    """The source's config as its author wrote it, or as it was read from a GGUF file, for weights as they are stored now."""
    config: dict[str, Any] = checkpoint.hf_config
    if files.path.is_dir():
        config = json.loads((files.path / "config.json").read_bytes())
    config = {key: value for key, value in config.items() if key not in _OF_THE_STORAGE and key != "dtype"}
    config |= {"torch_dtype": dtype_name, "tie_word_embeddings": is_tied}
    generation_config = checkpoint.generation_config
    if end_ids:
        generation_config = {**generation_config, "eos_token_id": list(end_ids)}
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        if content:
            (folder / name).write_text(json.dumps(content, indent=2, default=_plain), encoding="utf-8")


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise JaxpagedError(f"the config holds {type(value).__name__}, which JSON cannot tell")
