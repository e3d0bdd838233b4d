"""What every model file looks like from outside: named tensors and a config, whatever the format."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxpaged.loading.hf_architectures import HF_ARCHITECTURES

if TYPE_CHECKING:
    from jaxpaged.loading.sources import ModelFiles

NativeDtype = Literal["float32", "bfloat16", "float16", "gguf"]


class StoredTensor(NamedTuple):
    """Shape and type of a tensor as `Checkpoint.read` gives it; a quantized one counts as float32."""

    shape: tuple[int, ...]
    dtype: np.dtype


@runtime_checkable
class Checkpoint(Protocol):
    """An open model file or folder. Names and layouts are Hugging Face's, projections apart; nothing is read before it is asked for.

    Attributes:
        hf_config: config.json in the settled form of `model_config.settle`; for a GGUF file built from its metadata.
        generation_config: generation_config.json; empty when there is none.
        native_dtype: the type that holds most of the weights; "gguf" for GGUF files, where it differs from tensor to tensor.
        tensors: what is in there, by name.
    """

    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    native_dtype: NativeDtype
    tensors: dict[str, StoredTensor]

    def names(self) -> set[str]:
        """Names of all tensors, as Hugging Face spells them (`model.layers.0.self_attn.q_proj.weight`)."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises KeyError for a name that is not in `names()`."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Type that `read` gives. Raises KeyError for a name that is not in `names()`."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One whole tensor, dequantized; read-only where it is still a part of the file."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis, as `read` gives them."""
        ...

    def release(self, name: str) -> None:
        """Gives back what memory the reading of a tensor took; the tensor can be read again."""
        ...

    def close(self) -> None:
        """Closes the files; arrays that were read stay valid."""
        ...

    def __enter__(self) -> "Checkpoint": ...

    def __exit__(self, *exception: object) -> None: ...


def open_checkpoint(files: "ModelFiles", *, load_format: str = "auto") -> Checkpoint:
    """Opens what `sources.resolve` found, and reads headers and configs; a fault in any of them shows here, before any weight is read.

    Args:
        load_format: that of `ModelConfig`; with "dummy", a folder's weights are not looked at.

    Raises:
        CheckpointError: a file is missing, cut or malformed; the message names it.
        UnsupportedModelError: an architecture, rope type, quantization or file format that is known and not run.
    """
    from jaxpaged.loading import fp8, mxfp4
    from jaxpaged.loading.quantization_config import fp8_scales, has_mxfp4
    from jaxpaged.loading.split_tensors import split_fused

    if load_format == "dummy" and files.kind == "folder":
        from jaxpaged.loading.dummy import DummyCheckpoint

        return DummyCheckpoint(files.path)
    if files.kind == "orbax":
        from jaxpaged.loading.orbax_checkpoint import OrbaxCheckpoint

        return OrbaxCheckpoint(files.path)
    checkpoint = _open(files)
    names = checkpoint.hf_config["architectures"]
    try:
        if has_mxfp4(checkpoint.hf_config):
            return mxfp4.dequantized(checkpoint)
        checkpoint = fp8.dequantized(checkpoint, fp8_scales(checkpoint.hf_config))
        if any(name in HF_ARCHITECTURES and HF_ARCHITECTURES[name].is_fused for name in names):
            return split_fused(checkpoint)
        return checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _open(files: "ModelFiles") -> Checkpoint:
    if files.kind == "gguf":
        from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
        from jaxpaged.loading.joined_experts import joined_experts

        gguf = GgufCheckpoint(files.path)
        try:
            return joined_experts(gguf) if gguf.has_joined_experts else gguf
        except BaseException:
            gguf.close()
            raise
    from jaxpaged.loading.safetensors_checkpoint import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)


def some_of(names: Iterable[object], *, most: int = 5) -> str:
    """`a, b, c, d, e and 7 more`: names for a message, however many there are."""
    listed = sorted(str(name) for name in names)
    rest = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")
