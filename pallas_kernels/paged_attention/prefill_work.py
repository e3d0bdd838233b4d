"""The query rows of longer spans in tiles of one sequence each, computed on the device from the lengths."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS

SEQ, FIRST_POSITION, NUM_TOKENS, FIRST_SEEN, FIRST_BLOCK, NUM_BLOCKS = range(6)
"""Columns of `PrefillWork.tiles`."""


class PrefillWork(NamedTuple):
    """Tiles of one-token sequences, of padding and beyond the last have no blocks.

    Attributes:
        tiles: of each tile its row of the page tables, the position of its first token, its tokens, the first position that any of them
            sees, the block that holds it, and the number of blocks from there to its last token.
        first_tokens: of each tile the row of q that its first token is.
        tile_of_token: of each row of q its tile, and -1 for rows that are in none.
    """

    tiles: Int32[Array, "blocks 6"]
    first_tokens: Int32[Array, "blocks"]
    tile_of_token: Int32[Array, "tokens"]


def cut_into_tiles(
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    sliding_window: int | Int32[Array, ""] | None,
    *,
    num_tokens: int,
    tokens_per_tile: int,
) -> PrefillWork:
    """Tiles of `tokens_per_tile` rows of one sequence, for every sequence with more than one; `num_tokens` is the number of rows of q."""
    num_seqs = kv_lens.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    num_tiles = jnp.where(q_lens > 1, -(-q_lens // tokens_per_tile), 0)
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    # Each sequence's last tile may be partly filled, and a sequence here has two rows at least.
    most = -(-num_tokens // tokens_per_tile) + min(num_seqs, num_tokens // 2)
    tile = jnp.arange(most, dtype=jnp.int32)
    seq = jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32)
    is_used = seq < num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    first = (tile - (ends - num_tiles)[seq]) * tokens_per_tile
    count = jnp.where(is_used, jnp.minimum(q_lens[seq] - first, tokens_per_tile), 0)
    position = kv_lens[seq] - q_lens[seq] + first
    first_seen = jnp.zeros_like(position) if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0)
    first_block = first_seen // BLOCK_TOKENS
    num_blocks = jnp.where(is_used, -(-(position + count) // BLOCK_TOKENS) - first_block, 0)
    tiles = jnp.stack([seq, position, count, first_seen, first_block, num_blocks], axis=1).astype(jnp.int32)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.sum(cu_q_lens[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    is_owned = (owner < num_seqs) & (num_tiles[jnp.minimum(owner, num_seqs - 1)] > 0)
    owner = jnp.minimum(owner, num_seqs - 1)
    tile_of_token = (ends - num_tiles)[owner] + (token - cu_q_lens[owner]) // tokens_per_tile
    return PrefillWork(tiles, jnp.where(is_used, cu_q_lens[seq] + first, num_tokens), jnp.where(is_owned, tile_of_token, -1))
