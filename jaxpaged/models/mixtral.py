"""Mixtral: a Llama whose feed-forward blocks are mixtures of experts. The mixtures of Qwen differ in names alone: `qwen_moe.py`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.mixture import MixtureMLP
from jaxpaged.layers.rope import Rope
from jaxpaged.models import llama
from jaxpaged.models.llama import Config


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config) -> None:
        c = config
        assert c.mixture is not None
        self.attention_norm = c.norm(c.embed)
        self.attention = Attention(
            c.embed,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.dtype,
            has_qkv_bias=c.has_qkv_bias,
            has_out_bias=c.has_out_bias,
            norm=c.norm if c.has_qk_norm else None,
        )
        self.mlp_norm = c.norm(c.embed)
        self.mlp = MixtureMLP(c.embed, c.mixture, c.dtype, activation=c.activation)

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(self.attention_norm(x), cache, batch, rope, place)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x), batch.cu_q_lens[-1]), cache


class Model(llama.Model):
    """Llama's, of other blocks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, Block)


_LAYER = "model.layers.{layer}."
_EXPERT = f"{_LAYER}block_sparse_moe.experts.{{expert}}."

NOT_EXPERTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {name: weight for name, weight in llama.WEIGHTS.items() if ".mlp." not in name}
)
"""Llama's tensors without those of its feed-forward blocks."""

WEIGHTS: dict[str, tuple[str, str]] = {
    **NOT_EXPERTS,
    f"{_LAYER}block_sparse_moe.gate.weight": ("layers.mlp.router.weight", "routes embed -> routes embed"),
    f"{_EXPERT}w1.weight": ("layers.mlp.experts.gate", "ffw embed -> ffw embed"),
    f"{_EXPERT}w3.weight": ("layers.mlp.experts.up", "ffw embed -> ffw embed"),
    f"{_EXPERT}w2.weight": ("layers.mlp.experts.down", "embed ffw -> embed ffw"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's, or one expert's, parameter)."""
