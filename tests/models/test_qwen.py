"""Qwen 1 behind the length that it was trained for, against float64 in numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.models.qwen import ntk_alpha
from tests.models import numpy_llama
from tests.models.paged_model import PagedModel, load
from tests.tiny_families import qwen2_config, tiny_tensors, write_tiny_qwen
from tests.tiny_model import save_safetensors

pytestmark = pytest.mark.jax

VOCAB = 131
ATOL = 1e-4
LONG = {"seq_length": 32, "max_position_embeddings": 128}


def no_biases(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Writes the model with biases of 0, which the Llama in numpy does not have; returns its tensors by Llama's names."""
    tensors = write_tiny_qwen(folder, vocab_size=VOCAB, config=config)
    biased = {name: tensor * 0 if name.endswith("bias") else tensor for name, tensor in tensors.items()}
    save_safetensors(folder / "model.safetensors", biased)
    of_qwen2 = tiny_tensors(qwen2_config(json.loads((folder / "config.json").read_text())), qkv_bias=True)
    return {name: tensor for name, tensor in of_qwen2.items() if not name.endswith("bias")}


@pytest.mark.parametrize(
    ("config", "max_model_len", "alpha", "log_n"),
    [({}, "auto", 7, True), ({"use_logn_attn": False}, 40, 3, False)],
    ids=["both", "ntk alone, for a shorter text"],
)
def test_long_texts_turn_by_another_base_and_queries_grow(
    config: dict[str, Any], max_model_len: Any, alpha: int, log_n: bool, tmp_path: Path
) -> None:
    tensors = no_biases(tmp_path, LONG | config)
    loaded = load(tmp_path, max_model_len=max_model_len)
    token_ids = np.random.default_rng(5).integers(VOCAB, size=40 if max_model_len == 40 else 128).tolist()
    model = PagedModel(loaded, context=128)
    logits = model.feed_all(model.start(token_ids), chunk=64, bucket=64)
    sizes = {"windows": (None,) * 3, "heads": 6, "kv_heads": 6, "head_dim": 14, "eps": 1e-6}
    theta = 10_000.0 * alpha ** (14 / 12)
    expected = numpy_llama.logits(tensors, token_ids, **sizes, theta=theta, log_n_from=32 if log_n else None)
    assert np.abs(logits - expected).max() < ATOL
    plain = numpy_llama.logits(tensors, token_ids, **sizes, theta=10_000.0)
    assert np.abs(plain - expected)[33:].max() > 0.01


@pytest.mark.parametrize(("length", "alpha"), [(1, 1), (2048, 1), (2049, 3), (4096, 3), (4097, 7), (8192, 7), (32_768, 31)])
def test_alpha_is_that_of_the_models_own_code(length: int, alpha: int) -> None:
    assert ntk_alpha(length, 2048) == alpha


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        ({"no_bias": False}, UnsupportedModelError, "no_bias False is not supported"),
        ({"rotary_pct": 0.5}, UnsupportedModelError, "rotary_pct 0.5 is not supported"),
        ({"intermediate_size": 53}, UnsupportedModelError, "intermediate_size 53 is odd"),
        ({"seq_length": 0}, CheckpointError, "seq_length should be a positive integer"),
        ({"use_logn_attn": 1}, CheckpointError, "use_logn_attn should be true or false"),
        ({"kv_channels": 15}, CheckpointError, "head_dim 15 is odd"),
    ],
)
def test_what_is_not_run_is_refused_by_name(change: dict[str, Any], error: type[Exception], complaint: str, tmp_path: Path) -> None:
    write_tiny_qwen(tmp_path, vocab_size=VOCAB)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=complaint):
        load(tmp_path)
