"""Feed-forward blocks."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.layers.linear import Linear


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, embed: int, ffw: int, dtype: jax.typing.DTypeLike) -> None:
        self.gate = Linear(embed, ffw, dtype)
        self.up = Linear(embed, ffw, dtype)
        self.down = Linear(ffw, embed, dtype)

    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))
