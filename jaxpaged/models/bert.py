"""BERT as an encoder: every token sees all of its text, whose hidden states make one vector (Devlin et al. 2019).

A prompt is computed whole in one step: its keys and values lie in pages for the length of that step, and no longer.
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
from jaxpaged.layers.kv_places import KVPlace, KVPlaces
from jaxpaged.layers.linear import Embedding
from jaxpaged.layers.mlp import MLP, known_activation
from jaxpaged.layers.norm import LayerNorm
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
    num_types: int
    norm_eps: float
    activation: str
    dtype: np.dtype
    windows: tuple[int | None, ...]
    is_tied: bool = True

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: np.dtype, max_model_len: int | None) -> "Config":
        """Reads a config as `loading.model_config.settle` leaves it.

        Raises:
            UnsupportedModelError: a variant we do not run.
        """
        if hf.get("position_embedding_type", "absolute") != "absolute":
            raise UnsupportedModelError(f"position_embedding_type {hf['position_embedding_type']!r:.60} is not supported, only 'absolute'")
        if hf.get("is_decoder"):
            raise UnsupportedModelError("is_decoder is not supported: a BERT is an encoder here")
        return cls(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            ffw=hf["intermediate_size"],
            layers=hf["num_hidden_layers"],
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_attention_heads"],
            head_dim=hf["head_dim"],
            # With the token that a request for an embedding chooses at its end: nobody sees it, and it has no position.
            max_positions=hf["max_position_embeddings"] + 1,
            num_types=hf["type_vocab_size"],
            norm_eps=hf["layer_norm_eps"],
            activation=known_activation(hf["hidden_act"]),
            dtype=dtype,
            windows=(None,) * hf["num_hidden_layers"],
        )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis words of `WEIGHTS` -> sizes."""
        words = ("vocab", "embed", "ffw", "layers", "heads", "kv_heads", "head_dim")
        sizes = {word: getattr(self, word) for word in words}
        return sizes | {"positions": self.max_positions - 1, "types": self.num_types}

    @property
    def norm(self) -> Callable[[], LayerNorm]:
        """Makes a norm."""
        return partial(LayerNorm, self.embed, eps=self.norm_eps, dtype=self.dtype)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config) -> None:
        c = config
        self.attention = Attention(c.embed, c.heads, c.kv_heads, c.head_dim, c.dtype, has_qkv_bias=True, has_out_bias=True, is_causal=False)
        self.attention_norm = c.norm()
        self.mlp = MLP(c.embed, c.ffw, c.dtype, activation=c.activation)
        self.mlp_norm = c.norm()

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        attended, cache = self.attention(x, cache, batch, None, place)
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x)), cache


class Model(nnx.Module):
    """Embeddings of words, positions and the first of the types, and layers."""

    def __init__(self, config: Config) -> None:
        c = config
        self.config = config
        self.embedding = Embedding(c.vocab, c.embed, c.dtype)
        self.positions = Embedding(c.max_positions - 1, c.embed, c.dtype)
        self.types = Embedding(c.num_types, c.embed, c.dtype)
        self.embedding_norm = c.norm()
        self.layers = make_stack(lambda: Block(config), c.layers)

    def __call__(self, cache: KVCache, batch: StepBatch) -> tuple[Float[Array, "tokens embed"], KVCache]:
        """Hidden states of every token, and the cache with the new keys and values."""
        places = KVPlaces(self.config.windows)
        types = self.types(jnp.zeros_like(batch.token_ids))
        x = self.embedding_norm(self.embedding(batch.token_ids) + types + self.positions(batch.positions))

        def run_layer(layer: Any, carry: tuple[Any, KVCache], index: Any) -> tuple[Any, KVCache]:
            return layer(*carry, batch, places.of(index))

        return run_stack(self.layers, self.config.layers, run_layer, (x, cache))

    def logits(self, hidden: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        """Every row chooses a token, which nobody sees; there is no head that was trained for it."""
        return whole_rows(self.embedding.sums(hidden), self.config.vocab)


_LAYER = "encoder.layer.{layer}."
_QKV = "(heads head_dim) embed -> (heads head_dim) embed"

WEIGHTS: dict[str, tuple[str, str]] = {
    "embeddings.word_embeddings.weight": ("embedding.weight", "vocab embed -> vocab embed"),
    "embeddings.position_embeddings.weight": ("positions.weight", "positions embed -> positions embed"),
    "embeddings.token_type_embeddings.weight": ("types.weight", "types embed -> types embed"),
    "embeddings.LayerNorm.weight": ("embedding_norm.weight", "embed -> embed"),
    "embeddings.LayerNorm.bias": ("embedding_norm.bias", "embed -> embed"),
    f"{_LAYER}attention.self.query.weight": ("layers.attention.q.weight", _QKV),
    f"{_LAYER}attention.self.query.bias": ("layers.attention.q.bias", "(heads head_dim) -> (heads head_dim)"),
    f"{_LAYER}attention.self.key.weight": ("layers.attention.k.weight", _QKV),
    f"{_LAYER}attention.self.key.bias": ("layers.attention.k.bias", "(heads head_dim) -> (heads head_dim)"),
    f"{_LAYER}attention.self.value.weight": ("layers.attention.v.weight", _QKV),
    f"{_LAYER}attention.self.value.bias": ("layers.attention.v.bias", "(heads head_dim) -> (heads head_dim)"),
    f"{_LAYER}attention.output.dense.weight": ("layers.attention.o.weight", "embed (heads head_dim) -> embed (heads head_dim)"),
    f"{_LAYER}attention.output.dense.bias": ("layers.attention.o.bias", "embed -> embed"),
    f"{_LAYER}attention.output.LayerNorm.weight": ("layers.attention_norm.weight", "embed -> embed"),
    f"{_LAYER}attention.output.LayerNorm.bias": ("layers.attention_norm.bias", "embed -> embed"),
    f"{_LAYER}intermediate.dense.weight": ("layers.mlp.up.weight", "ffw embed -> ffw embed"),
    f"{_LAYER}intermediate.dense.bias": ("layers.mlp.up.bias", "ffw -> ffw"),
    f"{_LAYER}output.dense.weight": ("layers.mlp.down.weight", "embed ffw -> embed ffw"),
    f"{_LAYER}output.dense.bias": ("layers.mlp.down.bias", "embed -> embed"),
    f"{_LAYER}output.LayerNorm.weight": ("layers.mlp_norm.weight", "embed -> embed"),
    f"{_LAYER}output.LayerNorm.bias": ("layers.mlp_norm.bias", "embed -> embed"),
    # Trained for another task and never read.
    "pooler.dense.weight": ("pooler.weight", "embed embed -> embed embed"),
    "pooler.dense.bias": ("pooler.bias", "embed -> embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
