"""Gated product written to be believed: all in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_product.activations import ACTIVATIONS


def gated_product(
    gate: Float[Array, "rows ffw"], up: Float[Array, "rows ffw"], *, activation: str, dtype: jax.typing.DTypeLike
) -> Float[Array, "rows ffw"]:
    """The contract of `pallas_kernels.gated_product`."""
    gate, up = (part.astype(dtype).astype(jnp.float32) for part in (gate, up))
    return (ACTIVATIONS[activation](gate) * up).astype(dtype)
