"""Normalization."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root mean square normalization, computed in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, embed: int, eps: float, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((embed,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "rows embed"]) -> Float[Array, "rows embed"]:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.weight[...]
