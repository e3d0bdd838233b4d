"""Rotary position embedding (Su et al. 2021), the half-split form of Hugging Face checkpoints."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32


class Rope(NamedTuple):
    """Cosine and sine of every token's angles; made once per step and shared by all layers."""

    cos: Float[Array, "tokens half_dim"]
    sin: Float[Array, "tokens half_dim"]

    def rotate(self, x: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
        """Turns each pair (x[i], x[i + head_dim / 2]) by its token's angle, in float32."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def make_rope(positions: Int32[Array, "tokens"], head_dim: int, theta: float) -> Rope:
    """Angles `position * theta ** (-2 i / head_dim)` of the default rope."""
    frequencies = 1.0 / (theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)))
    angles = positions.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)
    return Rope(jnp.cos(angles), jnp.sin(angles))
