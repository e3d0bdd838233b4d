"""A weights table of a Llama for tests that may not import a model (models import jax), and what it expects."""

from typing import Any, NamedTuple

import numpy as np

TABLE: dict[str, tuple[str, str]] = {
    "model.embed_tokens.weight": ("embedding", "vocab embed -> vocab embed"),
    "model.layers.{layer}.input_layernorm.weight": ("layers.norm", "embed -> embed"),
    "model.layers.{layer}.self_attn.q_proj.weight": ("layers.q", "(heads head_dim) embed -> (heads head_dim) embed"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("layers.k", "(kv_heads head_dim) embed -> kv_heads head_dim embed"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("layers.v", "(kv_heads head_dim) embed -> embed (kv_heads head_dim)"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("layers.o", "embed (heads head_dim) -> heads embed head_dim"),
    "model.layers.{layer}.post_attention_layernorm.weight": ("layers.mlp_norm", "embed -> embed"),
    "model.layers.{layer}.mlp.gate_proj.weight": ("layers.gate", "ffw embed -> ffw embed"),
    "model.layers.{layer}.mlp.up_proj.weight": ("layers.up", "ffw embed -> embed ffw"),
    "model.layers.{layer}.mlp.down_proj.weight": ("layers.down", "embed ffw -> (ffw embed)"),
    "model.norm.weight": ("norm", "embed -> embed 1"),
    "lm_head.weight": ("head", "vocab embed -> vocab embed"),
}


class Like(NamedTuple):
    """Shape and type of a parameter."""

    shape: tuple[int, ...]
    dtype: np.dtype


def axis_sizes(hf: dict[str, Any]) -> dict[str, int]:
    """Axis words -> sizes of a settled config."""
    return {
        "vocab": hf["vocab_size"],
        "embed": hf["hidden_size"],
        "ffw": hf["intermediate_size"],
        "layers": hf["num_hidden_layers"],
        "heads": hf["num_attention_heads"],
        "kv_heads": hf["num_key_value_heads"],
        "head_dim": hf["head_dim"],
    }


def expected(hf: dict[str, Any], dtype: Any = np.float32) -> dict[str, Like]:
    """Parameters of `TABLE` for a settled config, written out by hand; a tied model has no head."""
    s = axis_sizes(hf)
    vocab, embed, ffw, layers, heads, kv_heads, head_dim = s.values()
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocab, embed),
        "layers.norm": (layers, embed),
        "layers.q": (layers, heads * head_dim, embed),
        "layers.k": (layers, kv_heads, head_dim, embed),
        "layers.v": (layers, embed, kv_heads * head_dim),
        "layers.o": (layers, heads, embed, head_dim),
        "layers.mlp_norm": (layers, embed),
        "layers.gate": (layers, ffw, embed),
        "layers.up": (layers, embed, ffw),
        "layers.down": (layers, ffw * embed),
        "norm": (embed, 1),
    }
    if not hf["tie_word_embeddings"]:
        shapes["head"] = (vocab, embed)
    return {path: Like(shape, np.dtype(dtype)) for path, shape in shapes.items()}
