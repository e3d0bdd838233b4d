"""Small arrays with a row each as the columns of one, so that they are taken, put or chosen at once: one kernel instead of many."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


def as_columns(arrays: Any) -> Int32[Array, "rows columns"]:
    """The leaves of `arrays` [rows] or [rows, some], of float32, int32 or booleans, side by side; bits as they are, floats first."""
    leaves = [array.reshape(array.shape[0], -1) for array in jax.tree.leaves(arrays)]
    floats = [leaf for leaf in leaves if leaf.dtype == jnp.float32]
    others = [leaf.astype(jnp.int32) for leaf in leaves if leaf.dtype != jnp.float32]
    # Bits are converted once they are together: XLA makes a kernel of every conversion before that.
    return jnp.concatenate([lax.bitcast_convert_type(jnp.concatenate(floats, axis=1), jnp.int32), *others], axis=1)


def from_columns[T](columns: Int32[Array, "rows columns"], like: T) -> T:
    """Takes `as_columns` apart again.

    Args:
        columns: of any number of rows.
        like: arrays of the types and widths that were put in.
    """
    leaves, treedef = jax.tree.flatten(like)
    taken, start = dict.fromkeys(range(len(leaves))), 0
    for index in sorted(taken, key=lambda index: leaves[index].dtype != jnp.float32):
        leaf = leaves[index]
        end = start + (leaf.shape[1] if leaf.ndim == 2 else 1)
        part = columns[:, start:end].reshape(columns.shape[0], *leaf.shape[1:])
        taken[index] = part != 0 if leaf.dtype == jnp.bool_ else lax.bitcast_convert_type(part, leaf.dtype)
        start = end
    result: T = jax.tree.unflatten(treedef, taken.values())
    return result
