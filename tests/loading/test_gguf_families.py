"""GGUF files of each architecture against the same model as a folder: the same config and, number for number, the same parameters."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.loading.gguf_config import ARCHITECTURES
from tests.family_gguf import write_family_gguf
from tests.models.paged_model import load
from tests.tiny_families import write_tiny_family
from tests.tiny_model import Tensors

pytestmark = pytest.mark.jax


class GgufCase(NamedTuple):
    """One model. `metadata`: what its GGUF file says beside the sizes; `extra`: tensors it has beside the weights."""

    gguf_architecture: str
    architecture: str
    config: dict[str, Any]
    metadata: dict[str, Any]
    options: dict[str, Any]
    extra: Tensors = {}


FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
GEMMA = {"hidden_size": 66, "tie_word_embeddings": True, "sliding_window": 23}
OF_GEMMA: dict[str, Any] = {"norms": FOUR_NORMS, "norm_mean": 0.0}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4], [1.5, 2.0, 3.0, 5.0, 7.0]
PHI3_LONG = {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}

CASES = {
    "llama": GgufCase("llama", "LlamaForCausalLM", {"sliding_window": 23}, {}, {}),
    "mistral": GgufCase(
        "llama",
        "MistralForCausalLM",
        {"hidden_size": 66, "head_dim": 14, "sliding_window": 23, "rope_theta": 1e6},
        {"attention__sliding_window": 23, "rope__freq_base": 1e6},
        {},
    ),
    "qwen2": GgufCase(
        "qwen2",
        "Qwen2ForCausalLM",
        {
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
        {
            "rope__freq_base": 1e6,
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 128,
        },
        {"qkv_bias": True},
    ),
    "qwen3": GgufCase("qwen3", "Qwen3ForCausalLM", {"hidden_size": 66, "head_dim": 14}, {}, {"qk_norm": "head"}),
    "granite": GgufCase(
        "granite",
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.375, "logits_scaling": 2.5},
        {"embedding_scale": 3.0, "attention__scale": 0.25, "residual_scale": 0.375, "logit_scale": 2.5},
        {},
    ),
    "mixtral": GgufCase(
        "llama",
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {"expert_count": 5, "expert_used_count": 2, "rope__freq_base": 1e6},
        {"experts": "mixtral"},
    ),
    "qwen3moe": GgufCase(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {
            "model_type": "qwen3_moe",
            "hidden_size": 66,
            "head_dim": 14,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 13,
            "norm_topk_prob": True,
        },
        {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 13},
        {"experts": "qwen", "qk_norm": "head"},
    ),
    "qwen2moe": GgufCase(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        {
            "model_type": "qwen2_moe",
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 13,
            "shared_expert_intermediate_size": 17,
        },
        {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 13, "expert_shared_feed_forward_length": 17},
        {"qkv_bias": True, "experts": "qwen"},
    ),
    "gpt-oss": GgufCase(
        "gpt-oss",
        "GptOssForCausalLM",
        {
            "model_type": "gpt_oss",
            "head_dim": 14,
            "sliding_window": 23,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 64},
            "rope_theta": 150000.0,
        },
        {
            "attention__sliding_window": 23,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 53,
            "rope__freq_base": 150000.0,
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 8.0,
            "rope__scaling__original_context_length": 64,
        },
        {"qkv_bias": True, "out_bias": True, "sinks": True, "experts": "gpt_oss"},
    ),
    "phi3": GgufCase("phi3", "Phi3ForCausalLM", {"sliding_window": 23}, {"attention__sliding_window": 23}, {"is_fused": True}),
    "phi3-long": GgufCase(
        "phi3",
        "Phi3ForCausalLM",
        {**PHI3_LONG, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25}},
        {
            "attention__sliding_window": 0,
            "rope__dimension_count": 10,
            "rope__scaling__original_context_length": 64,
            "rope__scaling__attn_factor": 1.25,
        },
        {"is_fused": True},
        {"rope_factors_short.weight": np.asarray(SHORT, np.float32), "rope_factors_long.weight": np.asarray(LONG, np.float32)},
    ),
    "gemma2": GgufCase(
        "gemma2",
        "Gemma2ForCausalLM",
        {**GEMMA, "head_dim": 14, "query_pre_attn_scalar": 14},
        {"attention__sliding_window": 23, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        OF_GEMMA,
    ),
    "gemma3": GgufCase(
        "gemma3",
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "head_dim": 14,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 14,
            "num_hidden_layers": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "attention__sliding_window": 23,
            "rope__freq_base": 1e6,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 8.0,
        },
        {**OF_GEMMA, "qk_norm": "head"},
    ),
    # The widest Gemma 3 scales by the width of the residual stream; llama.cpp knows it by its 62 layers.
    "gemma3-27b": GgufCase(
        "gemma3",
        "Gemma3ForCausalLM",
        {**GEMMA, "head_dim": 14, "model_type": "gemma3_text", "query_pre_attn_scalar": 11, "num_hidden_layers": 62},
        {"attention__sliding_window": 23, "rope__freq_base": 1e6},
        {**OF_GEMMA, "qk_norm": "head"},
    ),
}


def write(case: GgufCase, folder: Path) -> Path:
    """Writes the folder, and the file beside it; returns the file."""
    tensors = write_tiny_family(folder, architecture=case.architecture, vocab_size=131, config=case.config, **case.options)
    path = folder / "tiny.gguf"
    hf_config = json.loads((folder / "config.json").read_text())
    write_family_gguf(path, case.gguf_architecture, tensors, hf_config, extra=case.extra, **case.metadata)
    return path


def test_every_architecture_has_a_case() -> None:
    assert {case.gguf_architecture for case in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model_in_the_folder(name: str, tmp_path: Path) -> None:
    path = write(CASES[name], tmp_path)
    ours, theirs = load(path), load(tmp_path)
    assert ours.config.norm_eps == pytest.approx(theirs.config.norm_eps)
    assert ours.config._replace(norm_eps=0.0) == theirs.config._replace(norm_eps=0.0)
    for one, other in zip(ours.params, theirs.params, strict=True):
        # A norm kept with 1 added comes back rounded.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7 if name.startswith("gemma") else 0)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("llama", {"qkv_bias": True}, "o_proj.bias is missing"),
        ("llama", {"qk_norm": "head"}, "is not part of this model"),
        ("qwen2", {}, "q_proj.bias is missing"),
        ("qwen3", {}, "q_norm.weight is missing"),
    ],
)
def test_tensors_of_another_architecture_are_refused_by_name(name: str, options: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    case = CASES[name]._replace(options=options)
    if "qk_norm" in options:
        case = case._replace(gguf_architecture="qwen3")
        path = write(case, tmp_path)
        path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwen2"))
    else:
        path = write(case, tmp_path)
    with pytest.raises(CheckpointError, match=complaint):
        load(path)


def test_factors_of_one_kind_alone_are_refused_by_name(tmp_path: Path) -> None:
    case = CASES["phi3-long"]
    short = {name: tensor for name, tensor in case.extra.items() if "short" in name}
    with pytest.raises(CheckpointError, match="long_factor of rope type 'longrope' should be a list of 5 positive numbers"):
        load(write(case._replace(extra=short), tmp_path))


def test_experts_that_are_not_together_are_refused_by_name(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    tensors = write_tiny_family(tmp_path, architecture=case.architecture, vocab_size=131, config=case.config, **case.options)
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    hf_config = json.loads((tmp_path / "config.json").read_text())
    flat = {f"blk.0.ffn_{part}_exps.weight": np.zeros((13, 66), np.float32) for part in ("gate", "up")}
    write_family_gguf(tmp_path / "tiny.gguf", "qwen3moe", others, hf_config, extra=flat, **case.metadata)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_(gate|up)_exps\.weight has 2 dimensions instead of 3"):
        load(tmp_path / "tiny.gguf")
