"""Normalization."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxpaged.layers.shards import TENSOR_AXES, add_up
from jaxpaged.stages import stage
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nnx.Module):
    """Root mean square normalization, computed in float32 (Zhang & Sennrich 2019).

    Args:
        offset: added to the weight; 1 in models whose weights are kept around 0.
        is_scaled_wide: whether the weight multiplies in float32, before the result is rounded to x's type, or after.
        cut_over: the axes over which rows are dealt out, where several devices have a part of each.
    """

    def __init__(
        self,
        embed: int,
        eps: float,
        dtype: jax.typing.DTypeLike,
        *,
        offset: float = 0.0,
        is_scaled_wide: bool = False,
        cut_over: tuple[str, ...] = TENSOR_AXES,
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((embed,), dtype))
        self.eps, self.offset, self.is_scaled_wide = eps, offset, is_scaled_wide
        self.width, self.cut_over = embed, cut_over

    @stage("norm")
    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        if self.weight.shape[-1] == self.width:
            return rms_norm(x, self.weight[...], eps=self.eps, offset=self.offset, is_scaled_wide=self.is_scaled_wide)
        wide = x.astype(jnp.float32)
        mean = add_up([(jnp.sum(wide * wide, axis=-1, keepdims=True), self.cut_over)]) / self.width
        normed = wide * lax.rsqrt(mean + self.eps)
        if self.is_scaled_wide:
            return (normed * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.weight[...]


class LayerNorm(nnx.Module):
    """Layer normalization, computed in float32 (Ba et al. 2016)."""

    def __init__(self, embed: int, eps: float, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((embed,), dtype))
        self.bias = nnx.Param(jnp.zeros((embed,), dtype))
        self.eps = eps

    @stage("norm")
    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        return (normed * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)
