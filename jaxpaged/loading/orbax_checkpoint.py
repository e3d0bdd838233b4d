"""Opens and writes a model as an Orbax checkpoint: our own parameters, stacked and in their kept type, each stored in chunks.

A folder has `config.json` and the tokenizer's files as Hugging Face's have them, `jaxpaged.json` (what is stored, and which conversion it
was), and the folder `orbax` with the arrays by their paths. An array is restored with any sharding: each device reads the chunks of its
own part. Orbax is imported when arrays are written or read, and not before.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once it is imported)
import msgspec
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import NativeDtype, StoredTensor
from jaxpaged.loading.file_choice import ORBAX_FOLDER
from jaxpaged.loading.fill import ShapeDtype
from jaxpaged.loading.model_config import read_folder_config, read_generation_config

MANIFEST = "jaxpaged.json"
_FORMAT = "jaxpaged orbax 1"
_CHUNK_BYTES = 64 * 2**20
"""Of one chunk at most: what a device reads too much, where its part ends inside of one."""
_MOST_FAULTS = 20


class _Manifest(msgspec.Struct, frozen=True):
    """`jaxpaged.json`. `id` is drawn anew for every conversion, so that what was kept of another is not found again."""

    format: str
    dtype: NativeDtype
    num_bytes: int
    id: str


class OrbaxCheckpoint:
    """See `checkpoint.Checkpoint`: a folder's configs, and parameters in place of tensors, which `read_parameters` gives."""

    def __init__(self, folder: Path) -> None:
        """Reads the configs.

        Raises:
            CheckpointError: a file is missing or malformed.
            UnsupportedModelError: what `model_config.read_folder_config` refuses.
        """
        self.folder = folder
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
        except OSError as error:
            raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror or error}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is malformed: {error}") from None
        if manifest.format != _FORMAT:
            raise CheckpointError(f"{folder} is of the format {manifest.format!r:.60}, and this version reads {_FORMAT!r}")
        self.hf_config: dict[str, Any] = read_folder_config(folder)
        self.generation_config: dict[str, Any] = read_generation_config(folder)
        self.native_dtype: NativeDtype = manifest.dtype
        self.tensors: dict[str, StoredTensor] = {}

    def names(self) -> set[str]:
        return set()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def dtype(self, name: str) -> np.dtype:
        raise KeyError(name)

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        raise KeyError(name)

    def release(self, name: str) -> None:
        raise KeyError(name)

    def close(self) -> None:
        pass

    def __enter__(self) -> "OrbaxCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read_parameters(
        self,
        expected: Mapping[str, ShapeDtype],
        *,
        shardings: Mapping[str, Any] | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Every parameter, one after the other.

        Args:
            expected: parameter path -> shape, and type to give it in.
            shardings: parameter path -> `jax.sharding.Sharding` to restore it with; None: to host memory.
            on_bytes: told the size of each as it is there.

        Returns:
            Parameter path -> numpy array, or with shardings `jax.Array`.

        Raises:
            CheckpointError: parameters that are missing, unknown or of another shape, all of them by name, before any is read; chunks that
                are cut or damaged; values that the type cannot hold.
        """
        import jax
        import orbax.checkpoint as ocp

        place = (self.folder / ORBAX_FOLDER).resolve()
        handler = ocp.PyTreeCheckpointHandler()
        try:
            stored = handler.metadata(place).tree
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{place} is no Orbax checkpoint that can be read: {_first_line(error)}") from error
        self._refuse_faults({name: tuple(array.shape) for name, array in stored.items()}, expected)
        arrays: dict[str, Any] = {}
        for path, like in expected.items():
            if shardings is None:
                wanted = ocp.RestoreArgs(restore_type=np.ndarray)
            else:
                wanted = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=shardings[path], global_shape=tuple(like.shape))
            try:
                args = ocp.args.PyTreeRestore(item={path: 0}, restore_args={path: wanted}, partial_restore=True)
                array = handler.restore(place, args=args)[path]
            except Exception as error:
                raise CheckpointError(f"{path} in {place} cannot be read: {_first_line(error)}") from error
            arrays[path] = _in_dtype(path, array, np.dtype(like.dtype))
            on_bytes(array.nbytes)
        return arrays

    def _refuse_faults(self, stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, ShapeDtype]) -> None:
        faults = [f"{path} is missing" for path in expected if path not in stored]
        faults += [
            f"{path} has shape {list(stored[path])} instead of {list(like.shape)}"
            for path, like in expected.items()
            if path in stored and stored[path] != tuple(like.shape)
        ]
        faults += [f"{path} is not part of this model" for path in sorted(stored.keys() - expected.keys())]
        if faults:
            more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
            raise CheckpointError(f"{self.folder}: the parameters do not fit the config: {'; '.join(faults[:_MOST_FAULTS])}{more}")


def write_parameters(folder: Path, arrays: Mapping[str, np.ndarray], dtype: NativeDtype) -> None:
    """Writes parameters and manifest into a folder that has no such yet.

    Args:
        folder: an existing one.
        arrays: parameter path -> array.
        dtype: the type that the weights are kept in.

    Raises:
        CheckpointError: the disk is full, or refuses for another reason.
    """
    import jax
    import orbax.checkpoint as ocp

    device = jax.local_devices(backend="cpu")[0]
    tree = {path: jax.device_put(array, device, may_alias=True) for path, array in arrays.items()}
    try:
        handler = ocp.PyTreeCheckpointHandler()
        with ocp.Checkpointer(handler) as checkpointer:
            save_args = {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in tree}
            checkpointer.save((folder / ORBAX_FOLDER).resolve(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    except Exception as error:  # tensorstore raises ValueError for a full disk
        raise CheckpointError(f"{folder} cannot be written: {_first_line(error)}") from error
    manifest = _Manifest(_FORMAT, dtype, sum(array.nbytes for array in arrays.values()), os.urandom(16).hex())
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def _in_dtype(path: str, array: Any, dtype: np.dtype) -> Any:
    if array.dtype == dtype:
        return array
    if not isinstance(array, np.ndarray):
        return array.astype(dtype)
    try:
        with np.errstate(over="raise", invalid="ignore"):
            return array.astype(dtype)
    except FloatingPointError:
        raise CheckpointError(f"{path} holds values beyond the range of {dtype}: choose another dtype") from None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{lines[0] if lines else type(error).__name__:.300}"
