"""What a layer does when its weights are a part of the whole: all collectives of a model.

A layer knows the sizes of the whole model and sees by the shape of a weight whether it has a part of it only: then it runs on
several devices at once (`parallel.cuts` says who has what), and says here what the parts of all of them make together. Layers whose
weights are whole never come here, so a model on one device is computed as if there were no meshes.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxpaged.parallel.cuts import EXPERT, KV, TENSOR_AXES

__all__ = ["EXPERT", "KV", "TENSOR_AXES"]


def first_of_part(size: int, axes: Sequence[str]) -> Int32[Array, ""]:
    """Where this device's part of a dimension begins, whose parts have `size` numbers."""
    return lax.axis_index(tuple(axes)) * size


def counted_once(x: Array, axes: Sequence[str]) -> Array:
    """`x` on the first device along the axes and 0 on the others: for what all of them have and a sum over them shall hold once."""
    return jnp.where(lax.axis_index(tuple(axes)) == 0, x, jnp.zeros_like(x)) if axes else x


def add_up(parts: Sequence[tuple[Array, Sequence[str]]]) -> Array:
    """The sum of several terms, each of which is itself a sum over the devices along its axes: at most one collective."""
    axes = tuple(axis for axis in (EXPERT, *TENSOR_AXES) if any(axis in own for _, own in parts))
    total, *others = (counted_once(term, [axis for axis in axes if axis not in own]) for term, own in parts)
    for term in others:
        total = total + term
    return lax.psum(total, axes) if axes else total


def whole_rows(logits: Float[Array, "rows out"], vocab: int) -> Float[Array, "rows vocab"]:
    """Logits of all ids, from those of each device's own."""
    if logits.shape[-1] == vocab:
        return logits
    return lax.all_gather(logits, TENSOR_AXES, axis=1, tiled=True)[:, :vocab]
