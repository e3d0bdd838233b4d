"""Root mean square normalization for any device that XLA compiles for."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def rms_norm(
    x: Float[Array, "*rows embed"],
    weight: Float[Array, "*layers embed"],
    *,
    eps: float,
    offset: float,
    is_scaled_wide: bool,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "*rows embed"]:
    """The contract of `pallas_kernels.rms_norm`."""
    if layer is not None:
        weight = lax.dynamic_index_in_dim(weight, layer, keepdims=False)
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if is_scaled_wide:
        return (normed * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * weight
