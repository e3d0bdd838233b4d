"""Grouped matmul written to be believed: every row times every matrix, and the row's own result chosen."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def grouped_matmul(
    x: Float[Array, "rows in"],
    weights: Float[Array, "*layers experts out in"],
    group_sizes: Int32[Array, "experts"],
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.grouped_matmul`, at the cost of all experts for all rows."""
    if layer is not None:
        weights = weights[layer]
    row = jnp.arange(x.shape[0])
    group = jnp.searchsorted(jnp.cumsum(group_sizes), row, side="right")  # the number of groups for padding
    of_all = jnp.einsum("ri,goi->rgo", x.astype(jnp.float32), weights.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    is_own = group[:, None] == jnp.arange(weights.shape[0])
    # Other groups' results may be NaN, and 0 * NaN is NaN: they are left out, not multiplied by 0.
    return jnp.sum(jnp.where(is_own[..., None], of_all, 0), axis=1)
