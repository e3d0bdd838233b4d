"""The rotation as XLA does it, and what all implementations share: the result's type, and the largest number of a page."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Written(NamedTuple):
    """Queries, turned, and the pools with the new keys and values."""

    q: Float[Array, "tokens heads head_dim"]
    k_pages: Float[Array, "*layers pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "*layers pages kv_heads page_size head_dim"]


def highest(dtype: Any) -> float:
    """The largest finite number of a type."""
    return float(jnp.finfo(dtype).max)


def rotate(
    x: Float[Array, "tokens heads head_dim"], cos: Float[Array, "tokens half_dim"], sin: Float[Array, "tokens half_dim"]
) -> Float[Array, "tokens heads head_dim"]:
    """Turns each pair (x[i], x[i + half_dim]) by its token's angle, in float32; dimensions from 2 * half_dim on stay as they are."""
    num_turned = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :num_turned].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if num_turned == x.shape[-1] else jnp.concatenate([turned, x[..., num_turned:]], axis=-1)
