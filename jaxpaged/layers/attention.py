"""Grouped-query attention over the paged cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.kv_cache import KVCache
from jaxpaged.layers.kv_places import KVPlace
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.norm import RMSNorm
from jaxpaged.layers.rope import Rope
from jaxpaged.layers.shards import KV
from jaxpaged.stages import stage
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention


class Attention(nnx.Module):
    """Projects, rotates, writes the new keys and values into their pages, attends, projects back.

    A device may have a part of the heads; the numbers of heads below are those of the whole model.

    Args:
        has_qkv_bias, has_out_bias: whether those projections have one.
        norm: makes the norms of queries and keys, which come before the rotation, from the width they norm; None: there are none.
        norms_whole_rows: whether those take all heads of a token together, or each head alone.
        scale: of the scores; None: `head_dim ** -0.5`.
        soft_cap: of the scores.
        is_causal: whether a token sees those before it and itself, or all of its sequence, which lies in one step then.
        has_sinks: whether each head has a learned logit that takes part in the softmax and gives nothing.
    """

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike,
        *,
        has_qkv_bias: bool = False,
        has_out_bias: bool = False,
        norm: Callable[[int], RMSNorm] | None = None,
        norms_whole_rows: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        is_causal: bool = True,
    ) -> None:
        self.q = Linear(embed, heads * head_dim, dtype, has_bias=has_qkv_bias)
        self.k = Linear(embed, kv_heads * head_dim, dtype, has_bias=has_qkv_bias)
        self.v = Linear(embed, kv_heads * head_dim, dtype, has_bias=has_qkv_bias)
        self.o = Linear(heads * head_dim, embed, dtype, has_bias=has_out_bias)
        self.q_norm = norm and norm(heads * head_dim if norms_whole_rows else head_dim)
        self.k_norm = norm and norm(kv_heads * head_dim if norms_whole_rows else head_dim)
        if self.k_norm is not None:
            self.k_norm.cut_over = (KV,)
        self.sinks = nnx.Param(jnp.zeros((heads,), dtype)) if has_sinks else None
        self.head_dim = head_dim
        self.norms_whole_rows, self.soft_cap, self.is_causal = norms_whole_rows, soft_cap, is_causal
        self.scale = head_dim**-0.5 if scale is None else scale

    @stage("attention")
    def __call__(
        self, x: Float[Array, "tokens embed"], cache: KVCache, batch: StepBatch, rope: Rope | None, place: KVPlace
    ) -> tuple[Float[Array, "tokens embed"], KVCache]:
        num_tokens = x.shape[0]
        with stage("qkv"):
            q = self._in_heads(self.q(x), self.q_norm)
            k = self._in_heads(self.k(x), self.k_norm)
            v = self._in_heads(self.v(x), None)
        cos, sin = (None, None) if rope is None else (rope.cos, rope.sin)
        pages, offsets = batch.write_pages[place.group], batch.write_offsets
        with stage("kv_write"):
            q, *pools = kv_write(q, k, v, cache.k, cache.v, pages, offsets, cos=cos, sin=sin, layer=place.layer)
        cache = KVCache(*pools)
        with stage("attend"):
            q = q if rope is None else rope.scale_queries(q)
            attended = paged_attention(
                q,
                cache.k,
                cache.v,
                batch.page_tables,
                batch.kv_lens,
                batch.cu_q_lens,
                layer=place.layer,
                group=place.group,
                scale=self.scale,
                sliding_window=place.window,
                soft_cap=self.soft_cap,
                is_causal=self.is_causal,
                sinks=None if self.sinks is None else self.sinks[...],
            )
        with stage("out"):
            return self.o(attended.reshape(num_tokens, -1)), cache

    def _in_heads(self, x: Float[Array, "tokens in"], norm: RMSNorm | None) -> Float[Array, "tokens heads head_dim"]:
        if norm is not None and self.norms_whole_rows:
            x = norm(x)
        x = x.reshape(x.shape[0], -1, self.head_dim)
        return x if norm is None or self.norms_whole_rows else norm(x)
