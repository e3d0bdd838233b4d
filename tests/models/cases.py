"""Checkpoints that the shared model suite runs on, made on the spot.

A new architecture adds one entry to `FAMILY_CASES`: everything in `test_every_model.py` then runs on it, and `scripts/make_golden_tiny.py`
makes its golden logits. `VARIANT_CASES` are the spellings and shapes of a family's checkpoints whose logits alone are compared. This module
imports neither jax nor torch: the tests and the golden script both read it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tests.tiny_families import write_tiny_family, write_tiny_qwen
from tests.tiny_model import Tensors, write_tiny_llama

GOLDEN = Path(__file__).parent.parent / "golden"


class Case(NamedTuple):
    """One checkpoint.

    Attributes:
        name: of the case, and key of its logits in the golden file.
        architecture: in config.json, and in the registry.
        write: writes the checkpoint to a folder and returns its tensors by name; `options` are its other arguments.
        options: what this checkpoint is; its vocabulary is `options["vocab_size"]`.
        positions: where golden logits are kept, ascending; the prompt ends with the last.
        buckets: token buckets of the shared suite: for single tokens, for chunks, for the whole prompt. A program for each that differs.
        runs: of a family, "always": the shared suite in every run; "logits": its logits in every run, the suite in the long tier; "long":
            all of it in the long tier. Of a variant: "always" or "long".
    """

    name: str
    architecture: str
    write: Callable[..., Tensors]
    options: Mapping[str, Any]
    positions: tuple[int, ...]
    buckets: tuple[int, int, int] = (128, 128, 128)
    runs: Literal["always", "logits", "long"] = "always"

    @property
    def token_ids(self) -> list[int]:
        """The prompt: ids drawn evenly, the same for all cases of one vocabulary."""
        return np.random.default_rng(11).integers(self.options["vocab_size"], size=self.positions[-1] + 1).tolist()

    @property
    def golden_path(self) -> Path:
        """The golden file: case name -> float32 logits [positions, vocab]."""
        return GOLDEN / f"{self.architecture.removesuffix('ForCausalLM').removesuffix('LMHeadModel').lower()}_logits.npz"


def golden_logits(case: Case) -> np.ndarray:
    """What Hugging Face transformers computes in float32: [positions, vocab]."""
    with np.load(case.golden_path) as file:
        return file[case.name]


_VOCAB = 131
_WINDOW = 23
_POSITIONS = (0, 1, 15, 16, _WINDOW - 1, _WINDOW, 64, 109)


def _family(architecture: str, config: Mapping[str, Any], name: str | None = None, **options: Any) -> Case:
    name = architecture.removesuffix("ForCausalLM").lower() if name is None else name
    options = {"architecture": architecture, "vocab_size": _VOCAB, "config": config, **options}
    return Case(name, architecture, write_tiny_family, options, _POSITIONS)


_LATE = {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1}
_GEMMA = {"hidden_size": 66, "head_dim": 14, "num_hidden_layers": 4, "sliding_window": _WINDOW, "tie_word_embeddings": True}
_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 13, "use_sliding_window": False}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 14,
    "sliding_window": _WINDOW,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "rope_theta": 1000.0,
    "max_position_embeddings": 256,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
_OF_GPT_OSS: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "sinks": True, "experts": "gpt_oss"}

# As wide as SmolLM2: at smaller widths the dots of all buckets round alike, which hides faults.
FAMILY_CASES = (
    Case(
        name="llama",
        architecture="LlamaForCausalLM",
        write=write_tiny_llama,
        options={
            "vocab_size": 384,
            "hidden": 576,
            "ffw": 768,
            "layers": 3,
            "heads": 9,
            "kv_heads": 3,
            "head_dim": 64,
            "theta": 100_000.0,
            "tie": False,
            "has_tokenizer": False,
        },
        positions=(0, 1, 15, 16, 64, 149),
        buckets=(2, 16, 256),
    ),
    _family("MistralForCausalLM", {"sliding_window": _WINDOW, "hidden_size": 66, "head_dim": 14, "rope_theta": 1e6}),
    _family(
        "MinistralForCausalLM",
        {"sliding_window": _WINDOW, "head_dim": 10, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    _family("Qwen2ForCausalLM", {"tie_word_embeddings": True, **_LATE}, qkv_bias=True),
    _family("Qwen3ForCausalLM", {"hidden_size": 66, "head_dim": 14}, qk_norm="head"),
    _family("Olmo2ForCausalLM", {}, qk_norm="rows", norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    _family(
        "Gemma2ForCausalLM",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
        norms=_FOUR_NORMS,
        norm_mean=0.0,
    ),
    _family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        norms=_FOUR_NORMS,
        norm_mean=0.0,
        qk_norm="head",
    ),
    # The prompt ends past the length trained for; 10 of 14 dimensions of a head are turned.
    _family(
        "Phi3ForCausalLM",
        {
            "sliding_window": 71,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
                "long_factor": [1.5, 2.0, 3.0, 5.0, 7.0],
            },
        },
        is_fused=True,
    ),
    _family(
        "MixtralForCausalLM",
        {"sliding_window": _WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 29},
        experts="mixtral",
    )._replace(runs="long"),
    # Shares are not made to add up to 1; a shared expert goes beside the chosen ones.
    _family(
        "Qwen2MoeForCausalLM",
        {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 17},
        qkv_bias=True,
        experts="qwen",
    )._replace(runs="logits"),
    _family(
        "Qwen3MoeForCausalLM",
        {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True, "hidden_size": 66, "head_dim": 14},
        qk_norm="head",
        experts="qwen",
    )._replace(runs="long"),
    # The limit clamps some of what its experts compute; positions go past the window and past the length before scaling.
    _family("GptOssForCausalLM", _GPT_OSS, **_OF_GPT_OSS),
    # Up to the length that it was trained for; what is behind, test_qwen.py compares with numpy.
    Case("qwen", "QWenLMHeadModel", write_tiny_qwen, {"vocab_size": _VOCAB}, _POSITIONS, runs="logits"),
    _family(
        "GraniteForCausalLM",
        {
            "hidden_size": 66,
            "head_dim": 14,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.7,
        },
        qkv_bias=True,
        out_bias=True,
    )._replace(runs="logits"),
    # Every second layer has no positions.
    _family("SmolLM3ForCausalLM", {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
)

_TINY = {"vocab_size": 128, "hidden": 64, "ffw": 96, "layers": 2, "context": 8192, "has_tokenizer": False}
_TINY |= {"theta": 100_000.0, "rope_style": "new"}
_SHORT = (0, 1, 16, 63)
_LONG = (1, 64, 1024, 4096)
ROPE_STYLES = ("old", "new", "both", "neither")


def _llama(name: str, positions: tuple[int, ...] = _SHORT, **options: Any) -> Case:
    return Case(name, "LlamaForCausalLM", write_tiny_llama, _TINY | options, positions)


def _rope(rope_type: str, numbers: Mapping[str, Any], **config: Any) -> Case:
    """128 tokens, of which the last are turned differently by every kind of rope."""
    config = {"rope_scaling": {"rope_type": rope_type, **numbers}, "head_dim": 14, "max_position_embeddings": 128, **config}
    return _family("LlamaForCausalLM", config, f"llama-{rope_type}")._replace(positions=(0, 1, 40, 63, 64, 100, 127))


VARIANT_CASES = (
    # The base of the rotary frequencies shows at long range only.
    *(_llama(f"llama-theta-{style}", _LONG, rope_style=style) for style in ROPE_STYLES),
    _llama("llama-tied", tie=True),
    # The config says tied, and the file has another head: transformers takes the head.
    _llama("llama-tied-with-head", tie=True, head_in_file=True),
    _llama("llama-untied", tie=False),
    # Without the key a Llama is untied.
    _llama("llama-tie-absent", tie=None, head_in_file=True),
    # Groups of 2 query heads per KV head are in all the others. Llama 2's configs name neither KV heads nor head_dim.
    _llama("llama-groups-of-1", kv_heads=4, config={"head_dim": None, "num_key_value_heads": None}),
    # All heads together need not be as wide as the residual stream.
    _llama("llama-groups-of-4", kv_heads=1, head_dim=8),
    _family("LlamaForCausalLM", {"attention_bias": True}, "llama-biases", qkv_bias=True, out_bias=True),
    _rope("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    _rope("yarn", {"factor": 4.0, "original_max_position_embeddings": 32}),
    # As for a text of twice the length trained for, which the prompt is.
    _rope("dynamic", {"factor": 2.0}, max_position_embeddings=64),
    _family(
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "model_type": "gemma3_text",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        "gemma3-by-kind",
        norms=_FOUR_NORMS,
        norm_mean=0.0,
        qk_norm="head",
    ),
    _family(
        "GptOssForCausalLM", {**_GPT_OSS, "hidden_size": 96, "intermediate_size": 64}, "gptoss-mxfp4", mxfp4=True, **_OF_GPT_OSS
    )._replace(runs="long"),
    _llama("llama-bfloat16", dtype="bfloat16"),
    _llama("llama-float16", dtype="float16"),
)
