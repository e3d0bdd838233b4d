"""Checkpoints that keep several projections in one tensor, seen as if each had its own."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype, StoredTensor, some_of

_PARTS: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.c_attn.weight": ("attn.q.weight", "attn.k.weight", "attn.v.weight"),
    "attn.c_attn.bias": ("attn.q.bias", "attn.k.bias", "attn.v.bias"),
    "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
"""Ending of a tensor's name -> endings of its parts, which are blocks of its rows in this order."""


class _Part(NamedTuple):
    stored: str
    first: int
    stop: int


def split_fused(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, or a view of it where tensors are fused. Raises CheckpointError for fused tensors of another shape, by name."""
    sizes = _part_rows(checkpoint.hf_config)
    faults: list[str] = []
    parts: dict[str, _Part] = {}
    for name in checkpoint.names():
        for ending, part_endings in _PARTS.items():
            if not name.endswith(ending):
                continue
            ends = np.cumsum(sizes[ending]).tolist()
            if len(checkpoint.shape(name)) != (1 if ending.endswith("bias") else 2) or checkpoint.shape(name)[0] != ends[-1]:
                faults.append(f"{name} has shape {list(checkpoint.shape(name))} instead of {ends[-1]} rows")
            stem = name.removesuffix(ending)
            starts = [0, *ends[:-1]]
            parts |= {stem + part: _Part(name, *rows) for part, *rows in zip(part_endings, starts, ends, strict=True)}
    if faults:
        raise CheckpointError(f"the weights do not fit the config: {some_of(faults)}")
    if twice := parts.keys() & checkpoint.names():
        raise CheckpointError(f"the weights hold {some_of(twice)} twice, alone and as part of another tensor")
    return _SplitCheckpoint(checkpoint, parts) if parts else checkpoint


def _part_rows(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    heads, kv_heads, head_dim, ffw = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    )
    of_heads = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    return {
        **dict.fromkeys(("self_attn.qkv_proj.weight", "attn.c_attn.weight", "attn.c_attn.bias"), of_heads),
        "mlp.gate_up_proj.weight": (ffw, ffw),
    }


class _SplitCheckpoint:
    """See `checkpoint.Checkpoint`."""

    def __init__(self, inner: Checkpoint, parts: Mapping[str, _Part]) -> None:
        self._inner, self._parts = inner, parts
        self.hf_config: dict[str, Any] = inner.hf_config
        self.generation_config: dict[str, Any] = inner.generation_config
        self.native_dtype: NativeDtype = inner.native_dtype
        fused = {part.stored for part in parts.values()}
        self.tensors = {name: tensor for name, tensor in inner.tensors.items() if name not in fused}
        for name, part in parts.items():
            stored = inner.tensors[part.stored]
            self.tensors[name] = StoredTensor((part.stop - part.first, *stored.shape[1:]), stored.dtype)

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if name not in self._parts:
            return self._inner.read_rows(name, start, stop)
        part = self._parts[name]
        return self._inner.read_rows(part.stored, part.first + start, min(part.first + stop, part.stop))

    def release(self, name: str) -> None:
        self._inner.release(self._parts[name].stored if name in self._parts else name)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> "_SplitCheckpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
