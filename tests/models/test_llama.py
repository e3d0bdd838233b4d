"""Llama checkpoints: who is tied, where the rotary base stands, what is refused, and GGUF files of the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from tests.models.cases import ROPE_STYLES, VARIANT_CASES, Case, golden_logits
from tests.models.paged_model import PagedModel, load
from tests.tiny_model import save_safetensors, write_tiny_gguf, write_tiny_llama

pytestmark = pytest.mark.jax

TIED = next(case for case in VARIANT_CASES if case.name == "llama-tied")
SIZES = {"vocab_size": 128, "hidden": 64, "ffw": 96, "layers": 2}


def logits_of(path: Path, case: Case) -> np.ndarray:
    """Logits at the case's positions, in the programs that `test_every_model.py` compiled."""
    model = PagedModel(load(path), context=max(case.positions[-1] + 1 for case in VARIANT_CASES))
    return model.feed_all(model.start(case.token_ids), chunk=128, bucket=128)[list(case.positions)]


def test_o52_a_rotary_base_read_from_the_wrong_place_would_show() -> None:
    """The golden logits of the four spellings: three agree, and the default base differs by far more than tests allow, most far out."""
    old, new, both, neither = (golden_logits(next(case for case in VARIANT_CASES if case.name == f"llama-theta-{s}")) for s in ROPE_STYLES)
    np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(old, both)
    assert np.all(np.abs(old - neither).max(axis=1)[1:] > 0.1)


@pytest.mark.parametrize("options", [{"tie": False, "head_in_file": False}, {"tie": None, "head_in_file": False}], ids=["untied", "absent"])
def test_o49_an_untied_model_without_a_head_is_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, **SIZES, **options, has_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(tmp_path)


def test_o49_a_tied_model_with_its_embedding_as_head_is_tied(tmp_path: Path) -> None:
    tensors = TIED.write(tmp_path, **TIED.options)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_safetensors(tmp_path / "model.safetensors", tensors)
    assert load(tmp_path).config.is_tied
    np.testing.assert_allclose(logits_of(tmp_path, TIED), golden_logits(TIED), atol=1e-4)


def test_o49_a_tied_model_with_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = TIED.write(tmp_path, **TIED.options)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1]
    save_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[127, 64\]"):
        load(tmp_path)


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, **SIZES, rope_scaling={"rope_type": "spiral", "factor": 2.0}, has_tokenizer=False)
    with pytest.raises(UnsupportedModelError, match="spiral"):
        load(tmp_path)


@pytest.mark.parametrize(("stored", "kept"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_dtype_auto_on_a_cpu(stored: str, kept: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, **SIZES, dtype=stored, has_tokenizer=False)  # type: ignore[arg-type]
    loaded = load(tmp_path, "auto")
    assert str(loaded.config.dtype) == kept
    assert {str(leaf.dtype) for leaf in loaded.params} == {kept}


@pytest.mark.parametrize("extra", [{}, {"rope_freqs": np.ones(8)}], ids=["plain", "rope_freqs"])
def test_o54_a_gguf_file_gives_the_logits_of_the_folder(extra: dict[str, Any], tmp_path: Path) -> None:
    """Its q and k rows are interleaved; put back wrongly, they would be other heads."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, **SIZES, theta=TIED.options["theta"], context=TIED.options["context"], has_tokenizer=False, **extra)
    np.testing.assert_allclose(logits_of(path, TIED), golden_logits(TIED), atol=1e-4)


def test_o54_a_quantized_gguf_file_gives_the_logits_of_its_dequantized_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    truth = write_tiny_gguf(
        path, **SIZES, theta=TIED.options["theta"], context=TIED.options["context"], weight_type="Q4_1", has_tokenizer=False
    )
    folder = tmp_path / "dequantized"
    written = TIED.write(folder, **TIED.options)
    assert written.keys() == truth.keys()
    save_safetensors(folder / "model.safetensors", truth)
    quantized = logits_of(path, TIED)
    np.testing.assert_allclose(quantized, logits_of(folder, TIED), atol=1e-6)
    assert np.abs(quantized - golden_logits(TIED)).max() > 0.05
