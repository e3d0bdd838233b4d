"""Opens a GGUF file: Hugging Face's names and layouts over llama.cpp's, dequantized tensor by tensor."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.checkpoint import NativeDtype, StoredTensor, some_of
from jaxpaged.loading.gguf_config import ARCHITECTURES, NAMES, ROPE_TENSORS, GgufArchitecture, Metadata, read_hf_config
from jaxpaged.loading.gguf_header import GgufTensor, parse_gguf_header
from jaxpaged.loading.mapped_file import MappedFile

_F32 = 0

_READ_BYTES = 4 * 2**20
"""Float32 bytes that are dequantized at a time: `gguf` needs the rows twice and some temporaries, and past the cache it gets slower."""


class GgufCheckpoint:
    """See `checkpoint.Checkpoint`. Unquantized float32 tensors are read as views of the mapped file, all others as float32 copies."""

    native_dtype: NativeDtype = "gguf"

    def __init__(self, path: Path, architectures: Mapping[str, GgufArchitecture] = ARCHITECTURES) -> None:
        """Reads the header of a file.

        Raises:
            CheckpointError: the file is missing, cut or contradicts itself.
            UnsupportedModelError: an architecture, storage type or variant that is not run, by name.
        """
        self.path = path
        self.generation_config: dict[str, Any] = {}
        self._file = MappedFile(path)
        try:
            header = parse_gguf_header(self._file)
            metadata = Metadata(path, header.metadata)
            name = metadata.get("general.architecture", str)
            if name not in architectures:
                raise UnsupportedModelError(f"{path}: GGUF architecture {name!r:.60} is not supported, only {', '.join(architectures)}")
            self._architecture = architectures[name]
            if metadata.get(f"{name}.expert_count", int, 0) and self._architecture.mixture is not None:
                self._architecture = self._architecture.mixture
            _refuse_storage(path, header.tensors)
            rope_tensors = {name: self._rows(header.tensors[name]) for name in ROPE_TENSORS if name in header.tensors}
            self._tensors = _hf_names(path, self._architecture, header.tensors)
            shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
            self.hf_config = read_hf_config(self._architecture, metadata, shapes, rope_tensors)
            self._refuse_odd_heads()
        except BaseException:
            self.close()
            raise
        self.tensors = {name: StoredTensor(tensor.shape, np.dtype(np.float32)) for name, tensor in self._tensors.items()}

    @property
    def has_joined_experts(self) -> bool:
        """See `gguf_config.GgufArchitecture`."""
        return self._architecture.has_joined_experts

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self._tensors[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self._tensors[name]
        heads = self._interleaved_heads(name)
        if heads is None:
            rows = self._rows(tensor, start, stop)
            offset = self._architecture.norm_offset if name.endswith("norm.weight") else 0.0
            return rows - np.float32(offset) if offset else rows
        # A row comes from anywhere in its head: read whole heads.
        head_dim = tensor.shape[0] // heads
        first, last = start // head_dim, -(-stop // head_dim)
        rows = self._rows(tensor, first * head_dim, last * head_dim)
        return deinterleave_rotary_rows(rows, last - first)[start - first * head_dim : stop - first * head_dim]

    def block_type(self, name: str) -> str | None:
        """See `quantize_groups.HasBlocks`."""
        from gguf.constants import GGMLQuantizationType

        return GGMLQuantizationType(self._tensors[name].ggml_type).name if name in self._tensors else None

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        """See `quantize_groups.HasBlocks`; a view of the file where its rows are in their order."""
        tensor = self._tensors[name]
        rows = self._file.view(tensor.start, tensor.stop).reshape(tensor.shape[0], -1)
        heads = self._interleaved_heads(name)
        if heads is None:
            return rows[start:stop]
        return rows[interleaved_rows(np.arange(start, min(stop, tensor.shape[0])), tensor.shape[0] // heads)]

    def release(self, name: str) -> None:
        self._file.release(self._tensors[name].start, self._tensors[name].stop)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "GgufCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refuse_odd_heads(self) -> None:
        for name, tensor in self._tensors.items():
            heads = self._interleaved_heads(name)
            if heads is not None and tensor.shape[0] % (2 * heads):
                raise CheckpointError(f"{self.path}: {name} has {tensor.shape[0]} rows, which {heads} heads of an even size cannot have")

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a tensor whose rows are interleaved, else None."""
        if self._architecture.are_rotary_rows_interleaved:
            if ".self_attn.q_proj." in name:
                return self.hf_config["num_attention_heads"]
            if ".self_attn.k_proj." in name:
                return self.hf_config["num_key_value_heads"]
        return None

    def _rows(self, tensor: GgufTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a tensor as they lie in the file, dequantized."""
        num_rows = tensor.shape[0]
        stop = num_rows if stop is None else min(stop, num_rows)
        if len(tensor.shape) == 1:
            return _dequantize(self._file.view(tensor.start, tensor.stop), tensor.ggml_type)[start:stop]
        rows = self._file.view(tensor.start, tensor.stop).reshape(num_rows, -1)[start:stop]
        row_shape = tensor.shape[1:]
        rows_at_a_time = max(1, _READ_BYTES // (4 * prod(row_shape)))
        if len(rows) <= rows_at_a_time or tensor.ggml_type == _F32:
            return _dequantize(rows, tensor.ggml_type).reshape(-1, *row_shape)
        values = np.empty((len(rows), prod(row_shape)), np.float32)
        for first in range(0, len(rows), rows_at_a_time):
            block = slice(first, first + rows_at_a_time)
            values[block] = _dequantize(rows[block], tensor.ggml_type)
        return values.reshape(-1, *row_shape)


def deinterleave_rotary_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of q and k rows: per head 0, h, 1, h + 1, ... (h = head_dim / 2) becomes 0, 1, 2, ... again.

    Args:
        rows: weight [heads * head_dim, embed] or bias [heads * head_dim].
        heads: number of heads; head_dim is even.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def interleaved_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where llama.cpp keeps rows of q and k: see `deinterleave_rotary_rows`."""
    heads, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return heads * head_dim + 2 * pair + half


def _dequantize(stored: np.ndarray, ggml_type: int) -> np.ndarray:
    """Bytes [rows, row_bytes] or [row_bytes] -> float32 values."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # scales of a damaged file may be infinite
        return dequantize(stored, GGMLQuantizationType(ggml_type))


def _hf_names(path: Path, architecture: GgufArchitecture, tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Hugging Face name -> tensor; what has no name there keeps its own, so that a complaint about it can name it."""
    named: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        if name in ROPE_TENSORS:
            continue
        stem, _, kind = name.rpartition(".")
        block = stem.split(".", 2)
        if len(block) == 3 and block[0] == "blk" and block[2] in architecture.layer_names:
            hf_name = f"model.layers.{block[1]}.{architecture.layer_names[block[2]]}.{kind}"
            named |= _one_for_each_expert(path, hf_name, tensor) if "{expert}" in hf_name else {hf_name: tensor}
        elif stem in NAMES:
            named[f"{NAMES[stem]}.{kind}"] = tensor
        else:
            named[name] = tensor
    due = tensors.keys() - set(ROPE_TENSORS)
    if twice := due - {tensor.name for tensor in named.values()}:
        raise CheckpointError(f"{path} has {some_of(twice)} under two names")
    return {name: _as_row(tensor) if name.endswith("shared_expert_gate.weight") else tensor for name, tensor in named.items()}


def _as_row(tensor: GgufTensor) -> GgufTensor:
    """The converter drops axes of one."""
    return tensor._replace(shape=(1, *tensor.shape)) if len(tensor.shape) == 1 else tensor


def _one_for_each_expert(path: Path, hf_name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """The parts of a tensor [experts, out, in], which lie one after another."""
    if len(tensor.shape) != 3:
        raise CheckpointError(f"{path}: {tensor.name} has {len(tensor.shape)} dimensions instead of 3")
    num_experts, *shape = tensor.shape
    num_bytes = (tensor.stop - tensor.start) // num_experts
    starts = range(tensor.start, tensor.stop, num_bytes)
    return {
        hf_name.replace("{expert}", str(expert)): tensor._replace(shape=tuple(shape), start=start, stop=start + num_bytes)
        for expert, start in enumerate(starts)
    }


def _refuse_storage(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    """Tries each storage type of the file on one block of zeros."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    strange: dict[str, str] = {}
    for ggml_type, name in {tensor.ggml_type: tensor.name for tensor in tensors.values()}.items():
        known = GGMLQuantizationType(ggml_type)
        try:
            _dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), ggml_type)
        except NotImplementedError:
            strange[known.name] = name
    if strange:
        raise UnsupportedModelError(f"{path}: the storage type {some_of(strange)} of {some_of(strange.values())} cannot be read")
