"""Models whose weights have a scale a group: their logits against the same numbers in float32 modules, and what is refused."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import ConfigError, UnsupportedModelError
from jaxpaged.layers import linear
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import describe_model
from jaxpaged.step_program import LoadedModel
from pallas_kernels.quantized_matmul import Q4Weights, Q8Weights
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.reference import dequantize
from tests.models.paged_model import PagedModel, load
from tests.tiny_model import write_tiny_gguf, write_tiny_llama

pytestmark = pytest.mark.jax
BUCKET = 128
IDS = np.random.default_rng(11).integers(330, size=100).tolist()


def by_path(model: LoadedModel) -> dict[str, np.ndarray]:
    return dict(zip(model.structure().expected, map(np.asarray, model.params), strict=True))


def dequantized(quantized: LoadedModel, whole: LoadedModel) -> LoadedModel:
    """The float model with the numbers that the quantized one stands for."""
    found = by_path(quantized)
    params = []
    for path, own in by_path(whole).items():
        stem = path.removesuffix(".weight")
        if f"{stem}.scales" not in found:
            params.append(own)
            continue
        parts = [found[stem + part] for part in (".weight", ".scales", ".minima") if stem + part in found]
        kind = Q8Weights if len(parts) == 2 else Q4Weights
        layers = [kind(*own_parts) for own_parts in zip(*parts, strict=True)] if own.ndim == 3 else [kind(*parts)]
        params.append(np.stack([np.asarray(dequantize(layer)) for layer in layers])[:, : own.shape[-2]].reshape(own.shape))
    return LoadedModel(whole.facts, whole.structure, tuple(map(jnp.asarray, params)))


def logits_of(model: LoadedModel, texts: list[list[int]], bucket: int = BUCKET) -> list[np.ndarray]:
    paged = PagedModel(model, context=BUCKET, num_pages=64)
    return paged.feed([(paged.start(text), len(text)) for text in texts], bucket)


@pytest.mark.parametrize("embedding_type", ["Q8_0", pytest.param("Q4_1", marks=pytest.mark.tier("long", area="models"))])
def test_logits_are_those_of_float_modules_with_the_same_numbers(
    embedding_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear map, the embedding and the tied head, in float32 modules whose rows are rounded and back on the way."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, weight_type="Q4_1", embedding_type=embedding_type, vocab_size=330, heads=8, kv_heads=4, head_dim=12)
    quantized, whole = load(path, quantization="int4"), load(path)
    same = dequantized(quantized, whole)
    for own, meant in zip(whole.params, same.params, strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(meant))
    texts = [IDS[:17], IDS[3:40], IDS[20:21]]
    together = logits_of(quantized, texts)
    for text, got in zip(texts[:1], together[:1], strict=True):
        (alone,) = logits_of(quantized, [text])
        np.testing.assert_array_equal(alone, got)
    exact_matmul = linear.dense_matmul

    def matmul(x: jnp.ndarray, *weight: jnp.ndarray, **layer: jnp.ndarray) -> jnp.ndarray:
        high, low, scales = quantize_rows(x)
        return exact_matmul((high * 128.0 + low) * scales[:, None], *weight, **layer)

    monkeypatch.setattr(linear, "dense_matmul", matmul)
    for got, expected in zip(together, logits_of(same, texts), strict=True):
        # Float32 rounding, and where it tips a number over to its neighbour, a step of 1/16256 of the row's peak and what follows of it.
        error = np.abs(got - expected).max(axis=1) / np.abs(expected).max(axis=1)
        assert error.max() < 1e-3


@pytest.mark.tier("long", area="models")
def test_bfloat16_activations(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, weight_type="Q4_0", embedding_type="Q8_0", vocab_size=330)
    model = load(path, "bfloat16", quantization="int4")
    assert {str(leaf.dtype) for leaf in model.params} == {"bfloat16", "int8", "uint8", "float16"}
    narrow, wide = (logits_of(each, [IDS])[0] for each in (model, load(path, quantization="int4")))
    # Eight bits of every intermediate result: some percent of the spread of the logits, as without quantization.
    assert (narrow - wide).std() < 0.1 * wide.std()


def test_inputs_that_are_no_whole_groups_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, ffw=72)
    config = ModelConfig(model=str(tmp_path), quantization="int4")
    with (
        open_checkpoint(resolve(config)) as checkpoint,
        pytest.raises(UnsupportedModelError, match=r"a group of 32 inputs, and layers.mlp.down takes 72"),
    ):
        describe_model(config, checkpoint, is_gpu=False)


def test_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    config = ModelConfig(model=str(tmp_path), quantization="int4")
    with open_checkpoint(resolve(config)) as checkpoint, pytest.raises(ConfigError, match=r"'int4' is served on CPU alone"):
        describe_model(config, checkpoint, is_gpu=True)
