"""What transformers takes for keys that a config.json leaves out, architecture by architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

HfConfig = dict[str, Any]

WindowRule = Literal["none", "all", "late", "without rope", "alternating", "five of six"]
"""Which layers have a sliding window when `layer_types` does not say it; see `loading.layer_windows`."""

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
)

_GEMMA: Mapping[str, Any] = MappingProxyType(
    {
        **_DEFAULTS,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    }
)

_GEMMA_POSITIVES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")

_QWEN_MIXTURE: Mapping[str, Any] = MappingProxyType({**_DEFAULTS, "max_position_embeddings": 32_768, "norm_topk_prob": False})


class HfArchitecture(NamedTuple):
    """One architecture of transformers.

    Attributes:
        model_type: of its configs.
        defaults: values of keys that are left out or null.
        absent: values of keys that are left out, where null has a meaning of its own.
        renamed: its words for keys -> ours.
        positives: keys of its own that are positive numbers, or null.
        window_rule: which layers are windowed.
        has_layer_types: whether a list `layer_types` goes before the rule.
        default_window: `sliding_window` when the key is left out; a null there means none.
        rope_theta: base of the rotary frequencies when none is named.
        rope_scaling: of the rotary frequencies when nothing is said of them.
        local_rope_theta: of the windowed layers, where those have a base of their own.
        partial_rotary: whether a part of each head may be turned.
        is_mixture: whether its feed-forward blocks are mixtures of experts; see `loading.mixture_config`.
        may_be_mxfp4: whether experts may be stored in 4 bits; see `loading.mxfp4`.
        is_fused: whether q, k and v lie in one tensor of its checkpoints, and gate and up in one.
        rope_aliases: other names of rope types.
    """

    model_type: str
    defaults: Mapping[str, Any]
    absent: Mapping[str, Any] = MappingProxyType({})
    renamed: Mapping[str, str] = MappingProxyType({})
    positives: tuple[str, ...] = ()
    window_rule: WindowRule = "none"
    has_layer_types: bool = False
    default_window: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = MappingProxyType({})
    local_rope_theta: float | None = None
    partial_rotary: bool = False
    is_mixture: bool = False
    may_be_mxfp4: bool = False
    is_fused: bool = False
    rope_aliases: Mapping[str, str] = MappingProxyType({})


HF_ARCHITECTURES: Mapping[str, HfArchitecture] = MappingProxyType(
    {
        "LlamaForCausalLM": HfArchitecture("llama", {**_DEFAULTS, "max_position_embeddings": 2048}),
        "MistralForCausalLM": HfArchitecture(
            "mistral", {**_DEFAULTS, "max_position_embeddings": 131_072}, window_rule="all", default_window=4096
        ),
        "MinistralForCausalLM": HfArchitecture(
            "ministral",
            {**_DEFAULTS, "max_position_embeddings": 131_072},
            window_rule="all",
            has_layer_types=True,
            default_window=4096,
        ),
        "Qwen2ForCausalLM": HfArchitecture(
            "qwen2", {**_DEFAULTS, "max_position_embeddings": 32_768}, window_rule="late", has_layer_types=True, default_window=4096
        ),
        "Qwen3ForCausalLM": HfArchitecture(
            "qwen3",
            {**_DEFAULTS, "max_position_embeddings": 32_768, "head_dim": 128},
            window_rule="late",
            has_layer_types=True,
            default_window=4096,
        ),
        "MixtralForCausalLM": HfArchitecture(
            "mixtral",
            {
                **_DEFAULTS,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            window_rule="all",
            rope_theta=1_000_000.0,
            is_mixture=True,
        ),
        "Qwen2MoeForCausalLM": HfArchitecture(
            "qwen2_moe",
            {
                **_QWEN_MIXTURE,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
            },
            is_mixture=True,
        ),
        "Qwen3MoeForCausalLM": HfArchitecture(
            "qwen3_moe",
            {**_QWEN_MIXTURE, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            is_mixture=True,
        ),
        "GptOssForCausalLM": HfArchitecture(
            "gpt_oss",
            {
                **_DEFAULTS,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-5,
                "head_dim": 64,
                "attention_bias": True,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
            },
            positives=("swiglu_limit", "swiglu_alpha"),
            window_rule="alternating",
            has_layer_types=True,
            default_window=128,
            rope_theta=150_000.0,
            rope_scaling=MappingProxyType(
                {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                }
            ),
            is_mixture=True,
            may_be_mxfp4=True,
        ),
        "SmolLM3ForCausalLM": HfArchitecture(
            "smollm3",
            {**_DEFAULTS, "max_position_embeddings": 32_768, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
            window_rule="without rope",
            has_layer_types=True,
            rope_theta=2_000_000.0,
        ),
        "Olmo2ForCausalLM": HfArchitecture("olmo2", {**_DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
        "Gemma2ForCausalLM": HfArchitecture(
            "gemma2",
            {**_GEMMA, "max_position_embeddings": 8192},
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            positives=_GEMMA_POSITIVES,
            window_rule="alternating",
            has_layer_types=True,
            default_window=4096,
        ),
        "Gemma3ForCausalLM": HfArchitecture(
            "gemma3_text",
            {**_GEMMA, "max_position_embeddings": 131_072},
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            positives=_GEMMA_POSITIVES,
            window_rule="five of six",
            has_layer_types=True,
            default_window=4096,
            rope_theta=1_000_000.0,
            local_rope_theta=10_000.0,
        ),
        "GraniteForCausalLM": HfArchitecture(
            "granite",
            {
                **_DEFAULTS,
                "max_position_embeddings": 2048,
                "embedding_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
            positives=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        ),
        "BertModel": HfArchitecture(
            "bert",
            {
                **_DEFAULTS,
                "max_position_embeddings": 512,
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-12,
                "type_vocab_size": 2,
                "tie_word_embeddings": True,
            },
        ),
        "QWenLMHeadModel": HfArchitecture(
            "qwen",
            {
                **_DEFAULTS,
                "max_position_embeddings": 8192,
                "seq_length": 2048,
                "use_dynamic_ntk": True,
                "use_logn_attn": True,
            },
            renamed=MappingProxyType({"layer_norm_epsilon": "rms_norm_eps", "kv_channels": "head_dim", "rotary_emb_base": "rope_theta"}),
            is_fused=True,
        ),
        "Phi3ForCausalLM": HfArchitecture(
            "phi3",
            {**_DEFAULTS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
            {"original_max_position_embeddings": 4096},
            window_rule="all",
            partial_rotary=True,
            is_fused=True,
            rope_aliases=MappingProxyType({"su": "longrope", "yarn": "longrope"}),
        ),
    }
)
"""Architecture -> how its configs are read. Whether it is run, the registry in `jaxpaged.models` says."""
