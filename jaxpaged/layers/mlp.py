"""Feed-forward blocks."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.layers.linear import Linear
from jaxpaged.stages import stage
from pallas_kernels.gated_product import ACTIVATIONS, gated_product


def known_activation(name: str) -> str:
    """The name itself. Raises UnsupportedModelError for one that is not in `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r:.60} is not supported; supported: {', '.join(map(repr, ACTIVATIONS))}")
    return name


class GatedMLP(nnx.Module):
    """SwiGLU, or GeGLU with another activation (Shazeer 2020): `down(activation(gate(x)) * up(x))`."""

    def __init__(self, embed: int, ffw: int, dtype: jax.typing.DTypeLike, *, activation: str = "silu") -> None:
        self.gate = Linear(embed, ffw, dtype)
        self.up = Linear(embed, ffw, dtype)
        self.down = Linear(ffw, embed, dtype)
        self.activation = activation

    @stage("mlp")
    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        return self.down(self._inner(x))

    @stage("mlp")
    def own_part(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        """As `Linear.own_part`, to be added up over `down.cut_over`."""
        return self.down.own_part(self._inner(x))

    def _inner(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens ffw"]:
        # Sums as they come: rounding them is part of the next op.
        return gated_product(self.gate.sums(x), self.up.sums(x), activation=self.activation, dtype=x.dtype)


class MLP(nnx.Module):
    """`down(activation(up(x)))`, with biases."""

    def __init__(self, embed: int, ffw: int, dtype: jax.typing.DTypeLike, *, activation: str) -> None:
        self.up = Linear(embed, ffw, dtype, has_bias=True)
        self.down = Linear(ffw, embed, dtype, has_bias=True)
        self.activation = activation

    @stage("mlp")
    def __call__(self, x: Float[Array, "tokens embed"]) -> Float[Array, "tokens embed"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))
