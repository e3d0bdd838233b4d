"""Root mean square normalization written to be believed."""

import jax.numpy as jnp
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
    own = weight if layer is None else weight[layer]
    wide = x.astype(jnp.float32)
    normed = wide / jnp.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
    if is_scaled_wide:
        return (normed * (offset + own.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * own
