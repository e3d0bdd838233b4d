"""Opens a Hugging Face folder: config.json and weights in safetensors files, mapped into memory.

The safetensors library's numpy reader fails on types that numpy does not have; with ml_dtypes the header is all one needs.
Weights in pickle files (`.bin`, `.pt`) are refused: opening them runs code.
"""

import os
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.checkpoint import NativeDtype, StoredTensor, some_of
from jaxpaged.loading.fill import IGNORABLE
from jaxpaged.loading.mapped_file import MappedFile
from jaxpaged.loading.model_config import read_folder_config, read_generation_config
from jaxpaged.loading.quantization_config import fp8_scales, has_mxfp4
from jaxpaged.loading.safetensors_header import StoredBytes, bounded_json, read_safetensors_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_DTYPES: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_BYTES: dict[str, np.dtype] = {"U8": np.dtype(np.uint8)}
"""Of weights in 4 bits, where the config says that there are some; see `loading.mxfp4`."""
_FP8: dict[str, np.dtype] = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
_FP8_SCALES: dict[str, np.dtype] = {"F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)}
"""Scales that are powers of two, where the config says that there are some; see `loading.fp8`."""
_NATIVE: dict[str, NativeDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsCheckpoint:
    """See `checkpoint.Checkpoint`. What is read are views of the mapped files."""

    def __init__(self, folder: Path) -> None:
        """Reads the configs of a folder and the headers of all its weight files.

        Raises:
            CheckpointError: files that are missing, cut, left over or contradictory, by name.
            UnsupportedModelError: see `model_config.settle`; weights stored as anything but floats of 32, 16 and 8 bits, or in
                pickle files.
        """
        self.folder = folder
        self.hf_config: dict[str, Any] = read_folder_config(folder)
        self.generation_config: dict[str, Any] = read_generation_config(folder)
        self._places: dict[str, tuple[MappedFile, StoredBytes]] = {}
        self._files: list[MappedFile] = []
        try:
            self._open()
            self.tensors = self._readable()
        except BaseException:
            self.close()
            raise
        num_values = Counter[str]()
        for _, stored in self._places.values():
            num_values[stored.dtype_name] += prod(stored.shape)
        most = max((*_NATIVE, *_FP8), key=lambda name: num_values[name])
        self.native_dtype: NativeDtype = _NATIVE[most] if most in _NATIVE else self._dtype_of_config()

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        file, stored = self._places[name]
        return file.view(stored.start, stored.stop).view(self.dtype(name)).reshape(stored.shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self.read(name)[start:stop]

    def release(self, name: str) -> None:
        file, stored = self._places[name]
        file.release(stored.start, stored.stop)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> "SafetensorsCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> None:
        folder = self.folder
        try:
            names = set(os.listdir(folder))
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
        shards = {name for name in names if _SHARD.fullmatch(name)}
        if _INDEX in names and _SINGLE in names:
            raise CheckpointError(f"{folder} holds both {_SINGLE} and {_INDEX}: remove the one that is left over")
        if _INDEX in names:
            self._open_shards(shards)
        elif _SINGLE in names and shards:
            raise CheckpointError(f"{folder} holds {_SINGLE} and also {some_of(shards)}: remove what is left over")
        elif _SINGLE in names:
            self._open_file(_SINGLE)
        elif shards:
            raise CheckpointError(f"{folder} holds {some_of(shards)} but no {_INDEX}, which says what belongs together: fetch it too")
        elif pickles := {name for name in names if name.endswith(_PICKLES)}:
            raise UnsupportedModelError(
                f"{folder} has its weights in {some_of(pickles)}: such files run code when they are opened and are never read; "
                "use the model's safetensors files"
            )
        else:
            raise CheckpointError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX} is there")
        if not self._places:
            raise CheckpointError(f"{folder} has no weights: its safetensors files are empty")

    def _open_shards(self, shards: set[str]) -> None:
        folder = self.folder
        weight_map = self._weight_map()
        listed = set(weight_map.values())
        strange = {file for file in listed if not file.endswith(".safetensors") or set(file) & set("/\\\0")}
        if strange:
            raise CheckpointError(f"{self.folder / _INDEX} names {some_of(map(repr, strange))}; only safetensors files beside it are read")
        faults = [
            f"{file:.200} is {'a symbolic link to nowhere' if os.path.islink(folder / file) else 'missing'}"
            for file in sorted(listed)
            if not os.path.exists(folder / file)  # unlike Path.exists, False for a name that is too long
        ]
        faults += [f"{file} is there and {_INDEX} does not name it: is it left over from another save?" for file in sorted(shards - listed)]
        if not faults:
            for file in sorted(listed):
                found = self._open_file(file)
                promised = {name for name, its_file in weight_map.items() if its_file == file}
                if promised - found:
                    faults.append(f"{file} lacks {some_of(promised - found)}, which {_INDEX} places there")
                if found - promised:
                    faults.append(f"{file} holds {some_of(found - promised)}, which {_INDEX} does not place there")
        if faults:
            more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise CheckpointError(f"{self.folder}: {'; '.join(faults[:10])}{more}")

    def _weight_map(self) -> dict[str, str]:
        file = MappedFile(self.folder / _INDEX)
        try:
            text = bounded_json(file.size, file.buffer[: 2**24], str(file.path))
        finally:
            file.close()
        try:
            weight_map = msgspec.json.decode(text, type=_Index).weight_map
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file.path} has no valid 'weight_map' from tensor names to file names: {error!s:.200}") from None
        if not weight_map:
            raise CheckpointError(f"{file.path} has an empty 'weight_map'")
        return weight_map

    def _open_file(self, name: str) -> set[str]:
        file = MappedFile(self.folder / name)
        self._files.append(file)
        found = read_safetensors_header(file)
        self._places |= {tensor: (file, stored) for tensor, stored in found.items()}
        return set(found)

    def _readable(self) -> dict[str, StoredTensor]:
        # Constants that nobody reads may be of any type: BERT's positions are integers.
        self._places = {
            name: place for name, place in self._places.items() if place[1].dtype_name in _DTYPES or not name.endswith(IGNORABLE)
        }
        dtypes = _DTYPES | _FP8
        dtypes |= _BYTES if has_mxfp4(self.hf_config) else {}
        dtypes |= _FP8_SCALES if fp8_scales(self.hf_config) is not None else {}
        strange = [f"{name} ({stored.dtype_name})" for name, (_, stored) in self._places.items() if stored.dtype_name not in dtypes]
        if strange:
            raise UnsupportedModelError(f"{self.folder}: weights stored as {', '.join(_DTYPES | _FP8)} are read, not {some_of(strange)}")
        return {name: StoredTensor(stored.shape, dtypes[stored.dtype_name]) for name, (_, stored) in self._places.items()}

    def _dtype_of_config(self) -> NativeDtype:
        """The type that 8-bit weights were made from, as the config says, or one that can hold them."""
        named = self.hf_config.get("dtype") or self.hf_config.get("torch_dtype")
        return next((name for name in _NATIVE.values() if name == named), "bfloat16")
