"""Models whose weights are int8: what is in them, and their logits against the same numbers in float32 modules."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxpaged.layers import linear
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.quantize_weights import quantize_weights
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import describe_model
from jaxpaged.step_program import LoadedModel
from pallas_kernels.quantized_matmul import Int8Weights
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from tests.models.cases import FAMILY_CASES, VARIANT_CASES, Case
from tests.models.paged_model import PagedModel, load

pytestmark = pytest.mark.jax

CASES = {case.name: case for case in (*FAMILY_CASES, *VARIANT_CASES)}
BUCKET = 128


def written(name: str, folder: Path) -> tuple[Case, Path]:
    case = CASES[name]
    case.write(folder / name, **case.options)
    return case, folder / name


def by_path(model: LoadedModel) -> dict[str, np.ndarray]:
    return dict(zip(model.structure().expected, map(np.asarray, model.params), strict=True))


def dequantized(quantized: LoadedModel, whole: LoadedModel) -> LoadedModel:
    """The float model with the numbers that the quantized one stands for."""
    found = by_path(quantized)
    params = []
    for path, own in by_path(whole).items():
        scales = found.get(path.replace(".weight", ".scales")) if path.endswith(".weight") else None
        params.append(own if scales is None else (found[path] * scales[..., None]).astype(own.dtype))
    return LoadedModel(whole.facts, whole.structure, tuple(map(jnp.asarray, params)))


def logits_of(model: LoadedModel, texts: list[list[int]], bucket: int = BUCKET) -> list[np.ndarray]:
    paged = PagedModel(model, context=BUCKET, num_pages=64)
    return paged.feed([(paged.start(text), len(text)) for text in texts], bucket)


@pytest.mark.parametrize("name", ["llama-untied", "gemma3"])
def test_weights_are_int8_with_a_scale_an_output_channel(name: str, tmp_path: Path) -> None:
    _, folder = written(name, tmp_path)
    found, whole = by_path(load(folder, quantization="int8")), by_path(load(folder))
    matrices = [path for path in whole if not path.endswith(("norm.weight", ".bias"))]
    assert sorted(path for path, array in found.items() if array.dtype == np.int8) == sorted(matrices)
    for path in matrices:
        scales = found[path.replace(".weight", ".scales")]
        assert (np.abs(found[path] * scales[..., None] - whole[path]) <= 0.5001 * scales[..., None]).all()
    for path in whole.keys() - set(matrices):
        np.testing.assert_array_equal(found[path], whole[path])


@pytest.mark.parametrize("name", ["llama-untied", pytest.param("gemma3", marks=pytest.mark.tier("long", area="models"))])
def test_logits_are_those_of_float_modules_with_the_same_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear map, the embedding and the head, in float32 modules whose rows are rounded and back on the way."""
    case, folder = written(name, tmp_path)
    quantized, whole = load(folder, quantization="int8"), load(folder)
    (got,) = logits_of(quantized, [case.token_ids[:100]])
    exact_matmul = linear.dense_matmul

    def matmul(x: jnp.ndarray, *weight: jnp.ndarray, **layer: jnp.ndarray) -> jnp.ndarray:
        high, low, scales = quantize_rows(x)
        return exact_matmul((high * 128.0 + low) * scales[:, None], *weight, **layer)

    monkeypatch.setattr(linear, "dense_matmul", matmul)
    (expected,) = logits_of(dequantized(quantized, whole), [case.token_ids[:100]])
    # Float32 rounding, and where it tips a number over to its neighbour, a step of 1/16256 of the row's peak and what follows of it.
    error = np.abs(got - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() < 1e-3


def test_an_answer_is_the_same_alone_and_in_company(tmp_path: Path) -> None:
    """Integer sums are exact, so that what is beside a text, and in which bucket, changes no bit of linear maps."""
    case, folder = written("llama", tmp_path)
    model = load(folder, quantization="int8")
    ids = case.token_ids
    texts = [ids[:17], ids[3:40], ids[20:21]]
    together = logits_of(model, texts)
    for text, expected in zip(texts, together, strict=True):
        (alone,) = logits_of(model, [text])
        np.testing.assert_array_equal(alone, expected)


@pytest.mark.tier("long", area="models")
def test_bfloat16_activations(tmp_path: Path) -> None:
    case, folder = written("llama", tmp_path)
    model = load(folder, "bfloat16", quantization="int8")
    assert {str(leaf.dtype) for leaf in model.params} == {"bfloat16", "int8", "float32"}
    models = (model, load(folder, quantization="int8"), load(folder))
    narrow, wide, whole = (logits_of(each, [case.token_ids[:100]])[0] for each in models)
    # Eight bits of every intermediate result: some percent of the spread of the logits, as without quantization.
    assert (narrow - wide).std() < 0.1 * wide.std()
    assert (wide - whole).std() < 0.1 * whole.std()


@pytest.mark.parametrize(
    ("name", "quantization"), [("bert", "int8"), ("mixtral", "int8"), ("mixtral", "int4"), ("qwen3moe", "int8"), ("gptoss", "int4")]
)
def test_architectures_without_it_are_refused_by_name(name: str, quantization: str, tmp_path: Path) -> None:
    from jaxpaged.models import ARCHITECTURES

    names = {"bert": "BertModel", "mixtral": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM", "gptoss": "GptOssForCausalLM"}
    architecture = ARCHITECTURES[names[name]]
    _, folder = written("llama", tmp_path)
    config = ModelConfig(model=str(folder), quantization=quantization)
    with open_checkpoint(resolve(config)) as checkpoint:
        checkpoint.hf_config["architectures"] = [names[name]]
        with pytest.raises(UnsupportedModelError, match=f"quantization '{quantization}' is not served for") as raised:
            describe_model(config, checkpoint, is_gpu=False)
    assert architecture.models in str(raised.value)


def test_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    _, folder = written("llama", tmp_path)
    config = ModelConfig(model=str(folder), quantization="int8")
    with open_checkpoint(resolve(config)) as checkpoint, pytest.raises(ConfigError, match="on CPU alone"):
        describe_model(config, checkpoint, is_gpu=True)


def test_a_weight_that_is_no_number_is_named() -> None:
    shapes = {"a.scales": np.zeros(2, np.float32), "a.weight": np.zeros((2, 3), np.int8), "norm.weight": np.zeros(3, np.float32)}
    arrays = {"a.weight": np.array([[1, 2, 3], [4, np.nan, 6]], np.float32), "norm.weight": np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match="a: a weight is NaN or infinite"):
        quantize_weights(dict(arrays), shapes)
    arrays["a.weight"][1, 1] = 5
    made = quantize_weights(arrays, shapes)
    assert list(made) == list(shapes)
    assert arrays == {}
    np.testing.assert_array_equal(Int8Weights(made["a.weight"], made["a.scales"]).values[1], [85, 106, 127])
