"""Llama and what differs from it by a flag: RMSNorm, grouped-query attention with rope, SwiGLU.

The flags are the traits of a line in the registry, and what a config says: biases, norms of queries and keys, windows in some layers
or in all, layers without positions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.errors import UnsupportedModelError
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace, KVPlaces
from jaxpaged.layers.linear import Embedding, Linear
from jaxpaged.layers.mixture import Mixture
from jaxpaged.layers.mlp import GatedMLP, known_activation
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Rope, make_ropes
from jaxpaged.layers.rope_frequencies import RopePlan, make_rope_table, unturned, usable_positions
from jaxpaged.layers.shards import whole_rows
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
    activation: str
    rope: RopePlan
    has_qkv_bias: bool
    has_out_bias: bool
    has_qk_norm: bool
    are_norms_wide: bool
    is_tied: bool
    dtype: np.dtype
    windows: tuple[int | None, ...]
    mixture: Mixture | None = None

    @classmethod
    def from_hf(
        cls,
        hf: dict[str, Any],
        dtype: np.dtype,
        max_model_len: int | None,
        *,
        has_qkv_bias: bool = False,
        has_qk_norm: bool = False,
        are_norms_wide: bool = False,
        is_mixture: bool = False,
    ) -> "Config":
        """Reads a config as `loading.model_config.settle` leaves it.

        Args:
            max_model_len: the longest text that the engine takes, which some kinds of rope depend on; None: what the model is made for.
            has_qkv_bias: the family's, whatever its configs say.
            has_qk_norm: likewise.
            are_norms_wide: whether norms multiply before they round; see `RMSNorm`.
            is_mixture: whether feed-forward blocks are mixtures of experts, which `mixtral.py` runs.

        Raises:
            UnsupportedModelError: a variant we do not run.
        """
        if hf["mlp_bias"]:
            raise UnsupportedModelError("mlp_bias is not supported")
        mixture = _mixture(hf) if is_mixture else None
        return cls(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            ffw=hf["intermediate_size"] if mixture is None else mixture.ffw,
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            max_positions=usable_positions(hf["rope_scaling"], hf["max_position_embeddings"]),
            norm_eps=hf["rms_norm_eps"],
            activation=known_activation(hf["hidden_act"]),
            rope=rope_plan(hf, max_model_len),
            has_qkv_bias=has_qkv_bias or hf["attention_bias"],
            has_out_bias=not has_qkv_bias and hf["attention_bias"],
            has_qk_norm=has_qk_norm,
            are_norms_wide=are_norms_wide,
            is_tied=hf["tie_word_embeddings"],
            dtype=dtype,
            windows=tuple(hf["layer_windows"]),
            mixture=mixture,
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis words of `WEIGHTS` -> sizes. `routes`: rows of the router, one for each expert, which every device has all of."""
        words = ("vocab", "embed", "ffw", "layers", "heads", "kv_heads", "head_dim")
        sizes = {word: getattr(self, word) for word in words}
        if self.mixture is not None:
            sizes |= {"experts": self.mixture.experts, "routes": self.mixture.experts, "shared_ffw": self.mixture.shared_ffw or 0}
        return sizes

    @property
    def norm(self) -> Callable[[int], RMSNorm]:
        """Makes a norm from its width."""
        return partial(RMSNorm, eps=self.norm_eps, dtype=self.dtype, is_scaled_wide=self.are_norms_wide)


def _mixture(hf: dict[str, Any]) -> Mixture:
    return Mixture(
        experts=hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        ffw=hf["moe_intermediate_size"],
        renormalizes=hf["norm_topk_prob"],
        shared_ffw=hf["shared_expert_intermediate_size"],
    )


def rope_plan(hf: dict[str, Any], max_model_len: int | None) -> RopePlan:
    """One table for all layers, and one that turns nothing where some have no positions."""
    dims = int(hf["head_dim"] * hf["partial_rotary_factor"])
    table = make_rope_table(
        hf["rope_scaling"],
        theta=hf["rope_theta"],
        dims=dims,
        max_positions=hf["max_position_embeddings"],
        max_model_len=max_model_len,
    )
    if all(hf["has_rope"]):
        return RopePlan((table,), (0,) * len(hf["has_rope"]))
    return RopePlan((table, unturned(dims)), tuple(0 if has_rope else 1 for has_rope in hf["has_rope"]))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config) -> None:
        c = config
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
        self.mlp = GatedMLP(c.embed, c.ffw, c.dtype, activation=c.activation)

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(self.attention_norm(x), cache, batch, rope, place)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Model(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: Any, make_block: Callable[[Any], nnx.Module] = Block, *, embedding_scale: float | None = None) -> None:
        self.config = config
        self.embedding = Embedding(config.vocab, config.embed, config.dtype, scale=embedding_scale)
        self.layers = make_stack(lambda: make_block(config), config.layers)
        self.norm = config.norm(config.embed)
        self.head = None if config.is_tied else Linear(config.embed, config.vocab, config.dtype)

    def __call__(self, cache: KVCache, batch: StepBatch) -> tuple[Float[Array, "tokens embed"], KVCache]:
        """Hidden states of every token, and the cache with the new keys and values."""
        ropes, places = make_ropes(batch.positions, self.config.rope), KVPlaces(self.config.windows)

        def run_layer(layer: Any, carry: tuple[Any, KVCache], index: Any) -> tuple[Any, KVCache]:
            return layer(*carry, batch, ropes.of(index), places.of(index))

        x, cache = run_stack(self.layers, self.config.layers, run_layer, (self.embedding(batch.token_ids), cache))
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of chosen rows."""
        head = self.embedding if self.head is None else self.head
        return whole_rows(head.sums(hidden), self.config.vocab)


WEIGHTS: dict[str, tuple[str, str]] = {
    "model.embed_tokens.weight": ("embedding.weight", "vocab embed -> vocab embed"),
    "model.layers.{layer}.input_layernorm.weight": ("layers.attention_norm.weight", "embed -> embed"),
    "model.layers.{layer}.self_attn.q_proj.weight": ("layers.attention.q.weight", "(heads head_dim) embed -> (heads head_dim) embed"),
    "model.layers.{layer}.self_attn.k_proj.weight": ("layers.attention.k.weight", "(kv_heads head_dim) embed -> (kv_heads head_dim) embed"),
    "model.layers.{layer}.self_attn.v_proj.weight": ("layers.attention.v.weight", "(kv_heads head_dim) embed -> (kv_heads head_dim) embed"),
    "model.layers.{layer}.self_attn.o_proj.weight": ("layers.attention.o.weight", "embed (heads head_dim) -> embed (heads head_dim)"),
    "model.layers.{layer}.self_attn.q_proj.bias": ("layers.attention.q.bias", "(heads head_dim) -> (heads head_dim)"),
    "model.layers.{layer}.self_attn.k_proj.bias": ("layers.attention.k.bias", "(kv_heads head_dim) -> (kv_heads head_dim)"),
    "model.layers.{layer}.self_attn.v_proj.bias": ("layers.attention.v.bias", "(kv_heads head_dim) -> (kv_heads head_dim)"),
    "model.layers.{layer}.self_attn.o_proj.bias": ("layers.attention.o.bias", "embed -> embed"),
    "model.layers.{layer}.self_attn.q_norm.weight": ("layers.attention.q_norm.weight", "head_dim -> head_dim"),
    "model.layers.{layer}.self_attn.k_norm.weight": ("layers.attention.k_norm.weight", "head_dim -> head_dim"),
    "model.layers.{layer}.post_attention_layernorm.weight": ("layers.mlp_norm.weight", "embed -> embed"),
    "model.layers.{layer}.mlp.gate_proj.weight": ("layers.mlp.gate.weight", "ffw embed -> ffw embed"),
    "model.layers.{layer}.mlp.up_proj.weight": ("layers.mlp.up.weight", "ffw embed -> ffw embed"),
    "model.layers.{layer}.mlp.down_proj.weight": ("layers.mlp.down.weight", "embed ffw -> embed ffw"),
    "model.norm.weight": ("norm.weight", "embed -> embed"),
    "lm_head.weight": ("head.weight", "vocab embed -> vocab embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
