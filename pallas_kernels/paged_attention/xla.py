"""Paged attention as two device-side loops, for any device that XLA compiles for.

One-token sequences go in blocks of `DECODE_BLOCK_SEQS`, longer ones in blocks of `PREFILL_BLOCK_ROWS` query rows of one sequence.
Each block walks its own pages in chunks with a running softmax; both loops and both walks have run-time trip counts, so the
cost follows what is live, not the bucket. A gather of one row per token would cost seconds for a step of 512 tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

DECODE_BLOCK_SEQS = 8
PREFILL_BLOCK_ROWS = 64
CHUNK_TOKENS = 128
"""Positions per step of the walk; gathering more than a chunk at a time falls out of the cache."""


class _Walk(NamedTuple):
    """Running softmax of one block: maximum, sum, weighted values."""

    peak: Float[Array, "blocks kv_heads rows"]
    total: Float[Array, "blocks kv_heads rows"]
    values: Float[Array, "blocks kv_heads rows head_dim"]


class _Pool(NamedTuple):
    """What every block reads, and the scalars of the op."""

    k_pages: Float[Array, "layers pages kv_heads page_size head_dim"]
    v_pages: Float[Array, "layers pages kv_heads page_size head_dim"]
    page_tables: Int32[Array, "groups seqs max_pages"]
    layer: int | Int32[Array, ""]
    group: int | Int32[Array, ""]
    pages_per_chunk: int
    scale: float | Float[Array, ""]
    sliding_window: int | Int32[Array, ""] | None
    soft_cap: float | None
    sinks: Float[Array, "kv_heads heads"] | None
    precision: lax.Precision | None
    v_scale: float | Float[Array, ""]


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    page_tables: Int32[Array, "*groups seqs max_pages"],
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    *,
    layer: int | Int32[Array, ""] | None,
    group: int | Int32[Array, ""] | None,
    scale: float | Float[Array, ""],
    sliding_window: int | Int32[Array, ""] | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    is_causal: bool,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
) -> Float[Array, "tokens heads head_dim"]:
    """The contract of `pallas_kernels.paged_attention`."""
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    if group is None:
        page_tables, group = page_tables[None], 0
    num_kv_heads, page_size = k_pages.shape[2:4]
    heads_per_kv_head = q.shape[1] // num_kv_heads
    num_tokens, num_heads, head_dim = q.shape
    pages_per_chunk = max(1, min(CHUNK_TOKENS // page_size, page_tables.shape[2]))
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None  # never TF32

    # A one-row low-precision dot is pathologically slow in XLA's CPU backend (about 200 ms a step), so a lone head gets a twin.
    # The rows of a block are laid out beside the query heads that share a KV head: [.., kv_heads, rows * heads, head_dim].
    twin = 2 if heads_per_kv_head == 1 and q.dtype != jnp.float32 else 1
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, heads_per_kv_head), twin, axis=1)
    scale = scale * k_scale
    pool = _Pool(k_pages, v_pages, page_tables, layer, group, pages_per_chunk, scale, sliding_window, soft_cap, sinks, precision, v_scale)
    heads_first = q.reshape(num_tokens, num_kv_heads, heads_per_kv_head, head_dim)
    heads_first = jnp.repeat(heads_first, twin, axis=2) if twin > 1 else heads_first
    block_rows = min(PREFILL_BLOCK_ROWS, num_tokens)
    # Rows past the end, so that a block at the end of the batch is never clamped back onto earlier rows.
    heads_first = jnp.pad(heads_first, ((0, block_rows), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros(heads_first.shape, q.dtype)
    out = _decode_blocks(heads_first, out, pool, kv_lens, cu_q_lens)
    if num_tokens > 1:
        out = _prefill_blocks(heads_first, out, pool, kv_lens, cu_q_lens, block_rows, is_causal)
    return out[:num_tokens, :, ::twin].reshape(num_tokens, num_heads, head_dim)


def _decode_blocks(q: Array, out: Array, pool: _Pool, kv_lens: Array, cu_q_lens: Array) -> Array:
    num_seqs = kv_lens.shape[0]
    block_seqs = min(DECODE_BLOCK_SEQS, num_seqs)
    is_decode = cu_q_lens[1:] - cu_q_lens[:-1] == 1
    # One-token sequences first, by length, so that the members of a block walk about equally far.
    order = jnp.argsort(jnp.where(is_decode, kv_lens, jnp.iinfo(jnp.int32).max)).astype(jnp.int32)
    order = jnp.pad(order, (0, block_seqs))
    num_decodes = jnp.sum(is_decode, dtype=jnp.int32)

    def block(index: Array, out: Array) -> Array:
        seqs = lax.dynamic_slice(order, (index * block_seqs,), (block_seqs,))
        is_member = index * block_seqs + jnp.arange(block_seqs) < num_decodes
        lens = jnp.where(is_member, kv_lens[seqs], 0)
        rows = jnp.where(is_member, cu_q_lens[seqs], out.shape[0])
        queries = q.at[rows].get(mode="fill", fill_value=0)
        positions = jnp.broadcast_to((lens - 1)[:, None], (block_seqs, q.shape[2]))
        values = _attend(queries, positions, lens, seqs, pool)
        return out.at[rows].set(values.astype(out.dtype), mode="drop")

    return lax.fori_loop(0, -(-num_decodes // block_seqs), block, out)


def _prefill_blocks(q: Array, out: Array, pool: _Pool, kv_lens: Array, cu_q_lens: Array, block_rows: int, is_causal: bool) -> Array:
    num_kv_heads, num_heads, head_dim = q.shape[1:]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    num_blocks = jnp.where(q_lens > 1, -(-q_lens // block_rows), 0)
    block_ends = jnp.cumsum(num_blocks)

    def block(index: Array, out: Array) -> Array:
        seq = jnp.sum(block_ends <= index, dtype=jnp.int32)
        first = (index - (block_ends[seq] - num_blocks[seq])) * block_rows
        start = cu_q_lens[seq] + first
        row = first + jnp.arange(block_rows)
        is_own = row < q_lens[seq]
        # A row that sees everything stands at the last position, as far as attention goes.
        position = jnp.where(is_own, kv_lens[seq] - q_lens[seq] + row if is_causal else kv_lens[seq] - 1, -1)
        lens = jnp.minimum(kv_lens[seq], jnp.max(position) + 1)[None]
        queries = lax.dynamic_slice_in_dim(q, start, block_rows)
        queries = queries.transpose(1, 0, 2, 3).reshape(1, num_kv_heads, block_rows * num_heads, head_dim)
        values = _attend(queries, jnp.repeat(position, num_heads)[None], lens, seq[None], pool)
        values = values.reshape(num_kv_heads, block_rows, num_heads, head_dim).transpose(1, 0, 2, 3)
        others = lax.dynamic_slice_in_dim(out, start, block_rows)
        values = jnp.where(is_own[:, None, None, None], values.astype(out.dtype), others)
        return lax.dynamic_update_slice_in_dim(out, values, start, 0)

    return lax.fori_loop(0, block_ends[-1], block, out)


def _attend(
    queries: Float[Array, "blocks kv_heads rows head_dim"],
    positions: Int32[Array, "blocks rows"],
    lens: Int32[Array, "blocks"],
    seqs: Int32[Array, "blocks"],
    pool: _Pool,
) -> Float[Array, "blocks kv_heads rows head_dim"]:
    """Rows of each block over the first `lens` positions of its sequence; a row at position -1 sees nothing and gives 0."""
    page_size, head_dim = pool.k_pages.shape[3:]
    num_kv_heads = pool.k_pages.shape[2]
    chunk = pool.pages_per_chunk * page_size
    compute_dtype = queries.dtype
    # Each block walks from the first chunk that it sees to its last one.
    first_seen, first_chunk = jnp.zeros_like(lens), jnp.zeros_like(lens)
    if pool.sliding_window is not None:
        lowest = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max), axis=1)
        first_seen = jnp.maximum(0, lowest - pool.sliding_window + 1)
        first_chunk = first_seen // chunk

    def gather(pages: Array, table: Array, keep: Bool[Array, "blocks chunk"] | None) -> Array:
        kv_head = jnp.arange(num_kv_heads)[None, :, None]
        own = pages[pool.layer, table[:, None, :], kv_head].reshape(table.shape[0], num_kv_heads, chunk, head_dim)
        own = own if keep is None else jnp.where(keep[:, None, :, None], own, 0)
        return own.astype(compute_dtype)

    def step(index: Array, walk: _Walk) -> _Walk:
        own_chunk = (first_chunk + index)[:, None]
        # A table can be cut anywhere, and a block can be at its end before others are: beyond it, page 0 is read and masked.
        entries = own_chunk * pool.pages_per_chunk + jnp.arange(pool.pages_per_chunk)
        table = pool.page_tables.at[pool.group, seqs[:, None], entries].get(mode="fill", fill_value=0)
        kv_position = own_chunk * chunk + jnp.arange(chunk)
        is_seen = (kv_position < lens[:, None]) & (kv_position >= first_seen[:, None])
        keys = gather(pool.k_pages, table, None)
        logits = jnp.einsum("bkrd,bkpd->bkrp", queries, keys, preferred_element_type=jnp.float32, precision=pool.precision) * pool.scale
        if pool.soft_cap is not None:
            logits = pool.soft_cap * jnp.tanh(logits / pool.soft_cap)
        visible = is_seen[:, None] & (kv_position[:, None] <= positions[:, :, None])
        if pool.sliding_window is not None:
            visible &= kv_position[:, None] > positions[:, :, None] - pool.sliding_window
        logits = jnp.where(visible[:, None], logits, -jnp.inf)
        # Values that no row may see can be NaN, and 0 * NaN is NaN: they are masked as well as the logits.
        values = gather(pool.v_pages, table, is_seen)
        peak = jnp.maximum(walk.peak, logits.max(-1))
        # A row that has seen nothing yet has peak -inf; exp(-inf - finite) is the 0 it needs.
        finite_peak = jnp.where(peak == -jnp.inf, 0, peak)
        weights = jnp.exp(logits - finite_peak[..., None])
        decay = jnp.exp(walk.peak - finite_peak)
        summed = jnp.einsum(
            "bkrp,bkpd->bkrd", weights.astype(compute_dtype), values, preferred_element_type=jnp.float32, precision=pool.precision
        )
        return _Walk(peak, walk.total * decay + weights.sum(-1), walk.values * decay[..., None] + summed)

    shape = queries.shape[:-1]
    start = _Walk(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    if pool.sinks is not None:  # what a row has seen before its first position
        of_rows = jnp.tile(pool.sinks, (1, shape[-1] // pool.sinks.shape[1]))
        start = start._replace(peak=jnp.broadcast_to(of_rows, shape), total=jnp.ones(shape))
    num_chunks = jnp.max(-(-lens // chunk) - first_chunk)
    end = lax.fori_loop(0, num_chunks, step, start)
    return end.values / jnp.where(end.total == 0, 1, end.total)[..., None] * pool.v_scale
