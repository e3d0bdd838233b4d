"""Experts in 4 bits: their numbers by another library's types, and what is refused."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.loading.mxfp4 import dequantize
from jaxpaged.loading.sources import resolve
from tests.models.cases import VARIANT_CASES
from tests.tiny_model import Tensors, save_safetensors

CASE = next(case for case in VARIANT_CASES if case.name == "gptoss-mxfp4")
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def open_folder(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(ModelConfig(model=str(folder))))


def by_types(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """As ml_dtypes reads both."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32).astype(np.uint8)
    numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (numbers * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[..., None]).reshape(*scales.shape[:-1], -1)


def test_every_code_under_every_scale_in_use() -> None:
    """All bytes under each scale from 2^-120 to 2^120."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (241, 16, 16))
    scales = np.broadcast_to(np.arange(7, 248, dtype=np.uint8)[:, None], (241, 16)).copy()
    got = dequantize(blocks, scales)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, by_types(blocks, scales))
    np.testing.assert_array_equal(got, got.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_checkpoint_shows_its_experts_whole(tmp_path: Path) -> None:
    stored = CASE.write(tmp_path, **CASE.options)
    with open_folder(tmp_path) as checkpoint:
        assert not any(name.endswith(("_blocks", "_scales")) for name in checkpoint.names())
        assert checkpoint.native_dtype == "float32"
        expected = by_types(stored[f"{GATE_UP}_blocks"], stored[f"{GATE_UP}_scales"]).swapaxes(1, 2)
        assert checkpoint.shape(GATE_UP) == expected.shape == (5, 96, 128)
        np.testing.assert_array_equal(checkpoint.read(GATE_UP), expected)
        np.testing.assert_array_equal(checkpoint.read_rows(GATE_UP, 2, 4), expected[2:4])
        np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), stored["model.norm.weight"])
        checkpoint.release(GATE_UP)
        np.testing.assert_array_equal(checkpoint.read_rows(GATE_UP, 4, 5), expected[4:])


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: without(tensors, f"{GATE_UP}_scales"), f"{GATE_UP}_scales is missing"),
        (lambda tensors: without(tensors, f"{GATE_UP}_blocks"), f"{GATE_UP}_blocks is missing"),
        (lambda tensors: tensors | {f"{GATE_UP}_scales": tensors[f"{GATE_UP}_scales"][:, :-1]}, f"{GATE_UP}_blocks has shape"),
        (lambda tensors: tensors | {f"{GATE_UP}_blocks": tensors[f"{GATE_UP}_blocks"][..., :8]}, f"{GATE_UP}_blocks has shape"),
        (lambda tensors: tensors | {f"{GATE_UP}_scales": np.ones(tensors[f"{GATE_UP}_scales"].shape, np.float32)}, "should hold bytes"),
        (lambda tensors: tensors | {GATE_UP: np.ones((5, 96, 128), np.float32)}, f"{GATE_UP} is there twice"),
        (lambda tensors: tensors | {"model.norm.weight": np.ones(96, np.uint8)}, "model.norm.weight holds bytes"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_by_name(change: Any, complaint: str, tmp_path: Path) -> None:
    tensors = CASE.write(tmp_path, **CASE.options)
    save_safetensors(tmp_path / "model.safetensors", change(tensors))
    with pytest.raises(CheckpointError, match=complaint):
        open_folder(tmp_path)


@pytest.mark.parametrize("change", [{"architectures": ["LlamaForCausalLM"]}, {"quantization_config": {"quant_method": "gptq"}}])
def test_other_models_and_other_methods_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    CASE.write(tmp_path, **CASE.options)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModelError, match="quantized weights"):
        open_folder(tmp_path)


def test_bytes_are_refused_where_no_weights_are_in_four_bits(tmp_path: Path) -> None:
    CASE.write(tmp_path, **CASE.options)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"weights stored as F32, F16, BF16, F8_E4M3, F8_E5M2 are read, not .*_blocks \(U8\)"):
        open_folder(tmp_path)
