"""Query spans of more than one row over their pages on Hopper: two compute warpgroups share each block of keys and values.

A tile holds the rows of some tokens of one sequence, for the query heads of one KV head: row r is token r // heads_per_kv_head. Blocks
that no row of a tile sees, before its window and after its last token, are neither fetched nor computed.
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
from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS
from pallas_kernels.paged_attention.prefill_work import (
    FIRST_BLOCK,
    FIRST_POSITION,
    FIRST_SEEN,
    NUM_BLOCKS,
    NUM_TOKENS,
    SEQ,
    cut_into_tiles,
)

NUM_COMPUTE = 2
TILE_ROWS = NUM_COMPUTE * ROWS
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 232, 40
MAX_STAGES = 4

MAX_WIDENED_HEAD_DIM = 128
"""With FP8 pages: at 256, results, logits and what is being widened need 68 bytes more than the 168 registers of a thread."""


class PrefillShape(NamedTuple):
    """What the kernel is built for; see `DecodeShape` for page_dtype and unit."""

    num_kv_heads: int
    heads_per_kv_head: int
    head_dim: int
    unit: int
    units_per_page: int
    q_dtype: Any
    page_dtype: Any
    soft_cap: float | None
    has_window: bool
    has_sinks: bool

    @property
    def is_widened(self) -> bool:
        return self.page_dtype != self.q_dtype

    @property
    def compute_dtype(self) -> Any:
        return jnp.float16 if self.is_widened else self.q_dtype

    @property
    def stages(self) -> int:
        return num_stages(self.head_dim, self.q_dtype, self.page_dtype)


def num_stages(head_dim: int, q_dtype: Any, page_dtype: Any) -> int:
    """Blocks of keys and of values in flight: what shared memory holds beside queries and widened tiles."""
    is_widened = q_dtype != page_dtype
    stage_bytes = 2 * BLOCK_TOKENS * head_dim * jnp.dtype(page_dtype).itemsize
    other_bytes = TILE_ROWS * head_dim * (2 + (2 if is_widened else 0))
    return min((SMEM_BYTES - other_bytes) // stage_bytes, MAX_STAGES * (2 if is_widened else 1))


def in_flight_bytes(head_dim: int, q_dtype: Any, page_dtype: Any) -> int:
    """Bytes of keys and values that a CTA can have asked for and not yet used."""
    return num_stages(head_dim, q_dtype, page_dtype) * 2 * BLOCK_TOKENS * head_dim * jnp.dtype(page_dtype).itemsize


class _Tile(NamedTuple):
    """What a CTA does."""

    kv_head: Array
    seq: Array
    first_position: Array
    end: Array
    first_seen: Array
    first_block: Array
    num_blocks: Array


class _Rings(NamedTuple):
    """Shared memory of a CTA and the barriers that hand it to and fro."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    masked: Any


def _produce(shape: PrefillShape, drains: bool, own: _Tile, q: Any, pools: Any, tables: Any, first_row: Any, rings: _Rings) -> None:
    units_per_block = BLOCK_TOKENS // shape.unit
    units_per_page = jnp.int32(shape.units_per_page)
    pool_row, tile_index = first_row[0], lax.axis_index("tile")
    for part in range(NUM_COMPUTE):
        rows = pl.ds(part * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q.at[tile_index, own.kv_head, rows], rings.q.at[part], rings.q_full.at[part])

    def fetch_block(step: Array, _: None) -> None:
        slot = lax.rem(step, jnp.int32(shape.stages))
        for pool, ring, full, free in zip(
            pools, (rings.k, rings.v), (rings.k_full, rings.v_full), (rings.k_free, rings.v_free), strict=True
        ):

            @pl.when(step >= shape.stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for part in range(units_per_block):
                unit = (own.first_block + step) * units_per_block + part
                is_seen = (unit * shape.unit < own.end) & ((unit + 1) * shape.unit > own.first_seen)

                @pl.when(is_seen)
                def _(pool: Any = pool, ring: Any = ring, full: Any = full, unit: Array = unit, part: int = part) -> None:
                    page = tables[own.seq, lax.div(unit, units_per_page)]
                    row = pool_row + (page * shape.num_kv_heads + own.kv_head) * units_per_page + lax.rem(unit, units_per_page)
                    plgpu.copy_gmem_to_smem(pool.at[row], ring.at[slot, pl.ds(part * shape.unit, shape.unit)], full.at[slot])

                @pl.when(jnp.logical_not(is_seen))
                def _(full: Any = full) -> None:
                    plgpu.barrier_arrive(full.at[slot])

    lax.fori_loop(0, own.num_blocks, fetch_block, None)
    if drains:

        def drain(step: Array, _: None) -> None:
            plgpu.barrier_wait(rings.k_free.at[lax.rem(step, jnp.int32(shape.stages))])
            plgpu.barrier_wait(rings.v_free.at[lax.rem(step, jnp.int32(shape.stages))])

        lax.fori_loop(jnp.maximum(own.num_blocks - shape.stages, 0), own.num_blocks, drain, None)


def _mask_values(shape: PrefillShape, own: _Tile, begin: Array, v_tile: Any, is_own_column: Any) -> None:
    """Zeros in the rows of values that nobody sees: they may be NaN, and 0 * NaN is NaN."""
    for index, columns in enumerate(column_slices(shape.head_dim, shape.compute_dtype)):

        @pl.when(is_own_column(index))
        def _(columns: Any = columns) -> None:
            position = plgpu.broadcasted_iota(jnp.int32, (BLOCK_TOKENS, columns.size), 0, layout=plgpu.Layout.WGMMA) + begin
            old = plgpu.layout_cast(v_tile[:, columns], plgpu.Layout.WGMMA)
            v_tile[:, columns] = jnp.where((position >= own.first_seen) & (position < own.end), old, jnp.zeros_like(old))

    plgpu.commit_smem()


def _consume(
    shape: PrefillShape, is_interpreted: bool, own: _Tile, params: Any, window: Any, sinks: Any, out: Any, rings: _Rings, wide: Any
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    head_dim, compute_dtype = shape.head_dim, shape.compute_dtype
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    q_tile = rings.q.at[warpgroup]
    qk_scale, v_scale = params[0], params[1]
    plgpu.barrier_wait(rings.q_full.at[warpgroup])

    def iota(dimension: int) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK_TOKENS), dimension, layout=plgpu.Layout.WGMMA)

    def widen(ring: Any, slot: Array) -> None:
        for columns in column_slices(head_dim, shape.page_dtype):
            wide.at[warpgroup][:, columns] = plgpu.layout_cast(ring[slot, :, columns], plgpu.Layout.WGMMA).astype(compute_dtype)
        plgpu.commit_smem()

    def attend_block(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, peak, total = carry
        begin = (own.first_block + step) * BLOCK_TOKENS
        slot = lax.rem(step, jnp.int32(shape.stages))
        plgpu.barrier_wait(rings.k_full.at[slot])
        if shape.is_widened:
            widen(rings.k, slot)
            plgpu.barrier_arrive(rings.k_free.at[slot])
        keys = wide.at[warpgroup] if shape.is_widened else rings.k.at[slot]

        def multiply_keys(logits: Any) -> Array:
            plgpu.wgmma(logits, q_tile, keys.transpose((1, 0)))
            return logits[...]

        logits = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, BLOCK_TOKENS), jnp.float32))
        if not shape.is_widened:
            plgpu.barrier_arrive(rings.k_free.at[slot])
        logits = logits * qk_scale
        if shape.soft_cap is not None:
            logits = jnp.tanh(logits) * (shape.soft_cap * LOG2E)
        own_position = own.first_position + lax.div(iota(0) + warpgroup * ROWS, jnp.int32(shape.heads_per_kv_head))
        position = iota(1) + begin
        is_seen = (position <= own_position) & (position < own.end)
        if shape.has_window:
            is_seen = is_seen & (position > own_position - window[0])
        logits = jnp.where(is_seen, logits, NOTHING)
        # A row that has seen nothing yet weighs all alike; what it adds up is wiped out by the first decay that is 0.
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        decay = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
        total = total * decay + weights.sum(axis=1)
        values = values * lax.broadcast_in_dim(decay, values.shape, [0])
        weights = weights.astype(compute_dtype)

        plgpu.barrier_wait(rings.v_full.at[slot])
        if shape.is_widened:
            widen(rings.v, slot)
            plgpu.barrier_arrive(rings.v_free.at[slot])
        v_tile = wide.at[warpgroup] if shape.is_widened else rings.v.at[slot]

        @pl.when((begin + BLOCK_TOKENS > own.end) | (begin < own.first_seen))
        def _() -> None:
            if shape.is_widened:
                _mask_values(shape, own, begin, v_tile, lambda index: index >= 0)
            else:
                # Both warpgroups read the tile: each masks columns of its own, and waits for the other.
                _mask_values(shape, own, begin, v_tile, lambda index: warpgroup == index % NUM_COMPUTE)
                plgpu.barrier_arrive(rings.masked)
                plgpu.barrier_wait(rings.masked)

        if is_interpreted:
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
    if sinks is not None:
        sink = plgpu.layout_cast(sinks[own.kv_head, warpgroup], row_layout)
        new_peak = jnp.maximum(peak, sink)
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.exp2(sink - new_peak)
        values = values * lax.broadcast_in_dim(decay, values.shape, [0])
    values = values * lax.broadcast_in_dim(v_scale / total, values.shape, [0])
    # The queries have been multiplied for the last time: their tile takes the result.
    q_tile[...] = values.astype(compute_dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_tile, out.at[lax.axis_index("tile"), own.kv_head, pl.ds(warpgroup * ROWS, ROWS)])
    plgpu.wait_smem_to_gmem(0)


def attend_tiles(
    shape: PrefillShape,
    q: Float[Array, "blocks kv_heads rows head_dim"],
    k_units: Float[Array, "pages page_size head_dim"],
    v_units: Float[Array, "pages page_size head_dim"],
    page_tables: Int32[Array, "seqs max_pages"],
    tiles: Int32[Array, "blocks 6"],
    first_row: Int32[Array, "1"],
    params: Float[Array, "2"],
    window: Int32[Array, "1"],
    sinks: Float[Array, "kv_heads 2 64"] | None,
    interpret: Any = None,
) -> Float[Array, "blocks kv_heads rows head_dim"]:
    """The kernel: each tile attended, in the compute type; tiles without blocks are left as they are."""
    is_interpreted = interpret is not None
    stages, head_dim = shape.stages, shape.head_dim
    units_per_block = BLOCK_TOKENS // shape.unit

    def paged_prefill(q_ref: Any, k_ref: Any, v_ref: Any, tables: Any, tiles_ref: Any, row: Any, params_ref: Any, *refs: Any) -> None:
        window_ref, *more = refs
        sinks_ref, *more = more if shape.has_sinks else (None, *more)
        out, q_smem, k_smem, v_smem, *more = more
        wide, *barriers = more if shape.is_widened else (None, *more)
        rings = _Rings(q_smem, k_smem, v_smem, *barriers)
        index, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
        position = tiles_ref[index, FIRST_POSITION]
        own = _Tile(
            lax.axis_index("kv_head"),
            tiles_ref[index, SEQ],
            position,
            position + tiles_ref[index, NUM_TOKENS],
            tiles_ref[index, FIRST_SEEN],
            tiles_ref[index, FIRST_BLOCK],
            tiles_ref[index, NUM_BLOCKS],
        )

        @pl.when((own.num_blocks > 0) & (warpgroup == NUM_COMPUTE))
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            _produce(shape, is_interpreted, own, q_ref, (k_ref, v_ref), tables, row, rings)

        @pl.when((own.num_blocks > 0) & (warpgroup < NUM_COMPUTE))
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _consume(shape, is_interpreted, own, params_ref, window_ref, sinks_ref, out, rings, wide)

    run = plgpu.kernel(
        paged_prefill,
        out_type=jax.ShapeDtypeStruct(q.shape, shape.compute_dtype),
        grid=(q.shape[0], shape.num_kv_heads),
        grid_names=("tile", "kv_head"),
        num_threads=NUM_COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=[
            tile((NUM_COMPUTE, ROWS, head_dim), shape.compute_dtype),
            tile((stages, BLOCK_TOKENS, head_dim), shape.page_dtype),
            tile((stages, BLOCK_TOKENS, head_dim), shape.page_dtype),
            *([tile((NUM_COMPUTE, BLOCK_TOKENS, head_dim), shape.compute_dtype)] if shape.is_widened else []),
            plgpu.Barrier(num_barriers=NUM_COMPUTE),
            plgpu.Barrier(num_arrivals=units_per_block, num_barriers=stages),
            plgpu.Barrier(num_arrivals=units_per_block, num_barriers=stages),
            plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=stages),
            plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=stages),
            plgpu.Barrier(num_arrivals=NUM_COMPUTE),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": interpret} if is_interpreted else {}),
    )
    return run(q, k_units, v_units, page_tables, tiles, first_row, params, window, *([sinks] if shape.has_sinks else []))


@functools.partial(jax.jit, static_argnames=("soft_cap", "interpret"))
def prefill(
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
    interpret: Any = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Rows of sequences with more than one row attended; all other rows are 0. See `decode` for the scales."""
    num_tokens, num_heads, head_dim = q.shape
    num_layers, num_pages, num_kv_heads, page_size, _ = k_pages.shape
    group_heads = num_heads // num_kv_heads
    unit = min(page_size, BLOCK_TOKENS)
    shape = PrefillShape(
        num_kv_heads=num_kv_heads,
        heads_per_kv_head=group_heads,
        head_dim=head_dim,
        unit=unit,
        units_per_page=page_size // unit,
        q_dtype=q.dtype,
        page_dtype=k_pages.dtype,
        soft_cap=soft_cap,
        has_window=sliding_window is not None,
        has_sinks=sinks is not None,
    )
    tokens_per_tile = TILE_ROWS // group_heads
    work = cut_into_tiles(kv_lens, cu_q_lens, sliding_window, num_tokens=num_tokens, tokens_per_tile=tokens_per_tile)
    num_groups, num_seqs, max_pages = page_tables.shape
    tiles = work.tiles.at[:, SEQ].add(group * num_seqs)

    tokens = work.first_tokens[:, None] + jnp.arange(tokens_per_tile, dtype=jnp.int32)
    tokens = jnp.where(jnp.arange(tokens_per_tile) < work.tiles[:, NUM_TOKENS, None], tokens, num_tokens)
    rows = q.at[tokens].get(mode="fill", fill_value=0)  # [tiles, tokens_per_tile, heads, head_dim]
    rows = rows.reshape(-1, tokens_per_tile, num_kv_heads, group_heads, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(-1, num_kv_heads, tokens_per_tile * group_heads, head_dim).astype(shape.compute_dtype)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, TILE_ROWS - rows.shape[2]), (0, 0)))

    units = (num_layers * num_pages * num_kv_heads * shape.units_per_page, unit, head_dim)
    first_row = (layer * (num_pages * num_kv_heads * shape.units_per_page)).reshape(1)
    params = jnp.stack([qk_scale * (LOG2E if soft_cap is None else 1 / soft_cap), v_scale]).astype(jnp.float32)
    window = jnp.zeros(1, jnp.int32) if sliding_window is None else sliding_window.reshape(1)
    row_sinks = None
    if sinks is not None:
        own_sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group_heads) * LOG2E
        row_sinks = own_sinks[:, jnp.arange(TILE_ROWS) % group_heads].reshape(num_kv_heads, NUM_COMPUTE, ROWS)
    out = attend_tiles(
        shape,
        rows,
        k_pages.reshape(units),
        v_pages.reshape(units),
        page_tables.reshape(num_groups * num_seqs, max_pages),
        tiles,
        first_row,
        params,
        window,
        row_sinks,
        interpret,
    )
    out = out[:, :, : tokens_per_tile * group_heads].reshape(-1, num_kv_heads, tokens_per_tile, group_heads, head_dim)
    out = out.transpose(0, 2, 1, 3, 4).reshape(-1, tokens_per_tile, num_heads, head_dim)
    is_owned = work.tile_of_token >= 0
    own_tile = jnp.maximum(work.tile_of_token, 0)
    values = out[own_tile, jnp.clip(jnp.arange(num_tokens) - work.first_tokens[own_tile], 0, tokens_per_tile - 1)]
    return jnp.where(is_owned[:, None, None], values.astype(q.dtype), 0)
