"""Which part of the cache each persistent CTA of the decode kernel walks, computed on the device from the lengths.

The work of a step is a line of blocks of `BLOCK_TOKENS` positions: for each one-token sequence, for each KV head, the blocks that its
row sees. The line is cut into equal ranges, one a CTA, so no CTA has a block more than another that is not at the end; a range may begin
and end in the middle of a sequence. What CTA c computes of pair p (a sequence and a KV head) is a partial result, and lies at p + c: along
the line one of both grows at every border, so no two partial results share a place, and those of one pair lie side by side.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

BLOCK_TOKENS = 64
"""Positions of one step of the walk: as many rows as a warpgroup's matrix unit takes."""

SEQ, START, NUM_BLOCKS, FIRST_BLOCK, FIRST_SEEN, KV_LEN, ROW = range(7)
"""Columns of `DecodeWork.seqs`."""


class DecodeWork(NamedTuple):
    """One-token sequences first, in their order; the others have no blocks.

    Attributes:
        seqs: each one's row of the page tables, where its blocks of one KV head begin in the line if all had one KV head only, how many
            they are, the first that is seen, the first position that is seen, the length, and its row of q; the others have a row beyond
            all.
        ctas: of each CTA the first pair, the number of pairs, the begin and the end of its range.
        pairs: of each pair the place of its first partial result and how many there are.
    """

    seqs: Int32[Array, "seqs 7"]
    ctas: Int32[Array, "blocks 4"]
    pairs: Int32[Array, "rows 2"]

    @property
    def rows(self) -> Int32[Array, "seqs"]:
        """Each one's row of q."""
        return self.seqs[:, ROW]


def share_out(
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    sliding_window: int | Int32[Array, ""] | None,
    *,
    num_tokens: int,
    num_kv_heads: int,
    num_ctas: int,
) -> DecodeWork:
    """Shares the blocks of all one-token sequences out to `num_ctas` CTAs; `num_tokens` is the number of rows of q."""
    is_decode = cu_q_lens[1:] - cu_q_lens[:-1] == 1
    order = jnp.argsort(~is_decode, stable=True).astype(jnp.int32)
    lens = jnp.where(is_decode, kv_lens, 0)[order]
    rows = jnp.where(is_decode, cu_q_lens[:-1], num_tokens)[order]
    first_seen = jnp.zeros_like(lens) if sliding_window is None else jnp.maximum(lens - sliding_window, 0)
    first_block = first_seen // BLOCK_TOKENS
    num_blocks = -(-lens // BLOCK_TOKENS) - first_block
    end = jnp.cumsum(num_blocks, dtype=jnp.int32)
    start = end - num_blocks
    seqs = jnp.stack([order, start, num_blocks, first_block, first_seen, lens, rows], axis=1)

    total = end[-1] * num_kv_heads
    per_cta = jnp.maximum(-(-total // num_ctas), 1)
    low = jnp.minimum(jnp.arange(num_ctas, dtype=jnp.int32) * per_cta, total)
    high = jnp.minimum(low + per_cta, total)
    pair_start = (start[:, None] * num_kv_heads + num_blocks[:, None] * jnp.arange(num_kv_heads, dtype=jnp.int32)).reshape(-1)
    pair_blocks = jnp.repeat(num_blocks, num_kv_heads)
    # Pairs without blocks are at the end of the line, all at `total`: the last pair that begins at or before a block owns it.
    first_pair = jnp.sum(pair_start <= low[:, None], axis=1, dtype=jnp.int32) - 1
    last_pair = jnp.sum(pair_start < high[:, None], axis=1, dtype=jnp.int32) - 1
    num_pairs = jnp.where(low < high, last_pair - first_pair + 1, 0)
    ctas = jnp.stack([first_pair, num_pairs, low, high], axis=1)

    first_cta = pair_start // per_cta
    last_cta = (pair_start + pair_blocks - 1) // per_cta
    first_part = jnp.arange(pair_start.shape[0], dtype=jnp.int32) + first_cta
    pairs = jnp.stack([first_part, jnp.where(pair_blocks > 0, last_cta - first_cta + 1, 0)], axis=1)
    return DecodeWork(seqs, ctas, pairs)


def by_row_of_q(work: DecodeWork, num_tokens: int) -> Int32[Array, "rows 2"]:
    """`pairs`, for each row of q and KV head instead of each sequence and KV head; rows of no one-token sequence have no parts."""
    num_seqs = work.seqs.shape[0]
    of_seqs = work.pairs.reshape(num_seqs, -1)
    of_rows = jnp.zeros((num_tokens, of_seqs.shape[1]), jnp.int32).at[work.rows].set(of_seqs, mode="drop")
    return of_rows.reshape(-1, work.pairs.shape[1])


class Segment(NamedTuple):
    """What a CTA does of one pair: blocks `low` to `high` of the pair's, the first of them block `first_block` of the sequence."""

    pair: Array
    seq: Array
    q_row: Array
    kv_head: Array
    first_block: Array
    num_blocks: Array
    first_seen: Array
    kv_len: Array


def segment_of(num_kv_heads: int, seqs: Any, ctas: Any, cta: Array, index: Array) -> Segment:
    """Pair number `index` of a CTA, read from the arrays of `DecodeWork` by a kernel."""
    pair = ctas[cta, 0] + index
    row, kv_head = lax.div(pair, jnp.int32(num_kv_heads)), lax.rem(pair, jnp.int32(num_kv_heads))
    num_blocks = seqs[row, NUM_BLOCKS]
    start = seqs[row, START] * num_kv_heads + kv_head * num_blocks
    low = jnp.maximum(ctas[cta, 2] - start, 0)
    high = jnp.minimum(ctas[cta, 3] - start, num_blocks)
    first_block = seqs[row, FIRST_BLOCK] + low
    return Segment(pair, seqs[row, SEQ], seqs[row, ROW], kv_head, first_block, high - low, seqs[row, FIRST_SEEN], seqs[row, KV_LEN])
