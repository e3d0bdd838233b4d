"""One-token sequences over their pages on Hopper: a persistent kernel that writes float32 partial results, and one that combines them.

A CTA walks its range of the work (`decode_work`) block by block. A producer warpgroup fetches pages by bulk copies into a ring of shared
memory and runs ahead over the borders between sequences; a compute warpgroup multiplies. The query heads that share a KV head fill the
64-row tile of the matrix unit (the rest of the tile is never written out), since at one token per sequence the memory is the limit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic_tiles import LOG2E, NOTHING, ROWS, SMEM_BYTES, column_slices, tile
from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS, SEQ, DecodeWork, by_row_of_q, segment_of, share_out
from pallas_kernels.paged_attention.mosaic_combine import combine

KV_BYTES = 128 * 1024
"""Shared memory for pages in flight. By Little's law about 36 KB a multiprocessor cover 1 us of latency at 4.8 TB/s."""

MAX_STAGES = 8
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 232, 40


class DecodeShape(NamedTuple):
    """What the kernel is built for.

    Attributes:
        page_dtype: of the pool; FP8 pages are widened to float16 before they are multiplied.
        unit: tokens that one copy fetches: a page, or 64 tokens of a larger one.
        rows: of a tile that are fetched and written: query heads of one KV head, rounded up to 8.
        stride: query heads from one KV head to the next, a divisor of `rows`; where it is less than that, a tile holds the query heads of
            several KV heads, of which only its own count.
    """

    num_kv_heads: int
    rows: int
    stride: int
    head_dim: int
    unit: int
    units_per_page: int
    q_dtype: Any
    page_dtype: Any
    soft_cap: float | None
    num_ctas: int
    stages: int

    @property
    def is_widened(self) -> bool:
        return self.page_dtype != self.q_dtype


def num_stages(head_dim: int, q_dtype: Any, page_dtype: Any) -> int:
    """Blocks of keys and of values in flight: what shared memory holds beside the other tiles, at most `KV_BYTES`."""
    stage_bytes = 2 * BLOCK_TOKENS * head_dim * jnp.dtype(page_dtype).itemsize
    # Queries, float32 results and the widened keys and values.
    other_bytes = ROWS * head_dim * (2 + 4 + (0 if q_dtype == page_dtype else 2 + 2))
    return min((SMEM_BYTES - other_bytes) // stage_bytes, KV_BYTES // stage_bytes, MAX_STAGES)


def in_flight_bytes(head_dim: int, q_dtype: Any, page_dtype: Any) -> int:
    """Bytes of keys and values that a CTA can have asked for and not yet used."""
    return num_stages(head_dim, q_dtype, page_dtype) * 2 * BLOCK_TOKENS * head_dim * jnp.dtype(page_dtype).itemsize


def can_share_tiles(num_heads: int, heads_per_kv_head: int, head_dim: int) -> bool:
    """Whether tiles of queries can be cut out of q as it is, though a tile is the heads of several KV heads.

    Tiles then begin at multiples of 8 heads, and a KV head's results at multiples of 128 bytes in shared memory, as bulk copies want it.
    """
    return num_heads % 8 == 0 and 8 % heads_per_kv_head == 0 and heads_per_kv_head * head_dim % 64 == 0


class _Rings(NamedTuple):
    """Shared memory of a CTA and the barriers that hand it to and fro."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    q_free: Any
    k_free: Any
    v_free: Any


def _produce(shape: DecodeShape, drains: bool, q: Any, pools: Any, tables: Any, work: Any, first_row: Any, rings: _Rings) -> None:
    """Fetches queries and pages in the order in which they are needed, as far ahead as the rings hold."""
    seqs, ctas = work
    cta = lax.axis_index("cta")
    units_per_block = BLOCK_TOKENS // shape.unit
    units_per_page = jnp.int32(shape.units_per_page)
    tiles_per_row = shape.num_kv_heads * shape.stride // shape.rows
    pool_row = first_row[0]

    def fetch_segment(index: Array, done: Array) -> Array:
        own = segment_of(shape.num_kv_heads, seqs, ctas, cta, index)

        @pl.when(index > 0)
        def _() -> None:
            plgpu.barrier_wait(rings.q_free)

        q_tile = own.q_row * tiles_per_row + lax.div(own.kv_head * shape.stride, jnp.int32(shape.rows))
        plgpu.copy_gmem_to_smem(q.at[q_tile], rings.q.at[pl.ds(0, shape.rows)], rings.q_full)

        def fetch_block(step: Array, _: None) -> None:
            block, count = own.first_block + step, done + step
            slot = lax.rem(count, jnp.int32(shape.stages))
            for pool, ring, full, free in zip(
                pools, (rings.k, rings.v), (rings.k_full, rings.v_full), (rings.k_free, rings.v_free), strict=True
            ):

                @pl.when(count >= shape.stages)
                def _(free: Any = free) -> None:
                    plgpu.barrier_wait(free.at[slot])

                for part in range(units_per_block):
                    unit = block * units_per_block + part
                    is_seen = (unit * shape.unit < own.kv_len) & ((unit + 1) * shape.unit > own.first_seen)

                    @pl.when(is_seen)
                    def _(pool: Any = pool, ring: Any = ring, full: Any = full, unit: Array = unit, part: int = part) -> None:
                        page = tables[own.seq, lax.div(unit, units_per_page)]
                        row = pool_row + (page * shape.num_kv_heads + own.kv_head) * units_per_page + lax.rem(unit, units_per_page)
                        plgpu.copy_gmem_to_smem(pool.at[row], ring.at[slot, pl.ds(part * shape.unit, shape.unit)], full.at[slot])

                    # What nobody sees is not fetched; the block waits for as many arrivals all the same.
                    @pl.when(jnp.logical_not(is_seen))
                    def _(full: Any = full) -> None:
                        plgpu.barrier_arrive(full.at[slot])

        lax.fori_loop(0, own.num_blocks, fetch_block, None)
        return done + own.num_blocks

    num_segments = ctas[cta, 1]
    done = lax.fori_loop(0, num_segments, fetch_segment, jnp.int32(0))
    if drains:

        @pl.when(num_segments > 0)
        def _() -> None:
            plgpu.barrier_wait(rings.q_free)

        def drain(count: Array, _: None) -> None:
            plgpu.barrier_wait(rings.k_free.at[lax.rem(count, jnp.int32(shape.stages))])
            plgpu.barrier_wait(rings.v_free.at[lax.rem(count, jnp.int32(shape.stages))])

        lax.fori_loop(jnp.maximum(done - shape.stages, 0), done, drain, None)


def _consume(shape: DecodeShape, is_interpreted: bool, work: Any, scale: Any, outs: Any, rings: _Rings, wide: Any, o_smem: Any) -> None:
    """Attention of each segment's rows over its blocks, with a running softmax in base 2."""
    seqs, ctas = work
    cta = lax.axis_index("cta")
    parts, part_lses = outs
    head_dim, compute_dtype = shape.head_dim, jnp.float16 if shape.is_widened else shape.q_dtype
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    qk_scale = scale[0]

    def positions(dimension: int, width: int) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, (BLOCK_TOKENS, width), dimension, layout=plgpu.Layout.WGMMA)

    def widen(ring: Any, slot: Array, wide_tile: Any) -> None:
        for columns in column_slices(head_dim, shape.page_dtype):
            wide_tile[:, columns] = plgpu.layout_cast(ring[slot, :, columns], plgpu.Layout.WGMMA).astype(compute_dtype)
        plgpu.commit_smem()

    def attend_segment(index: Array, done: Array) -> Array:
        own = segment_of(shape.num_kv_heads, seqs, ctas, cta, index)
        plgpu.barrier_wait(rings.q_full)

        def attend_block(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            values, peak, total = carry
            begin = (own.first_block + step) * BLOCK_TOKENS
            slot = lax.rem(done + step, jnp.int32(shape.stages))
            plgpu.barrier_wait(rings.k_full.at[slot])
            if shape.is_widened:
                widen(rings.k, slot, wide[0])
                plgpu.barrier_arrive(rings.k_free.at[slot])
            keys = wide[0] if shape.is_widened else rings.k.at[slot]

            def multiply_keys(logits: Any) -> Array:
                plgpu.wgmma(logits, rings.q, keys.transpose((1, 0)))
                return logits[...]

            logits = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, BLOCK_TOKENS), jnp.float32))
            if not shape.is_widened:
                plgpu.barrier_arrive(rings.k_free.at[slot])
            logits = logits * qk_scale
            if shape.soft_cap is not None:
                logits = jnp.tanh(logits) * (shape.soft_cap * LOG2E)
            position = positions(1, BLOCK_TOKENS) + begin
            logits = jnp.where((position >= own.first_seen) & (position < own.kv_len), logits, NOTHING)
            new_peak = jnp.maximum(peak, logits.max(axis=1))
            decay = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
            total = total * decay + weights.sum(axis=1)
            values = values * lax.broadcast_in_dim(decay, values.shape, [0])
            weights = weights.astype(compute_dtype)

            plgpu.barrier_wait(rings.v_full.at[slot])
            if shape.is_widened:
                widen(rings.v, slot, wide[1])
                plgpu.barrier_arrive(rings.v_free.at[slot])
            v_tile = wide[1] if shape.is_widened else rings.v.at[slot]

            # The rest of a last page, and what was not fetched, may be NaN, and 0 * NaN is NaN: values are masked as well as logits.
            @pl.when((begin + BLOCK_TOKENS > own.kv_len) | (begin < own.first_seen))
            def _() -> None:
                for columns in column_slices(head_dim, compute_dtype):
                    position = positions(0, columns.size) + begin
                    is_seen = (position >= own.first_seen) & (position < own.kv_len)
                    old = plgpu.layout_cast(v_tile[:, columns], plgpu.Layout.WGMMA)
                    v_tile[:, columns] = jnp.where(is_seen, old, jnp.zeros_like(old))
                plgpu.commit_smem()

            if is_interpreted:
                # The interpreter has no product with a left side in registers, and wants reads ordered before the next copy.
                values = values + jnp.dot(weights, v_tile[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
            else:

                def multiply_values(accumulator: Any) -> None:
                    plgpu.wgmma(accumulator, weights, v_tile)

                values = pl.run_state(multiply_values)(plgpu.ACC.init(values))
            if not shape.is_widened:
                plgpu.barrier_arrive(rings.v_free.at[slot])
            return values, new_peak, total

        start = (
            plgpu.layout_cast(jnp.full((ROWS, head_dim), 0, jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), NOTHING, jnp.float32), row_layout),
            plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), row_layout),
        )
        values, peak, total = lax.fori_loop(0, own.num_blocks, attend_block, start)
        plgpu.barrier_arrive(rings.q_free)
        # The copies of the segment before must have read what is written now.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = values * lax.broadcast_in_dim(1 / total, values.shape, [0])
        plgpu.commit_smem()
        part = own.pair + cta
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, shape.rows)], parts.at[part])
        part_lses[part] = peak + jnp.log2(total)
        return done + own.num_blocks

    lax.fori_loop(0, ctas[cta, 1], attend_segment, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def attend_parts(
    shape: DecodeShape,
    q: Float[Array, "rows heads head_dim"],
    k_units: Float[Array, "pages page_size head_dim"],
    v_units: Float[Array, "pages page_size head_dim"],
    page_tables: Int32[Array, "seqs max_pages"],
    work: DecodeWork,
    first_row: Int32[Array, "1"],
    scale: Float[Array, "1"],
    interpret: Any = None,
) -> tuple[Float[Array, "blocks heads head_dim"], Float[Array, "blocks 64"]]:
    """The persistent kernel: normalized partial results and the base-2 logarithms of their weights."""
    is_interpreted = interpret is not None
    num_parts = work.seqs.shape[0] * shape.num_kv_heads + shape.num_ctas
    units_per_block = BLOCK_TOKENS // shape.unit

    def paged_decode(q_ref: Any, k_ref: Any, v_ref: Any, tables: Any, seqs: Any, ctas: Any, row: Any, scale_ref: Any, *refs: Any) -> None:
        parts, part_lses, q_smem, k_smem, v_smem, o_smem, *more = refs
        wide, barriers = (more[:2], more[2:]) if shape.is_widened else (None, more)
        rings = _Rings(q_smem, k_smem, v_smem, *barriers)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            # The interpreter insists that every completed phase of a barrier is seen; a GPU does not mind.
            _produce(shape, is_interpreted, q_ref, (k_ref, v_ref), tables, (seqs, ctas), row, rings)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _consume(shape, is_interpreted, (seqs, ctas), scale_ref, (parts, part_lses), rings, wide, o_smem)

    head_dim, stages = shape.head_dim, shape.stages
    wide_tiles = [tile((BLOCK_TOKENS, head_dim), jnp.float16)] * 2 if shape.is_widened else []
    run = plgpu.kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct((num_parts, shape.rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, ROWS), jnp.float32),
        ),
        grid=(shape.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            tile((ROWS, head_dim), q.dtype),
            tile((stages, BLOCK_TOKENS, head_dim), shape.page_dtype),
            tile((stages, BLOCK_TOKENS, head_dim), shape.page_dtype),
            tile((ROWS, head_dim), jnp.float32),
            *wide_tiles,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=units_per_block, num_barriers=stages),
            plgpu.Barrier(num_arrivals=units_per_block, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": interpret} if is_interpreted else {}),
    )
    return run(q, k_units, v_units, page_tables, work.seqs, work.ctas, first_row, scale)


@functools.partial(jax.jit, static_argnames=("soft_cap", "num_ctas", "interpret"))
def decode(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "layers pages kv_heads page_size head_dim"],
    page_tables: Int32[Array, "groups seqs max_pages"],
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    layer: Int32[Array, ""],
    group: Int32[Array, ""],
    qk_scale: Float[Array, ""],
    v_scale: Float[Array, ""],
    sliding_window: Int32[Array, ""] | None,
    sinks: Float[Array, "heads"] | None,
    *,
    soft_cap: float | None,
    num_ctas: int,
    interpret: Any = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Rows of one-token sequences attended; all other rows are 0. `qk_scale` multiplies the products of queries and stored keys."""
    num_tokens, num_heads, head_dim = q.shape
    num_layers, num_pages, num_kv_heads, page_size, _ = k_pages.shape
    heads_per_kv_head = num_heads // num_kv_heads
    unit = min(page_size, BLOCK_TOKENS)
    rows = -(-heads_per_kv_head // 8) * 8
    shape = DecodeShape(
        num_kv_heads=num_kv_heads,
        rows=rows,
        stride=heads_per_kv_head if can_share_tiles(num_heads, heads_per_kv_head, head_dim) else rows,
        head_dim=head_dim,
        unit=unit,
        units_per_page=page_size // unit,
        q_dtype=q.dtype,
        page_dtype=k_pages.dtype,
        soft_cap=soft_cap,
        num_ctas=num_ctas,
        stages=num_stages(head_dim, q.dtype, k_pages.dtype),
    )
    work = share_out(kv_lens, cu_q_lens, sliding_window, num_tokens=num_tokens, num_kv_heads=num_kv_heads, num_ctas=num_ctas)
    # The group's tables are found by row, so that they are never copied out of all groups' tables.
    num_groups, num_seqs, max_pages = page_tables.shape
    work = work._replace(seqs=work.seqs.at[:, SEQ].add(group * num_seqs))
    # Page numbers are not negative: this makes an array of what is a slice of the packed step, which would keep the kernel out of the
    # step's command buffer.
    page_tables = jnp.maximum(page_tables.reshape(num_groups * num_seqs, max_pages), 0)

    def in_tiles(x: Array, *others: int) -> Array:  # all heads of all rows -> [tiles, rows, *others]
        by_kv_head = x.reshape(-1, heads_per_kv_head, *others)
        padded = jnp.pad(by_kv_head, ((0, 0), (0, max(shape.stride - heads_per_kv_head, 0)), *((0, 0) for _ in others)))
        return padded.reshape(-1, rows, *others)

    queries = in_tiles(q.astype(jnp.float16) if shape.is_widened else q, head_dim)
    units = (num_layers * num_pages * num_kv_heads * shape.units_per_page, unit, head_dim)
    first_row = (layer * (num_pages * num_kv_heads * shape.units_per_page)).reshape(1)
    qk_scale = jnp.asarray(qk_scale * (LOG2E if soft_cap is None else 1 / soft_cap), jnp.float32).reshape(1)
    parts, lses = attend_parts(
        shape, queries, k_pages.reshape(units), v_pages.reshape(units), page_tables, work, first_row, qk_scale, interpret
    )
    # Where rows of q are few, those of other sequences are combined too, from no parts, to 0; else that would cost more than a scatter.
    has_few_rows = num_tokens <= num_seqs
    values = combine(
        parts,
        lses,
        by_row_of_q(work, num_tokens) if has_few_rows else work.pairs,
        jnp.asarray(v_scale, jnp.float32).reshape(1),
        None if sinks is None else in_tiles(sinks.astype(jnp.float32) * LOG2E),
        num_kv_heads=num_kv_heads,
        heads_per_kv_head=heads_per_kv_head,
        stride=shape.stride,
        dtype=q.dtype,
        interpret=interpret,
    ).reshape(-1, num_heads, head_dim)
    return values if has_few_rows else jnp.zeros_like(q).at[work.rows].set(values, mode="drop")
