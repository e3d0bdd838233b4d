"""Checkpoints with fused projections: their parts, row by row, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.loading.sources import resolve
from tests.tiny_families import write_tiny_family
from tests.tiny_model import Tensors, save_safetensors

HEADS, KV_HEADS, HEAD_DIM, FFW = 6, 2, 14, 53


def write(folder: Path, **extra: np.ndarray) -> Tensors:
    tensors = write_tiny_family(folder, architecture="Phi3ForCausalLM", vocab_size=131, config={}, is_fused=True)
    tensors |= extra
    save_safetensors(folder / "model.safetensors", tensors)
    return tensors


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(ModelConfig(model=str(folder))))


def test_parts_are_blocks_of_rows(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = "model.layers.1."
    qkv, gate_up = tensors[layer + "self_attn.qkv_proj.weight"], tensors[layer + "mlp.gate_up_proj.weight"]
    parts = {
        "self_attn.q_proj": qkv[:queries],
        "self_attn.k_proj": qkv[queries : queries + keys],
        "self_attn.v_proj": qkv[queries + keys :],
        "mlp.gate_proj": gate_up[:FFW],
        "mlp.up_proj": gate_up[FFW:],
        "mlp.down_proj": tensors[layer + "mlp.down_proj.weight"],
    }
    with opened(tmp_path) as checkpoint:
        assert not any("qkv" in name or "gate_up" in name for name in checkpoint.names())
        assert checkpoint.native_dtype == "float32"
        for part, values in parts.items():
            name = f"{layer}{part}.weight"
            assert (checkpoint.shape(name), checkpoint.dtype(name)) == (values.shape, np.float32)
            np.testing.assert_array_equal(checkpoint.read(name), values)
            checkpoint.release(name)
            for start, stop in ((0, 1), (3, 11), (len(values) - 1, len(values)), (5, len(values) + 7)):
                np.testing.assert_array_equal(checkpoint.read_rows(name, start, stop), values[start:stop])


def test_fused_tensors_of_another_shape_are_refused_together_by_name(tmp_path: Path) -> None:
    strange = {f"model.layers.{layer}.self_attn.qkv_proj.weight": np.zeros((7, 84), np.float32) for layer in (0, 2)}
    write(tmp_path, **strange)
    with pytest.raises(CheckpointError) as refusal:
        opened(tmp_path)
    assert all(f"{name} has shape [7, 84] instead of 140 rows" in refusal.value.message for name in strange)


def test_a_projection_alone_and_fused_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    write(tmp_path, **{name: np.zeros((FFW, 84), np.float32)})
    with pytest.raises(CheckpointError, match=name):
        opened(tmp_path)
