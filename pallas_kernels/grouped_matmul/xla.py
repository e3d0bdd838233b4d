"""Grouped matmul as one device-side loop, for any device that XLA compiles for.

Rows go in blocks of one group each; the loop has a run-time trip count, at most `rows / block + groups that own rows`. Its body is
compiled once, so that neither the program nor the work grows with the number of experts, and it takes the one matrix that it needs out
of the stack. `lax.ragged_dot` is lowered to a dot with every expert on the CPU.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 8, 64


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: a power of two about as large as a group is when rows are spread evenly."""
    even = -(-num_rows // num_groups)
    return min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, 1 << (even - 1).bit_length()))


def grouped_matmul(
    x: Float[Array, "rows in"],
    weights: Float[Array, "*layers experts out in"],
    group_sizes: Int32[Array, "experts"],
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.grouped_matmul`."""
    if layer is None:
        weights, layer = weights[None], 0
    num_groups, num_out, num_in = weights.shape[1:]
    rows = block_rows(x.shape[0], num_groups)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # never TF32
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    num_blocks = -(-group_sizes // rows)
    block_ends = jnp.cumsum(num_blocks, dtype=jnp.int32)
    # Rows past the end, so that a block at the end of the batch is never clamped back onto earlier rows.
    padded = jnp.pad(x, ((0, rows), (0, 0)))

    def block(index: Array, out: Array) -> Array:
        group = jnp.sum(block_ends <= index, dtype=jnp.int32)
        first = (index - (block_ends[group] - num_blocks[group])) * rows
        start = ends[group] - group_sizes[group] + first
        matrix = lax.dynamic_slice(weights, (layer, group, 0, 0), (1, 1, num_out, num_in)).reshape(num_out, num_in)
        own = lax.dynamic_slice_in_dim(padded, start, rows)
        summed = lax.dot_general(own, matrix, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
        is_own = start + jnp.arange(rows) < ends[group]
        others = lax.dynamic_slice_in_dim(out, start, rows)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_own[:, None], summed, others), start, 0)

    out = jnp.zeros((padded.shape[0], num_out), jnp.float32)
    return lax.fori_loop(0, block_ends[-1], block, out)[: x.shape[0]]
