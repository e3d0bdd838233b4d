"""Which rows, of which group, each block of the Hopper kernel has: computed on the device from the group sizes.

Bulk copies fetch rows from a multiple of 8 on, so a group's blocks begin at or up to 7 rows before its first row, and where they end none
but the group's own rows count: rows of two groups are never one block's. Rows that belong to no group are those of one more group, behind
the last, whose blocks are multiplied with nothing. The blocks of all groups form a line, and a group without rows has none: neither the
line nor what is read grows with the number of groups.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

ALIGNMENT = 8
"""Rows of a tile of shared memory."""

GROUP, FIRST_BLOCK, NUM_BLOCKS, FIRST_ROW, NUM_ROWS = range(5)
"""Columns of `BlockWork.blocks`."""


class BlockWork(NamedTuple):
    """The line of blocks.

    Attributes:
        blocks: of each block its group (the number of groups: of none), and of that group the first block, the number of blocks, the first
            row and the number of rows. What stands behind the last block is of no use, and valid.
        num_blocks: how many there are.
    """

    blocks: Int32[Array, "blocks 5"]
    num_blocks: Int32[Array, "1"]


def most_blocks(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Blocks that rows can make at most, however they are shared out."""
    # A group of n rows has at most n / block_rows + 1, and 7 rows more than n / block_rows begin another.
    return (num_rows + (ALIGNMENT - 1) * min(num_groups + 1, num_rows)) // block_rows + min(num_groups + 1, num_rows)


def cut_into_blocks(group_sizes: Int32[Array, "experts"], *, num_rows: int, block_rows: int) -> BlockWork:
    """Cuts each group into blocks of `block_rows` rows, a multiple of 8; the first and the last may have fewer of the group's."""
    num_groups = group_sizes.shape[0]
    unowned = num_rows - jnp.sum(group_sizes, dtype=jnp.int32)
    sizes = jnp.concatenate([group_sizes.astype(jnp.int32), unowned[None]])
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    num_blocks = jnp.where(sizes > 0, -(-((ends - sizes) % ALIGNMENT + sizes) // block_rows), 0)
    block_ends = jnp.cumsum(num_blocks, dtype=jnp.int32)
    group = jnp.arange(num_groups + 1, dtype=jnp.int32)
    of_group = jnp.stack([group, block_ends - num_blocks, num_blocks, ends - sizes, sizes], axis=1)
    index = jnp.arange(most_blocks(num_rows, num_groups, block_rows), dtype=jnp.int32)
    owner = jnp.sum(block_ends <= index[:, None], axis=1, dtype=jnp.int32)
    return BlockWork(of_group[jnp.minimum(owner, num_groups)], block_ends[-1:])
