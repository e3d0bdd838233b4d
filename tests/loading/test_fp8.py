"""Weights in 8-bit floats: each number times its own scale, in every layout of scales, and what is refused."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.convert_model import convert
from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.loading.progress import SilentProgress
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import convert_weights, describe_model
from tests.tiny_families import write_tiny_family
from tests.tiny_model import Tensors, save_safetensors, write_tiny_llama

pytestmark = pytest.mark.jax

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCK = (16, 24)
SIZES = {"hidden": 40, "ffw": 52, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "has_tokenizer": False}
"""No multiples of a block, and two tensors of different heights."""

BLOCK_WISE = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def scale_shape(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    blocks = (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
    return {"scalar": (), "one": (1,), "row": (shape[0],), "channel": (shape[0], 1), "block": blocks}[kind]


def times_scales(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Number by number, in float64, rounded once."""
    result = np.empty(stored.shape, np.float32)
    for (row, column), number in np.ndenumerate(stored.astype(np.float64)):
        if scales.size == 1:
            scale = scales.reshape(-1)[0]
        elif len(scales) == len(stored):
            scale = scales.reshape(-1)[row]
        else:
            scale = scales[row // BLOCK[0], column // BLOCK[1]]
        result[row, column] = np.float32(number * np.float64(scale))
    return result


def quantize(tensors: Tensors, kind: str, ending: str, scale_dtype: Any = np.float32, dtype: np.dtype = E4M3) -> tuple[Tensors, Tensors]:
    """Stored tensors, and what they stand for. Linear weights are in 8 bits, but for the head."""
    random = np.random.default_rng(3)
    stored, meant = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        if "_proj" not in name:
            stored[name] = meant[name] = tensor.astype(BFLOAT16)
            continue
        exponents = random.integers(-6, 3, size=scale_shape(kind, tensor.shape))
        mantissas = 1 if scale_dtype == ml_dtypes.float8_e8m0fnu else random.uniform(1, 2, size=exponents.shape)
        scales = np.asarray(mantissas * 2.0**exponents).astype(scale_dtype)
        stored[name], stored[name + ending] = tensor.astype(dtype), scales
        meant[name] = times_scales(stored[name], scales)
    return stored, meant


def write(folder: Path, stored: Tensors, quantization: Any) -> None:
    save_safetensors(folder / "model.safetensors", stored)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(resolve(ModelConfig(model=str(folder))))


CASES = {
    "deepseek": (BLOCK_WISE, "block", "_scale_inv", np.float32),
    "deepseek-bfloat16-scales": (BLOCK_WISE, "block", "_scale_inv", BFLOAT16),
    "powers-of-two": (BLOCK_WISE | {"scale_fmt": "ue8m0"}, "block", "_scale_inv", ml_dtypes.float8_e8m0fnu),
    "scalar": (STATIC, "scalar", "_scale", np.float32),
    "rows": (STATIC, "row", "_scale", np.float32),
    "compressed-tensor": (compressed("tensor"), "one", "_scale", BFLOAT16),
    "compressed-channel": (compressed("channel"), "channel", "_scale", BFLOAT16),
    "compressed-block": (compressed("block", block_structure=list(BLOCK)), "block", "_scale", np.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_each_number_is_multiplied_by_its_scale(name: str, tmp_path: Path) -> None:
    quantization, kind, ending, scale_dtype = CASES[name]
    stored, meant = quantize(write_tiny_llama(tmp_path, **SIZES), kind, ending, scale_dtype)
    # Of activations; none of it changes a weight.
    stored["model.layers.0.self_attn.q_proj.input_scale"] = np.ones((), np.float32)
    stored["model.layers.0.self_attn.k_scale"] = np.ones((1,), np.float32)
    write(tmp_path, stored, quantization)
    with opened(tmp_path) as checkpoint:
        assert checkpoint.names() == meant.keys()
        assert checkpoint.native_dtype == "bfloat16"
        for tensor, expected in meant.items():
            assert (checkpoint.shape(tensor), checkpoint.dtype(tensor)) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(checkpoint.read(tensor), expected, tensor)
            np.testing.assert_array_equal(checkpoint.read_rows(tensor, 3, 22), expected[3:22], tensor)
            checkpoint.release(tensor)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_without_scales_they_are_numbers_as_they_are(dtype: np.dtype, tmp_path: Path) -> None:
    tensors = write_tiny_llama(tmp_path, **SIZES)
    write(tmp_path, {name: tensor.astype(dtype) for name, tensor in tensors.items()}, None)
    with opened(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), tensor.astype(dtype).astype(np.float32))
        described = describe_model(ModelConfig(model=str(tmp_path)), checkpoint, is_gpu=False)
    assert described.facts.dtype_name == "bfloat16"


def weights(folder: Path) -> dict[str, np.ndarray]:
    with opened(folder) as checkpoint:
        return convert_weights(checkpoint, describe_model(ModelConfig(model=str(folder)), checkpoint, is_gpu=False))


def check_loaded(folder: Path, tensors: Tensors) -> None:
    """The model in `folder`, its weights in 8 bits, is that of the dequantized weights to the bit; a converted one is too."""
    stored, meant = quantize(tensors, "block", "_scale_inv")
    write(folder, {name: tensor.astype(BFLOAT16) for name, tensor in meant.items()}, None)
    expected = weights(folder)
    write(folder, stored, BLOCK_WISE)
    config = ModelConfig(model=str(folder))
    convert(config, resolve(config), folder / "converted", SilentProgress())
    for loaded in (weights(folder), weights(folder / "converted")):
        assert loaded.keys() == expected.keys()
        for path, array in expected.items():
            assert array.dtype == loaded[path].dtype == BFLOAT16
            assert array.tobytes() == loaded[path].tobytes(), path


def test_a_mixture_of_experts_is_loaded(tmp_path: Path) -> None:
    config = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 26, "model_type": "qwen3_moe", "head_dim": 14}
    options = {"config": config, "qk_norm": "head", "experts": "qwen"}
    check_loaded(tmp_path, write_tiny_family(tmp_path, architecture="Qwen3MoeForCausalLM", vocab_size=131, **options))


def test_fused_projections_are_loaded(tmp_path: Path) -> None:
    """Blocks of the fused tensor, which need not begin where its parts do."""
    check_loaded(tmp_path, write_tiny_family(tmp_path, architecture="Phi3ForCausalLM", vocab_size=131, config={}, is_fused=True))


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({f"{Q}_scale_inv": None}, f"{Q}_scale_inv or {Q}_scale is missing"),
        ({f"{Q}_scale": np.ones((), np.float32)}, f"{Q}_scale_inv and {Q}_scale are both there"),
        ({f"{Q}_scale_inv": np.ones((3, 1), np.float32)}, rf"{Q}_scale_inv has shape \[3, 1\] beside a weight of shape \[40, 40\]"),
        ({Q: np.ones((40, 40), BFLOAT16)}, f"{Q}_scale_inv has no weight in 8-bit floats beside it"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(change: Tensors, complaint: str, tmp_path: Path) -> None:
    stored, _ = quantize(write_tiny_llama(tmp_path, **SIZES), "block", "_scale_inv")
    write(tmp_path, {name: tensor for name, tensor in (stored | change).items() if tensor is not None}, BLOCK_WISE)
    with pytest.raises(CheckpointError, match=complaint):
        opened(tmp_path)


def test_scales_are_no_part_of_a_model_that_does_not_name_them(tmp_path: Path) -> None:
    stored, _ = quantize(write_tiny_llama(tmp_path, **SIZES), "block", "_scale_inv")
    write(tmp_path, stored, None)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv is not part of this model"):
        weights(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt"),
        ("int4", "int4"),
        (compressed("group"), "compressed-tensors with weights of group float 8"),
        (compressed("channel", num_bits=4), "compressed-tensors with weights of channel float 4"),
        (compressed("channel", type="int"), "compressed-tensors with weights of channel int 8"),
        (compressed("channel") | {"format": "pack-quantized"}, "compressed-tensors with the format pack-quantized"),
        (compressed("channel") | {"config_groups": []}, "compressed-tensors with the format"),
        (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
        (compressed("channel") | {"transform_config": {"groups": {}}}, "a transform_config"),
    ],
)
def test_other_methods_are_refused_by_name(quantization: Any, complaint: str, tmp_path: Path) -> None:
    write(tmp_path, write_tiny_llama(tmp_path, **SIZES), quantization)
    with pytest.raises(UnsupportedModelError, match=complaint):
        opened(tmp_path)


@pytest.mark.parametrize("block", [[16], [0, 16], "16x16", [16, True]])
def test_blocks_that_make_no_sense_are_named(block: Any, tmp_path: Path) -> None:
    write(tmp_path, write_tiny_llama(tmp_path, **SIZES), BLOCK_WISE | {"weight_block_size": block})
    with pytest.raises(CheckpointError, match="weight_block_size should be two positive integers"):
        opened(tmp_path)
