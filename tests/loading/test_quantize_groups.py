"""`quantization: int4`: blocks of GGUF files are taken over bit by bit, everything else is quantized as the kernel's own functions do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import Checkpoint, open_checkpoint
from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint, deinterleave_rotary_rows, interleaved_rows
from jaxpaged.loading.quantize_groups import Groups, eight_bit_parameters
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import convert_weights, describe_model
from jaxpaged.models.llama import WEIGHTS
from pallas_kernels.quantized_matmul import Q4Weights, Q8Weights
from pallas_kernels.quantized_matmul.group_weights import TILE, quantize_q4, quantize_q8
from pallas_kernels.quantized_matmul.reference import dequantize
from tests.tiny_model import write_tiny_gguf, write_tiny_llama

pytestmark = pytest.mark.jax
SIZES: dict[str, Any] = {"vocab_size": 330, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 12, "hidden": 64, "ffw": 96}
"""24 rows of k and a vocabulary of 330: no whole tiles."""


def converted(path: Path, **options: Any) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Parameters as the model takes them, and which of them have eight bits."""
    config = ModelConfig(model=str(path), quantization="int4", dtype="bfloat16", **options)
    with open_checkpoint(resolve(config)) as checkpoint:
        described = describe_model(config, checkpoint, is_gpu=False)
        return convert_weights(checkpoint, described, num_threads=2), described.facts.eight_bit


def matrix(arrays: dict[str, np.ndarray], path: str, layer: int | None) -> Q4Weights | Q8Weights:
    parts = [arrays[path.replace(".weight", part)] for part in (".weight", ".scales", ".minima") if path.replace(".weight", part) in arrays]
    return (Q8Weights if len(parts) == 2 else Q4Weights)(*(part if layer is None else part[layer] for part in parts))


def matrices(names: set[str]) -> list[tuple[str, str, int | None]]:
    """(name in the file, parameter path, layer) of every quantized matrix of a Llama."""
    found = []
    for pattern, (path, axes) in WEIGHTS.items():
        if " " in axes.split("->")[0].strip() and path.endswith(".weight"):
            layers = (0, 1) if "{layer}" in pattern else (None,)
            found += [(pattern.replace("{layer}", str(layer)), path, layer) for layer in layers]
    return [each for each in found if each[0] in names]


@pytest.mark.parametrize(
    ("weight_type", "embedding_type", "tie"),
    [("Q4_0", "Q8_0", True), ("Q4_1", "F16", True), ("Q8_0", "Q4_1", False)],
)
def test_blocks_are_taken_over_bit_by_bit(weight_type: str, embedding_type: str, tie: bool, tmp_path: Path) -> None:
    truth = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=weight_type, embedding_type=embedding_type, tie=tie, **SIZES)
    arrays, eight_bit = converted(tmp_path / "tiny.gguf")
    found = matrices(set(truth))
    assert len(found) == 7 * 2 + (1 if tie else 2)
    for name, path, layer in found:
        own = matrix(arrays, path, layer)
        stored = embedding_type if path == "embedding.weight" else weight_type
        assert isinstance(own, Q8Weights) == (path in eight_bit) == (stored in ("Q8_0", "F16")), name
        got = np.asarray(dequantize(own))[: len(truth[name])]
        expected = truth[name]
        if stored == "F16":
            padded = np.pad(expected, ((0, -len(expected) % TILE), (0, 0)))
            expected = np.asarray(dequantize(quantize_q8(padded)))[: len(expected)]
        np.testing.assert_array_equal(got, expected, err_msg=name)
    for name in truth.keys() - {name for name, _, _ in found}:
        assert name.endswith("norm.weight")
    assert (np.asarray(arrays["norm.weight"], np.float32) == truth["model.norm.weight"].astype("bfloat16").astype(np.float32)).all()
    for array in arrays.values():
        assert array.ctypes.data % 64 == 0


def test_other_sources_are_quantized_from_what_the_file_holds(tmp_path: Path) -> None:
    """Not by way of `dtype`: four bits in maps, eight in embedding and head."""
    truth = write_tiny_llama(tmp_path, tie=False, **SIZES)
    arrays, eight_bit = converted(tmp_path)
    assert eight_bit == ("embedding.weight", "head.weight")
    for name, path, layer in matrices(set(truth)):
        padded = np.pad(np.asarray(truth[name], np.float32), ((0, -len(truth[name]) % TILE), (0, 0)))
        expected = quantize_q8(padded) if path in eight_bit else quantize_q4(padded)
        for got, part in zip(matrix(arrays, path, layer), expected, strict=True):
            np.testing.assert_array_equal(got, part, err_msg=name)


def test_random_weights_are_quantized_too(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, **SIZES)
    arrays, _ = converted(tmp_path, load_format="dummy")
    gate = np.asarray(dequantize(matrix(arrays, "layers.mlp.gate.weight", 1)))
    assert gate.shape == (96, 64)
    assert 0.8 < gate.std() * 8 < 1.2, "drawn for 64 inputs"


class _Typed:
    """A checkpoint that knows the types of its tensors and nothing else."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types

    def block_type(self, name: str) -> str | None:
        return self._types.get(name)

    def read_blocks(self, name: str, start: int, stop: int) -> np.ndarray:
        raise AssertionError


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({}, ("embedding.weight", "head.weight")),
        ({"model.embed_tokens.weight": "Q6_K", "lm_head.weight": "Q6_K"}, ("embedding.weight", "head.weight")),
        ({"model.embed_tokens.weight": "Q4_0", "lm_head.weight": "Q4_1"}, ()),
        ({"model.embed_tokens.weight": "Q4_0", "model.layers.1.mlp.down_proj.weight": "Q8_0"}, ("head.weight", "layers.mlp.down.weight")),
        ({"model.embed_tokens.weight": "Q4_1", "lm_head.weight": "F32", "model.layers.1.mlp.up_proj.weight": "Q6_K"}, ("head.weight",)),
    ],
)
def test_which_parameters_keep_eight_bits(types: dict[str, str], expected: tuple[str, ...]) -> None:
    checkpoint: Any = _Typed(types)
    assert eight_bit_parameters(checkpoint, WEIGHTS, 2) == expected


def test_a_map_with_eight_bits_in_one_layer_has_them_in_all(tmp_path: Path) -> None:
    """The other layers' tensors are quantized again, to eight bits."""
    truth = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1", embedding_type="Q8_0", **SIZES)
    with GgufCheckpoint(tmp_path / "tiny.gguf") as checkpoint:
        tensor = np.zeros((2, 6, 2, 512), np.int8), np.zeros((2, 6, 2, 16), np.float16)
        groups = Groups({"layers.mlp.gate.weight": tensor[0], "layers.mlp.gate.scales": tensor[1]})
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.gate_proj.weight"
            num_bytes = groups.from_checkpoint(checkpoint)["layers.mlp.gate.weight"](name, (layer,))
            assert num_bytes == 6 * 2 * (512 + 32)
            own = matrix(groups.arrays, "layers.mlp.gate.weight", layer)
            for got, part in zip(own, quantize_q8(truth[name]), strict=True):
                np.testing.assert_array_equal(got, part)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 12), (6, 64)])
def test_rows_are_found_where_llama_cpp_put_them(heads: int, head_dim: int) -> None:
    rows = np.arange(heads * head_dim)
    np.testing.assert_array_equal(rows[interleaved_rows(rows, head_dim)], deinterleave_rotary_rows(rows, heads))


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_a_weight_that_is_no_number_is_named(number: float, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="F32", **SIZES)
    with GgufCheckpoint(tmp_path / "tiny.gguf") as inner:
        spoiled: Any = _Spoiled(inner, number)
        groups = Groups({"x.weight": np.zeros((6, 2, 256), np.uint8), "x.scales": np.zeros((6, 2, 16)), "x.minima": np.zeros((6, 2, 16))})
        with pytest.raises(CheckpointError, match=r"gate_proj.weight: a weight is NaN or infinite.*cannot be quantized"):
            groups.from_checkpoint(spoiled)["x.weight"]("model.layers.1.mlp.gate_proj.weight", ())


class _Spoiled:
    def __init__(self, inner: Checkpoint, number: float) -> None:
        self._inner, self._number = inner, number

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows = self._inner.read_rows(name, start, stop).copy()
        rows[-1, -1] = self._number
        return rows


def test_blocks_with_a_scale_that_is_no_number_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, weight_type="Q4_1", embedding_type="Q8_0", **SIZES)
    with GgufCheckpoint(path) as checkpoint:
        start = checkpoint._tensors["model.layers.1.mlp.up_proj.weight"].start
    content = bytearray(path.read_bytes())
    content[start : start + 2] = b"\x00\x7e"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight: a weight is NaN or infinite"):
        converted(path)
