"""GGUF files of gpt-oss, seen as Hugging Face stores its experts: gate and up in one tensor, number by number in turn."""

from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, NativeDtype, StoredTensor, some_of

_GATE, _UP = ".experts.gate_proj", ".experts.up_proj"
_RENAMED = {".experts.down_proj.weight": ".experts.down_proj", ".experts.down_proj.bias": ".experts.down_proj_bias"}
_SINKS = ".self_attn.sinks"


def joined_experts(checkpoint: Checkpoint) -> Checkpoint:
    """A view in which `experts.gate_proj.weight` [experts, ffw, embed] and `up_proj` are `experts.gate_up_proj` [experts, embed, 2 ffw].

    Raises:
        CheckpointError: of a pair one tensor is missing, or has another shape; by name.
    """
    faults: list[str] = []
    for name in sorted(checkpoint.names()):
        for one, other in ((_GATE, _UP), (_UP, _GATE)):
            if one in name:
                partner = name.replace(one, other)
                if partner not in checkpoint.names():
                    faults.append(f"{partner} is missing")
                elif checkpoint.shape(partner) != checkpoint.shape(name):
                    faults.append(f"{name} has another shape than {partner}")
                elif len(checkpoint.shape(name)) != (3 if name.endswith(".weight") else 2):
                    faults.append(f"{name} has {len(checkpoint.shape(name))} dimensions")
    if faults:
        raise CheckpointError(f"the experts do not fit together: {some_of(faults)}")
    return _Joined(checkpoint)


class _Joined:
    """See `checkpoint.Checkpoint`."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.hf_config: dict[str, Any] = inner.hf_config
        self.generation_config: dict[str, Any] = inner.generation_config
        self.native_dtype: NativeDtype = inner.native_dtype
        self._sources: dict[str, tuple[str, ...]] = {}
        for name in inner.names():
            if _GATE in name:
                stem, kind = name.split(_GATE)
                joined = f"{stem}.experts.gate_up_proj" + ("" if kind == ".weight" else "_bias")
                self._sources[joined] = (name, name.replace(_GATE, _UP))
            elif _UP not in name:
                self._sources[_renamed(name)] = (name,)
        self.tensors = {name: self._seen(name) for name in self._sources}

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        parts = [self._inner.read_rows(source, start, stop) for source in self._sources[name]]
        if len(parts) == 2:
            joined = np.stack(parts, axis=2)
            rows = joined.reshape(joined.shape[0], -1, *joined.shape[3:])
        else:
            rows = parts[0]
        return rows.swapaxes(1, 2) if _is_turned(name, rows.ndim) else rows

    def release(self, name: str) -> None:
        for source in self._sources[name]:
            self._inner.release(source)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> "_Joined":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _seen(self, name: str) -> StoredTensor:
        sources = self._sources[name]
        shape, dtype = self._inner.tensors[sources[0]]
        if len(sources) == 2:
            shape = (shape[0], 2 * shape[1], *shape[2:])
        if _is_turned(name, len(shape)):
            shape = (shape[0], shape[2], shape[1])
        return StoredTensor(shape, dtype)


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name.removesuffix(".weight") if name.removesuffix(".weight").endswith(_SINKS) else name


def _is_turned(name: str, ndim: int) -> bool:
    """Whether Hugging Face has inputs before outputs."""
    return ".experts." in name and ndim == 3
