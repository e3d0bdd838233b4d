"""Opens and writes a model as an Orbax checkpoint: our own parameters, stacked and in their kept type, each stored in chunks.

A folder has `config.json` and the tokenizer's files as Hugging Face's have them, `jaxpaged.json` (what is stored, and which conversion it
was), and the folder `orbax` with the arrays by their paths. Orbax writes it; it is read by TensorStore, which Orbax stores its arrays with:
a part of an array is read without the rest, whatever the mesh it is for. Both are imported when they are needed, and not before.
"""

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once it is imported)
import msgspec
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import NativeDtype, StoredTensor
from jaxpaged.loading.file_choice import ORBAX_FOLDER
from jaxpaged.loading.fill import ShapeDtype, aligned_empty
from jaxpaged.loading.model_config import read_folder_config, read_generation_config

MANIFEST = "jaxpaged.json"
_FORMAT = "jaxpaged orbax 1"
_CHUNK_BYTES = 64 * 2**20
"""Of one chunk at most: what a device reads too much, where its part ends inside of one."""
_CACHED_BYTES = 2 * _CHUNK_BYTES
"""Of chunks kept unpacked, so that devices whose parts lie in the same one do not each unpack it."""
_ARRAY = "/.zarray"
_MOST_FAULTS = 20


class _Manifest(msgspec.Struct, frozen=True):
    """`jaxpaged.json`. `id` is drawn anew for every conversion, so that what was kept of another is not found again."""

    format: str
    dtype: NativeDtype
    num_bytes: int
    id: str


class OrbaxCheckpoint:
    """See `checkpoint.Checkpoint`: a folder's configs, and parameters in place of tensors: `read_parameters`, `stored_parameters`."""

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

    def stored_parameters(self, expected: Mapping[str, ShapeDtype]) -> "dict[str, StoredParameter]":
        """Every parameter, none of it read yet.

        Args:
            expected: parameter path -> shape, and type to give it in.

        Raises:
            CheckpointError: parameters that are missing, unknown or of another shape, all of them by name; or a folder that cannot be read.
        """
        import tensorstore

        place = (self.folder / ORBAX_FOLDER).resolve()
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHED_BYTES}})
        store = {"driver": "ocdbt", "base": f"file://{quote(str(place))}/"}
        found: dict[str, StoredParameter] = {}
        try:
            keys = tensorstore.KvStore.open(store, context=context).result().list().result()
            for name in sorted(key.decode().removesuffix(_ARRAY) for key in keys if key.decode().endswith(_ARRAY)):
                spec = {"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}, "recheck_cached_data": False}
                array = tensorstore.open(spec, open=True, read=True, context=context).result()
                dtype = np.dtype(expected[name].dtype) if name in expected else array.dtype.numpy_dtype
                found[name] = StoredParameter(f"{name} in {place}", array, dtype)
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{place} is no Orbax checkpoint that can be read: {_first_line(error)}") from error
        self._refuse_faults({name: parameter.shape for name, parameter in found.items()}, expected)
        return {path: found[path] for path in expected}

    def read_parameters(
        self, expected: Mapping[str, ShapeDtype], *, on_bytes: Callable[[int], None] = lambda _: None
    ) -> dict[str, np.ndarray]:
        """Every parameter whole, one after the other.

        Args:
            expected: parameter path -> shape, and type to give it in.
            on_bytes: told the size of each as it is there.

        Returns:
            Parameter path -> array of 64-byte aligned memory.

        Raises:
            CheckpointError: as `stored_parameters`, before anything is read; chunks that are cut or damaged; values that the type cannot
                hold.
        """
        arrays: dict[str, np.ndarray] = {}
        for path, parameter in self.stored_parameters(expected).items():
            arrays[path] = aligned_empty(parameter.shape, parameter.dtype)
            arrays[path][...] = parameter
            on_bytes(arrays[path].nbytes)
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


class StoredParameter:
    """A parameter in the files, or a part of one: `np.asarray` reads it, and no more than it. An index is made of slices.

    Attributes:
        shape: of what would be read.
        dtype: type that it is given in.
    """

    def __init__(self, name: str, array: Any, dtype: np.dtype) -> None:
        self._name, self._array, self.dtype = name, array, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that reading it gives."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> "StoredParameter":
        return StoredParameter(self._name, self._array[index].translate_to[0], self.dtype)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Reads. Raises CheckpointError for chunks that are cut or damaged, and values that the type cannot hold."""
        try:
            stored = self._array.read().result()
        except Exception as error:  # the library raises many kinds
            raise CheckpointError(f"{self._name} cannot be read: {_first_line(error)}") from error
        try:
            with np.errstate(over="raise", invalid="ignore"):
                return np.asarray(stored, self.dtype)
        except FloatingPointError:
            raise CheckpointError(f"{self._name} holds values beyond the range of {self.dtype}: choose another dtype") from None


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
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
        with ocp.Checkpointer(handler) as checkpointer:
            save_args = {path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in tree}
            checkpointer.save((folder / ORBAX_FOLDER).resolve(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    except Exception as error:  # tensorstore raises ValueError for a full disk
        raise CheckpointError(f"{folder} cannot be written: {_first_line(error)}") from error
    manifest = _Manifest(_FORMAT, dtype, sum(array.nbytes for array in arrays.values()), os.urandom(16).hex())
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{lines[0] if lines else type(error).__name__:.300}"
