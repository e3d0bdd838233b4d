"""Llama 2 and SmolLM: RMSNorm, grouped-query attention with rope, SwiGLU, no biases.

Attention may be windowed in some layers or in all, as in the models made from Llama that are.
"""

from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.errors import UnsupportedModelError
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace, KVPlaces
from jaxpaged.layers.linear import Embedding, Linear, matmul
from jaxpaged.layers.mlp import GatedMLP
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Rope, make_rope
from jaxpaged.layers.stack import make_stack, run_stack


class Config(NamedTuple):
    """Sizes and constants of one checkpoint."""

    vocab: int
    embed: int
    ffw: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    is_tied: bool
    dtype: np.dtype
    windows: tuple[int | None, ...]

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: np.dtype) -> "Config":
        """Reads a config as `loading.model_config.settle` leaves it. Raises UnsupportedModelError for a variant we do not run."""
        if hf["hidden_act"] != "silu":
            raise UnsupportedModelError(f"activation {hf['hidden_act']!r} is not supported; Llama files use 'silu'")
        for bias in ("attention_bias", "mlp_bias"):
            if hf[bias]:
                raise UnsupportedModelError(f"{bias} is not supported")
        if (scaling := hf.get("rope_scaling")) is not None:
            raise UnsupportedModelError(f"rope type {scaling['rope_type']!r} is not supported; supported: 'default'")
        return cls(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            ffw=hf["intermediate_size"],
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            max_positions=hf["max_position_embeddings"],
            norm_eps=hf["rms_norm_eps"],
            rope_theta=hf["rope_theta"],
            is_tied=hf["tie_word_embeddings"],
            dtype=dtype,
            windows=(None,) * hf["num_hidden_layers"],
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis words of `WEIGHTS` -> sizes."""
        words = ("vocab", "embed", "ffw", "layers", "heads", "kv_heads", "head_dim")
        return {word: getattr(self, word) for word in words}


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config) -> None:
        c = config
        self.attention_norm = RMSNorm(c.embed, c.norm_eps, c.dtype)
        self.attention = Attention(c.embed, c.heads, c.kv_heads, c.head_dim, c.dtype)
        self.mlp_norm = RMSNorm(c.embed, c.norm_eps, c.dtype)
        self.mlp = GatedMLP(c.embed, c.ffw, c.dtype)

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(self.attention_norm(x), cache, batch, rope, place)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Model(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.embedding = Embedding(config.vocab, config.embed, config.dtype)
        self.layers = make_stack(lambda: Block(config), config.layers)
        self.norm = RMSNorm(config.embed, config.norm_eps, config.dtype)
        self.head = None if config.is_tied else Linear(config.embed, config.vocab, config.dtype)

    def __call__(self, cache: KVCache, batch: StepBatch) -> tuple[Float[Array, "tokens embed"], KVCache]:
        """Hidden states of every token, and the cache with the new keys and values."""
        rope = make_rope(batch.positions, self.config.head_dim, self.config.rope_theta)
        places = KVPlaces(self.config.windows)

        def run_layer(layer: Block, carry: tuple[Any, KVCache], index: Any) -> tuple[Any, KVCache]:
            return layer(*carry, batch, rope, places.of(index))

        x, cache = run_stack(self.layers, self.config.layers, run_layer, (self.embedding(batch.token_ids), cache))
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of chosen rows."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return matmul(hidden, weight[...])


WEIGHTS: dict[str, tuple[str, str]] = {
    "model.embed_tokens.weight": ("embedding.weight", "vocab embed -> vocab embed"),
    "model.layers.{layer}.input_layernorm.weight": ("layers.attention_norm.weight", "embed -> embed"),
    "model.layers.{layer}.self_attn.q_proj.weight": ("layers.attention.q.weight", "(heads head_dim) embed -> (heads head_dim) embed"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("layers.attention.k.weight", "(kv_heads head_dim) embed -> (kv_heads head_dim) embed"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("layers.attention.v.weight", "(kv_heads head_dim) embed -> (kv_heads head_dim) embed"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("layers.attention.o.weight", "embed (heads head_dim) -> embed (heads head_dim)"),
    "model.layers.{layer}.post_attention_layernorm.weight": ("layers.mlp_norm.weight", "embed -> embed"),
    "model.layers.{layer}.mlp.gate_proj.weight": ("layers.mlp.gate.weight", "ffw embed -> ffw embed"),
    "model.layers.{layer}.mlp.up_proj.weight": ("layers.mlp.up.weight", "ffw embed -> ffw embed"),
    "model.layers.{layer}.mlp.down_proj.weight": ("layers.mlp.down.weight", "embed ffw -> embed ffw"),
    "model.norm.weight": ("norm.weight", "embed -> embed"),
    "lm_head.weight": ("head.weight", "vocab embed -> vocab embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
