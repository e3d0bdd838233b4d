"""gpt-oss: a mixture of experts with clamped, biased SwiGLU, sinks in attention, and windows in every second layer.

The experts of its releases lie in 4 bits (MXFP4); they are taken apart when the checkpoint is opened (`loading.mxfp4`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxpaged.batch import StepBatch
from jaxpaged.errors import UnsupportedModelError
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mixture import Mixture, cut_axes, expert_matmul, part_shape, route, send
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Rope
from jaxpaged.layers.rope_frequencies import RopePlan, usable_positions
from jaxpaged.layers.shards import TENSOR_AXES, add_up, counted_once
from jaxpaged.layers.stack import WholeStack
from jaxpaged.models import llama
from jaxpaged.stages import stage


class Config(NamedTuple):
    """Sizes and constants of one checkpoint. Experts give `(up + 1) * gate * sigmoid(alpha * gate)`, both clamped at `limit` before."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopePlan
    has_bias: bool
    mixture: Mixture
    alpha: float
    limit: float
    is_tied: bool
    dtype: np.dtype
    windows: tuple[int | None, ...]

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: np.dtype, max_model_len: int | None) -> "Config":
        """Reads a config as `loading.model_config.settle` leaves it.

        Args:
            max_model_len: the longest text that the engine takes; None: what the model is made for.

        Raises:
            UnsupportedModelError: a variant we do not run.
        """
        if hf["hidden_act"] != "silu":
            raise UnsupportedModelError(f"activation {hf['hidden_act']!r:.60} is not supported in experts that are clamped")
        return cls(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            max_positions=usable_positions(hf["rope_scaling"], hf["max_position_embeddings"]),
            norm_eps=hf["rms_norm_eps"],
            rope=llama.rope_plan(hf, max_model_len),
            has_bias=hf["attention_bias"],
            mixture=Mixture(
                experts=hf["num_experts"],
                experts_per_token=hf["num_experts_per_tok"],
                ffw=hf["moe_intermediate_size"],
                renormalizes=True,
            ),
            alpha=float(hf["swiglu_alpha"]),
            limit=float(hf["swiglu_limit"]),
            is_tied=hf["tie_word_embeddings"],
            dtype=dtype,
            windows=tuple(hf["layer_windows"]),
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis words of `WEIGHTS` -> sizes; `gate_up`: gate and up of an expert, one of each in turn; `routes`: rows of the router."""
        words = ("vocab", "embed", "layers", "heads", "kv_heads", "head_dim")
        sizes = {word: getattr(self, word) for word in words}
        experts, ffw = self.mixture.experts, self.mixture.ffw
        return sizes | {"experts": experts, "routes": experts, "ffw": ffw, "gate_up": 2 * ffw}

    @property
    def norm(self) -> Callable[[int], RMSNorm]:
        """Makes a norm from its width."""
        return partial(RMSNorm, eps=self.norm_eps, dtype=self.dtype, is_scaled_wide=True)


class ClampedExperts(nnx.Module):
    """All experts of a layer."""

    def __init__(self, config: Config) -> None:
        c, mixture = config, config.mixture
        self.gate_up = WholeStack(jnp.zeros((mixture.experts, 2 * mixture.ffw, c.embed), c.dtype))
        self.gate_up_bias = nnx.Param(jnp.zeros((mixture.experts, 2 * mixture.ffw), c.dtype))
        self.down = WholeStack(jnp.zeros((mixture.experts, c.embed, mixture.ffw), c.dtype))
        self.down_bias = nnx.Param(jnp.zeros((mixture.experts, c.embed), c.dtype))
        self.num_experts, self.ffw, self.alpha, self.limit = mixture.experts, mixture.ffw, c.alpha, c.limit

    @property
    def num_own(self) -> int:
        """Experts of this device."""
        return part_shape(self.gate_up)[0]

    @property
    def is_narrow(self) -> bool:
        """Whether this device has a part of each expert's width."""
        return part_shape(self.gate_up)[1] < 2 * self.ffw

    @property
    def cut_over(self) -> tuple[str, ...]:
        """See `mixture.Experts`."""
        return cut_axes(self, is_narrow=self.is_narrow)

    def __call__(
        self, x: Float[Array, "rows embed"], group_sizes: Int32[Array, "experts"], expert_of: Int32[Array, "rows"]
    ) -> Float[Array, "rows embed"]:
        def biased(x: jax.Array, weights: WholeStack, bias: jax.Array) -> jax.Array:
            # Padding is of no expert.
            own = bias.at[expert_of].get(mode="fill", fill_value=0)
            return (expert_matmul(x, weights, group_sizes) + own).astype(x.dtype)

        gate_up = biased(x, self.gate_up, self.gate_up_bias[...]).reshape(x.shape[0], -1, 2)
        gate, up = jnp.minimum(gate_up[..., 0], self.limit), jnp.clip(gate_up[..., 1], -self.limit, self.limit)
        # Devices with parts of an expert's width have all of this bias.
        down_bias = counted_once(self.down_bias[...], TENSOR_AXES if self.is_narrow else ())
        return biased((up + 1) * gate * nnx.sigmoid(self.alpha * gate), self.down, down_bias)


class ClampedMixture(nnx.Module):
    """A router and its experts."""

    def __init__(self, config: Config) -> None:
        self.router = Linear(config.embed, config.mixture.experts, config.dtype, has_bias=True)
        self.experts = ClampedExperts(config)
        self.mixture = config.mixture

    @stage("mlp")
    def __call__(self, x: Float[Array, "tokens embed"], num_live: Int32[Array, ""]) -> Float[Array, "tokens embed"]:
        """Tokens from `num_live` on are padding."""
        routing = route(self.router(x), self.mixture.experts_per_token, renormalizes=self.mixture.renormalizes)
        return add_up([(send(x, routing, num_live, self.experts), self.experts.cut_over)])


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
            has_qkv_bias=c.has_bias,
            has_out_bias=c.has_bias,
            has_sinks=True,
        )
        self.mlp_norm = c.norm(c.embed)
        self.mlp = ClampedMixture(c)

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
_EXPERTS = f"{_LAYER}mlp.experts."

WEIGHTS: dict[str, tuple[str, str]] = {name: weight for name, weight in llama.WEIGHTS.items() if ".mlp." not in name} | {
    f"{_LAYER}self_attn.sinks": ("layers.attention.sinks", "heads -> heads"),
    f"{_LAYER}mlp.router.weight": ("layers.mlp.router.weight", "routes embed -> routes embed"),
    f"{_LAYER}mlp.router.bias": ("layers.mlp.router.bias", "routes -> routes"),
    f"{_EXPERTS}gate_up_proj": ("layers.mlp.experts.gate_up", "experts embed gate_up -> experts gate_up embed"),
    f"{_EXPERTS}gate_up_proj_bias": ("layers.mlp.experts.gate_up_bias", "experts gate_up -> experts gate_up"),
    f"{_EXPERTS}down_proj": ("layers.mlp.experts.down", "experts ffw embed -> experts embed ffw"),
    f"{_EXPERTS}down_proj_bias": ("layers.mlp.experts.down_bias", "experts embed -> experts embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
