"""Gated product for any device that XLA compiles for."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.gated_product.activations import ACTIVATIONS


def gated_product(
    gate: Float[Array, "rows ffw"], up: Float[Array, "rows ffw"], *, activation: str, dtype: jax.typing.DTypeLike
) -> Float[Array, "rows ffw"]:
    """The contract of `pallas_kernels.gated_product`."""
    return ACTIVATIONS[activation](gate.astype(dtype)) * up.astype(dtype)
