"""Gemma 2 and Gemma 3 (text): norms before and after each part with weights around 0, GeGLU, scaled embeddings, and layers with windows
between layers without. Gemma 2 caps scores and logits; Gemma 3 norms queries and keys, and turns windowed layers by a base of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.errors import UnsupportedModelError
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.mlp import GatedMLP, known_activation
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Rope
from jaxpaged.layers.rope_frequencies import RopePlan, make_rope_table, usable_positions
from jaxpaged.models import llama


class Config(NamedTuple):
    """Sizes and constants of one checkpoint. `attention_scale`: of the scores; the caps are None where nothing is capped."""

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
    attention_scale: float
    attention_cap: float | None
    logit_cap: float | None
    has_bias: bool
    has_qk_norm: bool
    is_tied: bool
    dtype: np.dtype
    windows: tuple[int | None, ...]

    @classmethod
    def from_hf(
        cls, hf: dict[str, Any], dtype: np.dtype, max_model_len: int | None, *, has_qk_norm: bool = False, caps_attention: bool = False
    ) -> "Config":
        """Reads a config as `loading.model_config.settle` leaves it.

        Args:
            max_model_len: the longest text that the engine takes; None: what the model is made for.
            has_qk_norm: the family's.
            caps_attention: whether `attn_logit_softcapping` is looked at.

        Raises:
            UnsupportedModelError: a variant we do not run.
        """
        if hf.get("use_bidirectional_attention"):
            raise UnsupportedModelError("use_bidirectional_attention is not supported: a token sees those before it alone")
        attention_cap, logit_cap = hf["attn_logit_softcapping"], hf["final_logit_softcapping"]
        if attention_cap is not None and not caps_attention:
            raise UnsupportedModelError("attn_logit_softcapping is not supported in this architecture")
        return cls(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            ffw=hf["intermediate_size"],
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            max_positions=usable_positions(hf["rope_scaling"], hf["max_position_embeddings"]),
            norm_eps=hf["rms_norm_eps"],
            activation=known_activation(hf["hidden_activation"]),
            rope=_rope_plan(hf, max_model_len),
            attention_scale=float(hf["query_pre_attn_scalar"]) ** -0.5,
            attention_cap=None if attention_cap is None else float(attention_cap),
            logit_cap=None if logit_cap is None else float(logit_cap),
            has_bias=hf["attention_bias"],
            has_qk_norm=has_qk_norm,
            is_tied=hf["tie_word_embeddings"],
            dtype=dtype,
            windows=tuple(hf["layer_windows"]),
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis words of `WEIGHTS` -> sizes."""
        words = ("vocab", "embed", "ffw", "layers", "heads", "kv_heads", "head_dim")
        return {word: getattr(self, word) for word in words}

    @property
    def norm(self) -> Callable[[int], RMSNorm]:
        """Makes a norm from its width."""
        return partial(RMSNorm, eps=self.norm_eps, dtype=self.dtype, offset=1.0, is_scaled_wide=True)


def _rope_plan(hf: dict[str, Any], max_model_len: int | None) -> RopePlan:
    """The table of layers that see everything, and that of windowed ones where their base is another; only the former is ever scaled."""
    if "rope_local_base_freq" not in hf:
        return llama.rope_plan(hf, max_model_len)
    whole = llama.rope_plan(hf, max_model_len).tables[0]
    local = make_rope_table(None, theta=hf["rope_local_base_freq"], dims=hf["head_dim"], max_positions=hf["max_position_embeddings"])
    return RopePlan((whole, local), tuple(int(is_windowed) for is_windowed in hf["is_windowed"]))


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
            norm=c.norm if c.has_qk_norm else None,
            scale=c.attention_scale,
            soft_cap=c.attention_cap,
        )
        self.attention_out_norm = c.norm(c.embed)
        self.mlp_norm = c.norm(c.embed)
        self.mlp = GatedMLP(c.embed, c.ffw, c.dtype, activation=c.activation)
        self.mlp_out_norm = c.norm(c.embed)

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(self.attention_norm(x), cache, batch, rope, place)
        x = x + self.attention_out_norm(attended)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), cache


class Model(llama.Model):
    """Llama's, of other blocks, with scaled embeddings and capped logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, Block, embedding_scale=config.embed**0.5)

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of chosen rows."""
        logits, cap = super().logits(hidden), self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


_LAYER = "model.layers.{layer}."

WEIGHTS: dict[str, tuple[str, str]] = llama.WEIGHTS | {
    f"{_LAYER}post_attention_layernorm.weight": ("layers.attention_out_norm.weight", "embed -> embed"),
    f"{_LAYER}pre_feedforward_layernorm.weight": ("layers.mlp_norm.weight", "embed -> embed"),
    f"{_LAYER}post_feedforward_layernorm.weight": ("layers.mlp_out_norm.weight", "embed -> embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
