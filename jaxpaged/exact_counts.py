"""Counts and places of what holds along the last axis, as sums, minima and maxima of float32, which are exact under 2 ** 24.

XLA for CPU has fast code at hand for these over floats. Over integers and booleans each is three or four kernels, in every program.
"""

import jax.numpy as jnp
from jaxtyping import Array


def count(holds: Array) -> Array:
    """How many of `holds` [..., places] do: int32 [...]."""
    return jnp.sum(holds, axis=-1, dtype=jnp.float32).astype(jnp.int32)


def first_place(holds: Array) -> Array:
    """The first of `holds` [..., places] that does: int32 [...]; the number of places if none does."""
    size = holds.shape[-1]
    return jnp.min(jnp.where(holds, jnp.arange(size, dtype=jnp.float32), size), axis=-1).astype(jnp.int32)


def last_place(holds: Array) -> Array:
    """The last of `holds` [..., places] that does: int32 [...]; the last of all if none does."""
    size = holds.shape[-1]
    last = jnp.max(jnp.where(holds, jnp.arange(size, dtype=jnp.float32), -1), axis=-1)
    return jnp.where(last < 0, size - 1, last).astype(jnp.int32)
