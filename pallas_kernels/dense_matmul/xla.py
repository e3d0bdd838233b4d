"""Dense matmul for any device that XLA compiles for."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

_BY_ROWS_OF_BOTH = (((1,), (1,)), ((), ()))


def dense_matmul(
    x: Float[Array, "rows in"], matrix: Float[Array, "*layers out in"], *, layer: int | Int32[Array, ""] | None
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.dense_matmul`. On CPU the layer is copied out of its stack, which costs as much as few rows do."""
    own = matrix if layer is None else lax.dynamic_index_in_dim(matrix, layer, keepdims=False)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, own, _BY_ROWS_OF_BOTH, precision=precision, preferred_element_type=jnp.float32)
