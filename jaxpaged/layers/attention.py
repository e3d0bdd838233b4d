"""Grouped-query attention over the paged cache."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.kv_cache import KVCache, write
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.rope import Rope
from pallas_kernels.paged_attention import paged_attention


class Attention(nnx.Module):
    """Projects, rotates, writes the new keys and values into their pages, attends, projects back."""

    def __init__(self, embed: int, heads: int, kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike) -> None:
        self.q = Linear(embed, heads * head_dim, dtype)
        self.k = Linear(embed, kv_heads * head_dim, dtype)
        self.v = Linear(embed, kv_heads * head_dim, dtype)
        self.o = Linear(heads * head_dim, embed, dtype)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        num_tokens = x.shape[0]
        q = rope.rotate(self.q(x).reshape(num_tokens, self.heads, self.head_dim))
        k = rope.rotate(self.k(x).reshape(num_tokens, self.kv_heads, self.head_dim))
        v = self.v(x).reshape(num_tokens, self.kv_heads, self.head_dim)
        cache = write(cache, k, v, place.layer, batch.write_pages[place.group], batch.write_offsets)
        attended = paged_attention(
            q,
            cache.k,
            cache.v,
            batch.page_tables,
            batch.kv_lens,
            batch.cu_q_lens,
            layer=place.layer,
            group=place.group,
            scale=self.head_dim**-0.5,
            sliding_window=place.window,
        )
        return self.o(attended.reshape(num_tokens, -1)), cache
