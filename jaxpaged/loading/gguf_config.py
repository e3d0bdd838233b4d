"""What a GGUF file's metadata says, in the words of Hugging Face's config.json."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.gguf_header import MetadataValue
from jaxpaged.loading.hf_architectures import HF_ARCHITECTURES, HfConfig
from jaxpaged.loading.model_config import settle

_Scalar = TypeVar("_Scalar", int, float, str)


class GgufArchitecture(NamedTuple):
    """How files of one `general.architecture` map to Hugging Face's.

    `are_rotary_rows_interleaved`: llama.cpp's converter stores the q and k rows of a Llama with the halves of each head interleaved
    (its rope turns neighbouring pairs); those of other architectures it leaves alone.
    `windowed_hf_architecture`: takes the other's place in a file that names a sliding window.
    `norm_offset`: what the converter adds to the weights of norms.
    `hf_keys`: further keys of the metadata -> of config.json; numbers.
    `layers_scaled_by_width`: the layers of the one model of a family whose scores are scaled by embed / heads, by which llama.cpp knows it;
    0: there is none.
    `mixture`: takes the architecture's place in a file that counts experts.
    `are_shares_renormalized`: whether the shares of a token's experts add up to 1, which files do not say.
    `has_joined_experts`: whether gate and up of the experts are one tensor in Hugging Face's files; see `loading.joined_experts`.
    `is_scaling_rounded`: whether yarn's borders are whole dimensions, which files do not say.
    """

    hf_architecture: str
    layer_names: Mapping[str, str]
    are_rotary_rows_interleaved: bool = False
    windowed_hf_architecture: str | None = None
    norm_offset: float = 0.0
    hf_keys: Mapping[str, str] = MappingProxyType({})
    layers_scaled_by_width: int = 0
    mixture: "GgufArchitecture | None" = None
    are_shares_renormalized: bool = True
    has_joined_experts: bool = False
    is_scaling_rounded: bool = True


NAMES: Mapping[str, str] = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
"""Of tensors outside layers, the same for all architectures."""

_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_QK_NORMS: Mapping[str, str] = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
_OUT_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_SOFT_CAPS: Mapping[str, str] = MappingProxyType(
    {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
)

_EXPERTS: Mapping[str, str] = MappingProxyType({"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"})
_SHARED: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    }
)


def _mixture_names(router: str, experts: str, names: Mapping[str, str]) -> Mapping[str, str]:
    """Names of a layer's tensors where experts take the place of the feed-forward block; `{expert}`: one tensor holds those of all."""
    dense = {name: hf_name for name, hf_name in _LAYER_NAMES.items() if not hf_name.startswith("mlp.")}
    return {**dense, "ffn_gate_inp": router, **{name: f"{experts}.{{expert}}.{hf_name}" for name, hf_name in names.items()}}


_MIXTRAL = GgufArchitecture(
    "MixtralForCausalLM",
    _mixture_names(
        "block_sparse_moe.gate", "block_sparse_moe.experts", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
    ),
    are_rotary_rows_interleaved=True,
)

LLAMA = GgufArchitecture(
    "LlamaForCausalLM",
    _LAYER_NAMES,
    are_rotary_rows_interleaved=True,
    windowed_hf_architecture="MistralForCausalLM",
    mixture=_MIXTRAL,
)

ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": GgufArchitecture("Qwen2ForCausalLM", _LAYER_NAMES),
        "gemma2": GgufArchitecture(
            "Gemma2ForCausalLM", {**_LAYER_NAMES, **_OUT_NORMS}, norm_offset=1.0, hf_keys=_SOFT_CAPS, layers_scaled_by_width=46
        ),
        "gemma3": GgufArchitecture(
            "Gemma3ForCausalLM",
            {**_LAYER_NAMES, **_QK_NORMS, **_OUT_NORMS},
            norm_offset=1.0,
            hf_keys=MappingProxyType({"rope.freq_base_swa": "rope_local_base_freq", "final_logit_softcapping": "final_logit_softcapping"}),
            layers_scaled_by_width=62,
        ),
        "phi3": GgufArchitecture(
            "Phi3ForCausalLM",
            {**_LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
        "qwen2moe": GgufArchitecture(
            "Qwen2MoeForCausalLM", {**_mixture_names("mlp.gate", "mlp.experts", _EXPERTS), **_SHARED}, are_shares_renormalized=False
        ),
        "gpt-oss": GgufArchitecture(
            "GptOssForCausalLM",
            {
                **{name: hf_name for name, hf_name in _LAYER_NAMES.items() if name.startswith("attn")},
                "attn_sinks": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
                **{name: f"mlp.experts.{hf_name}" for name, hf_name in _EXPERTS.items()},
            },
            has_joined_experts=True,
            is_scaling_rounded=False,
        ),
        "granite": GgufArchitecture(
            "GraniteForCausalLM",
            _LAYER_NAMES,
            are_rotary_rows_interleaved=True,
            hf_keys=MappingProxyType(
                {
                    "embedding_scale": "embedding_multiplier",
                    "attention.scale": "attention_multiplier",
                    "residual_scale": "residual_multiplier",
                    "logit_scale": "logits_scaling",
                }
            ),
        ),
        "qwen3": GgufArchitecture("Qwen3ForCausalLM", {**_LAYER_NAMES, **_QK_NORMS}),
        "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", {**_mixture_names("mlp.gate", "mlp.experts", _EXPERTS), **_QK_NORMS}),
    }
)
"""`general.architecture` -> how to read it. Mistral's and Mixtral's files say `llama`."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Constants of rotary positions that stand in files as tensors: divisors of the frequencies."""


class Metadata:
    """Metadata by key, with the type that is due checked."""

    def __init__(self, path: Path, values: Mapping[str, MetadataValue]) -> None:
        self.path = path
        self._values = values

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, kind: type[_Scalar], default: _Scalar | None = None) -> _Scalar:
        """One value. Raises CheckpointError when it is missing without a default, or of another type."""
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata lacks {key}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            found = "a list" if isinstance(value, list | np.ndarray) else repr(value)
            raise CheckpointError(f"{self.path}: {key} should be {kind.__name__}, not {found:.60}")
        return value


def read_hf_config(
    architecture: GgufArchitecture,
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    rope_tensors: Mapping[str, np.ndarray],
) -> HfConfig:
    """Builds the config that Hugging Face would have for this file, settled.

    Args:
        shapes: of all tensors, by Hugging Face's names: they tell the vocabulary, tied embeddings and biases.
        rope_tensors: values of those of `ROPE_TENSORS` that the file has, [turned part of head_dim / 2].

    Raises:
        CheckpointError: a key is missing or makes no sense.
        UnsupportedModelError: experts where the architecture has none, a part of a split file, heads rotated in part, or an unknown
            scaling of positions.
    """
    path = metadata.path
    prefix = metadata.get("general.architecture", str)
    if metadata.get("split.count", int, 0) > 1:
        raise UnsupportedModelError(f"{path} is one part of a split file: merge its parts with llama-gguf-split --merge")
    if metadata.get(f"{prefix}.expert_count", int, 0) and not HF_ARCHITECTURES[architecture.hf_architecture].is_mixture:
        raise UnsupportedModelError(
            f"{path}: mixtures of experts ({prefix}.expert_count) are not supported in GGUF files of this architecture"
        )
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{path} has no token_embd.weight with two dimensions")
    heads = metadata.get(f"{prefix}.attention.head_count", int)
    hidden = metadata.get(f"{prefix}.embedding_length", int)
    head_dim = metadata.get(f"{prefix}.attention.key_length", int, hidden // heads if heads > 0 else 0)
    is_partial = HF_ARCHITECTURES[architecture.hf_architecture].partial_rotary
    for key in ("attention.value_length",) if is_partial else ("attention.value_length", "rope.dimension_count"):
        if metadata.get(f"{prefix}.{key}", int, head_dim) != head_dim:
            raise UnsupportedModelError(f"{path}: {prefix}.{key} differs from the head size {head_dim}, which is not supported")
    theta = metadata.get(f"{prefix}.rope.freq_base", float, 10_000.0)
    window = metadata.get(f"{prefix}.attention.sliding_window", int, 0)
    hf_architecture = architecture.hf_architecture
    if window and architecture.windowed_hf_architecture is not None:
        hf_architecture = architecture.windowed_hf_architecture
    config: HfConfig = {
        "architectures": [hf_architecture],
        "model_type": HF_ARCHITECTURES[hf_architecture].model_type,
        "hidden_size": hidden,
        "intermediate_size": metadata.get(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": metadata.get(f"{prefix}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{prefix}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": embedding[0],
        "max_position_embeddings": metadata.get(f"{prefix}.context_length", int),
        "rms_norm_eps": metadata.get(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, prefix, head_dim, theta, rope_tensors),
        "attention_bias": any(name.endswith("self_attn.q_proj.bias") for name in shapes),
        "mlp_bias": any(name.endswith("mlp.up_proj.bias") for name in shapes),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "bos_token_id": _token_ids(metadata, "bos"),
        # Files of chat models name the end of a turn and of a message beside the end of the text.
        "eos_token_id": _token_ids(metadata, "eos", "eot", "eom"),
    }
    if is_partial and head_dim > 0:
        config["partial_rotary_factor"] = metadata.get(f"{prefix}.rope.dimension_count", int, head_dim) / head_dim
    if metadata.has(original := f"{prefix}.rope.scaling.original_context_length"):
        config["original_max_position_embeddings"] = metadata.get(original, int)
    if window or HF_ARCHITECTURES[hf_architecture].default_window is not None:
        config["sliding_window"] = window or None
    if HF_ARCHITECTURES[hf_architecture].is_mixture:
        config |= {
            "num_experts": metadata.get(f"{prefix}.expert_count", int),
            "num_experts_per_tok": metadata.get(f"{prefix}.expert_used_count", int),
            "moe_intermediate_size": metadata.get(f"{prefix}.expert_feed_forward_length", int, config["intermediate_size"]),
            "norm_topk_prob": architecture.are_shares_renormalized,
        }
        if metadata.has(shared := f"{prefix}.expert_shared_feed_forward_length"):
            config["shared_expert_intermediate_size"] = metadata.get(shared, int)
    if config["rope_scaling"] is not None and not architecture.is_scaling_rounded:
        config["rope_scaling"]["truncate"] = False
    if metadata.has(pattern := f"{prefix}.attention.sliding_window_pattern"):
        config["sliding_window_pattern"] = metadata.get(pattern, int)
    for key, hf_key in architecture.hf_keys.items():
        if metadata.has(f"{prefix}.{key}"):
            config[hf_key] = metadata.get(f"{prefix}.{key}", float)
    if architecture.layers_scaled_by_width:
        is_by_width = config["num_hidden_layers"] == architecture.layers_scaled_by_width
        config["query_pre_attn_scalar"] = hidden // heads if is_by_width and heads > 0 else head_dim
    return settle(config, str(path))


def _token_ids(metadata: Metadata, *kinds: str) -> int | list[int] | None:
    """The ids of some kinds of token that the file names: none, one, or a list without repeats."""
    keys = [key for kind in kinds if metadata.has(key := f"tokenizer.ggml.{kind}_token_id")]
    ids = list(dict.fromkeys(metadata.get(key, int) for key in keys))
    return ids if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(metadata: Metadata, prefix: str, head_dim: int, theta: float, tensors: Mapping[str, np.ndarray]) -> HfConfig | None:
    if "rope_factors_short.weight" in tensors or "rope_factors_long.weight" in tensors:
        scaling: HfConfig = {"rope_type": "longrope"}
        for key in ("short", "long"):
            scaling[f"{key}_factor"] = tensors.get(f"rope_factors_{key}.weight", np.zeros(0)).ravel().tolist()
        if metadata.has(magnitude := f"{prefix}.rope.scaling.attn_factor"):
            scaling["attention_factor"] = metadata.get(magnitude, float)
        return scaling
    rope_freqs = tensors.get("rope_freqs.weight")
    kind = metadata.get(f"{prefix}.rope.scaling.type", str, "none")
    if kind != "none":
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(f"{metadata.path}: rope type {kind!r:.60} is not supported in GGUF files")
        named: HfConfig = {"rope_type": kind, "factor": metadata.get(f"{prefix}.rope.scaling.factor", float, 1.0)}
        if kind == "yarn":
            if metadata.get(f"{prefix}.rope.scaling.attn_factor", float, 1.0) != 1:
                raise UnsupportedModelError(f"{metadata.path}: {prefix}.rope.scaling.attn_factor is not supported")
        return named
    if metadata.has(f"{prefix}.rope.scale_linear"):  # the older key
        return {"rope_type": "linear", "factor": metadata.get(f"{prefix}.rope.scale_linear", float)}
    if rope_freqs is None or np.all(rope_freqs == 1):
        return None
    # Llama 3.1's scaling stands in files as the tensor of its divisors alone: the largest is its `factor`, the other numbers are
    # the same in all releases.
    scaling = {
        "rope_type": "llama3",
        "factor": float(np.max(rope_freqs)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if rope_freqs.shape != (head_dim // 2,) or not np.allclose(rope_freqs, _llama3_divisors(head_dim, theta, **scaling), rtol=1e-3):
        raise UnsupportedModelError(f"{metadata.path}: rope_freqs.weight holds a scaling of rotary positions that is not Llama 3's")
    return scaling


def _llama3_divisors(
    head_dim: int,
    theta: float,
    *,
    rope_type: str,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """What Llama 3.1 divides the rotary frequencies by, [head_dim / 2] (transformers, `_compute_llama3_parameters`)."""
    with np.errstate(all="ignore"):  # theta is not checked yet
        turns = original_max_position_embeddings * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
        share = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        return 1 / ((1 - share) / factor + share)
