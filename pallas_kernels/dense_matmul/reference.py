"""Dense matmul to be believed: one product in float32 of the layer taken out."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def dense_matmul(
    x: Float[Array, "rows in"], matrix: Float[Array, "*layers out in"], *, layer: int | Int32[Array, ""] | None
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.dense_matmul`."""
    own = matrix if layer is None else matrix[layer]
    return jnp.matmul(x.astype(jnp.float32), own.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
