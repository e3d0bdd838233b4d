"""Granite 3: a Llama with constants that multiply embeddings, scores and what each part adds to the stream, and divide the logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.attention import Attention
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.mlp import GatedMLP
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Rope
from jaxpaged.layers.rope_frequencies import RopePlan
from jaxpaged.models import llama
from jaxpaged.models.llama import WEIGHTS

__all__ = ["WEIGHTS", "Block", "Config", "Model"]


class Config(NamedTuple):
    """Llama's sizes, and the constants: `logit_divisor` divides, the others multiply."""

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
    is_tied: bool
    dtype: np.dtype
    windows: tuple[int | None, ...]
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_divisor: float

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: np.dtype, max_model_len: int | None) -> "Config":
        """Reads a config as `loading.model_config.settle` leaves it.

        Args:
            max_model_len: the longest text that the engine takes; None: what the model is made for.

        Raises:
            UnsupportedModelError: a variant we do not run.
        """
        common = llama.Config.from_hf(hf, dtype, max_model_len)._asdict()
        return cls(
            **{name: value for name, value in common.items() if name in cls._fields},
            embedding_scale=float(hf["embedding_multiplier"]),
            attention_scale=float(hf["attention_multiplier"]),
            residual_scale=float(hf["residual_multiplier"]),
            logit_divisor=float(hf["logits_scaling"]),
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis words of `WEIGHTS` -> sizes."""
        words = ("vocab", "embed", "ffw", "layers", "heads", "kv_heads", "head_dim")
        return {word: getattr(self, word) for word in words}

    @property
    def norm(self) -> Callable[[int], RMSNorm]:
        """Makes a norm from its width."""
        return lambda width: RMSNorm(width, self.norm_eps, self.dtype)


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
            scale=c.attention_scale,
        )
        self.mlp_norm = c.norm(c.embed)
        self.mlp = GatedMLP(c.embed, c.ffw, c.dtype, activation=c.activation)
        self.residual_scale = c.residual_scale

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(self.attention_norm(x), cache, batch, rope, place)
        x = x + self._scaled(attended)
        return x + self._scaled(self.mlp(self.mlp_norm(x))), cache

    def _scaled(self, part: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        # The constant is never rounded to the type of activations.
        return (part.astype(jnp.float32) * self.residual_scale).astype(part.dtype)


class Model(llama.Model):
    """Llama's, of other blocks, with scaled embeddings and divided logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, Block, embedding_scale=config.embedding_scale)

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Float32 logits of chosen rows."""
        return super().logits(hidden) / self.config.logit_divisor
