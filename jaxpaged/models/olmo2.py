"""OLMo 2: a Llama whose norms follow attention and feed-forward block instead of going before, and norm all queries and keys together."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.mlp import GatedMLP
from jaxpaged.layers.rope import Rope
from jaxpaged.models import llama
from jaxpaged.models.llama import Config


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config) -> None:
        c = config
        self.attention = Attention(
            c.embed,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.dtype,
            has_qkv_bias=c.has_qkv_bias,
            has_out_bias=c.has_out_bias,
            norm=c.norm,
            norms_whole_rows=True,
        )
        self.attention_norm = c.norm(c.embed)
        self.mlp = GatedMLP(c.embed, c.ffw, c.dtype, activation=c.activation)
        self.mlp_norm = c.norm(c.embed)

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(x, cache, batch, rope, place)
        x = x + self.attention_norm(attended)
        return x + self.mlp_norm(self.mlp(x)), cache


class Model(llama.Model):
    """Llama's, of other blocks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, Block)


_LAYER = "model.layers.{layer}."

WEIGHTS: dict[str, tuple[str, str]] = {
    name: weight for name, weight in llama.WEIGHTS.items() if weight[0] not in ("layers.attention_norm.weight", "layers.mlp_norm.weight")
} | {
    f"{_LAYER}self_attn.q_norm.weight": ("layers.attention.q_norm.weight", "(heads head_dim) -> (heads head_dim)"),
    f"{_LAYER}self_attn.k_norm.weight": ("layers.attention.k_norm.weight", "(kv_heads head_dim) -> (kv_heads head_dim)"),
    f"{_LAYER}post_attention_layernorm.weight": ("layers.attention_norm.weight", "embed -> embed"),
    f"{_LAYER}post_feedforward_layernorm.weight": ("layers.mlp_norm.weight", "embed -> embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
