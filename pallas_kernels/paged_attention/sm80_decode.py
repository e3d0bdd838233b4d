"""One-token sequences over their pages on Ampere and Ada: a persistent kernel that writes float32 partial results.

A CTA is one warpgroup. It walks its range of the work (`decode_work`) block by block, and asks for the pages of the next blocks with
`cp.async` before it multiplies, over the borders between sequences. The query heads of a KV head are padded to the 16 rows of the matrix
unit's tile; the four warps share out the positions of a block, and then the columns of the result.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic_tiles import LOG2E, NOTHING, store_untiled, tile
from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS, DecodeWork, segment_of

MMA_ROWS = 16
"""Rows of the matrix unit's tile."""


ITEMSIZE = 2
"""Of queries and pages: bfloat16 or float16."""

REDUCTION_BYTES = 2048
"""Shared memory in which warps tell each other the largest logits and the sums; what plgpu takes unless it is told."""


def padded_rows(q: Any, k_pages: Any) -> int:
    """The query heads of a KV head, rounded up to whole tiles."""
    return -(-(q.shape[1] // k_pages.shape[-3]) // MMA_ROWS) * MMA_ROWS


def shared_bytes(rows: int, head_dim: int, stages: int) -> int:
    """Shared memory of a CTA: rings of queries, keys and values, the weights of a block, and the reductions."""
    return ITEMSIZE * (stages * (rows + 2 * BLOCK_TOKENS) * head_dim + rows * BLOCK_TOKENS) + REDUCTION_BYTES


def copy_swizzle(rows: int, width: int) -> int | None:
    """The largest swizzle with which a warpgroup can copy so many rows by `cp.async`; None: with none.

    A matrix lies in tiles of 8 rows that are as wide as the swizzle, and the four warps must share them out.
    """
    for swizzle in (128, 64, 32):
        across, rest = divmod(width * ITEMSIZE, swizzle)
        down = rows // 8
        if not rest and (down % 4 == 0 or (down % 2 == 0 and across % 2 == 0) or across % 4 == 0):
            return swizzle
    return None


def _copied_tile(shape: tuple[int, ...], dtype: Any, rows: int) -> Any:
    """Scratch whose last two axes are filled by copies of so many rows."""
    swizzle = copy_swizzle(rows, shape[-1])
    assert swizzle is not None, "refused before"
    # mypy takes the empty body of their base class's method for an abstract one.
    tiles = plgpu.TilingTransform((8, swizzle // ITEMSIZE))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def slice_width(head_dim: int) -> int:
    """Columns that are multiplied at a time: the four warps take 8 or 16 each."""
    return 64 if head_dim % 64 == 0 else 32


@runtime_checkable
class Copies(Protocol):
    """How pieces come into shared memory, in the order in which they are asked for."""

    def fetch(self, source: Any, target: Any) -> None:
        """Asks for a piece."""

    def fetch_nothing(self) -> None:
        """Stands for a piece that nobody sees, so that pieces can be counted."""

    def wait(self, num_newer: int) -> None:
        """Waits until every thread has all pieces but the newest `num_newer`, and has come here."""


@dataclasses.dataclass(frozen=True)
class AsyncCopies:
    """`cp.async`, a group a piece."""

    def fetch(self, source: Any, target: Any) -> None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def fetch_nothing(self) -> None:
        plgpu.inline_mgpu()(commit_nothing)()

    def wait(self, num_newer: int) -> None:
        plgpu.wait_gmem_to_smem(num_newer)


def commit_nothing(_: Any) -> None:
    """An empty group of copies."""
    nvvm.cp_async_commit_group()


@dataclasses.dataclass(frozen=True)
class PlainLoads:
    """Loads and stores, for the interpreter, which knows no `cp.async`: the same numbers, nothing under way."""

    def fetch(self, source: Any, target: Any) -> None:
        target[...] = source[...]

    def fetch_nothing(self) -> None:
        pass

    def wait(self, num_newer: int) -> None:
        pass


class Sm80Shape(NamedTuple):
    """What the kernel is built for.

    Attributes:
        rows: query heads of one KV head, rounded up to 16.
        unit: tokens that one copy fetches: a page, or 64 tokens of a larger one.
        stages: blocks of keys and of values in shared memory.
    """

    num_kv_heads: int
    rows: int
    head_dim: int
    unit: int
    units_per_page: int
    dtype: Any
    soft_cap: float | None
    num_ctas: int
    stages: int

    @property
    def units_per_block(self) -> int:
        return BLOCK_TOKENS // self.unit


class _Memory(NamedTuple):
    """Operands of a CTA, and its shared memory."""

    q: Any
    pools: tuple[Any, Any]
    tables: Any
    seqs: Any
    ctas: Any
    first_row: Array
    q_ring: Any
    rings: tuple[Any, Any]
    weights: Any


class _Cursor(NamedTuple):
    """The next block to ask for: its number of all blocks of the CTA, the segment, and the step in it."""

    number: Array
    segment: Array
    step: Array


def _fetch_block(shape: Sm80Shape, copies: Copies, memory: _Memory, cta: Array, cursor: _Cursor, total: Array) -> _Cursor:
    """Asks for a block: the queries of a segment that it begins, its keys, its values; always as many pieces."""
    is_real = cursor.number < total
    # Behind the last block of all the segment is the last one, of which nothing is asked.
    own = segment_of(shape.num_kv_heads, memory.seqs, memory.ctas, cta, cursor.segment)
    stages, units_per_page = jnp.int32(shape.stages), jnp.int32(shape.units_per_page)

    def fetch_if(condition: Array, source_and_target: Any) -> None:
        @pl.when(condition)
        def _() -> None:
            copies.fetch(*source_and_target())

        @pl.when(jnp.logical_not(condition))
        def _() -> None:
            copies.fetch_nothing()

    fetch_if(is_real & (cursor.step == 0), lambda: (memory.q.at[own.pair], memory.q_ring.at[lax.rem(cursor.segment, stages)]))
    slot = lax.rem(cursor.number, stages)
    for pool, ring in zip(memory.pools, memory.rings, strict=True):
        for part in range(shape.units_per_block):
            unit = (own.first_block + cursor.step) * shape.units_per_block + part
            is_seen = is_real & (unit * shape.unit < own.kv_len) & ((unit + 1) * shape.unit > own.first_seen)

            def page_and_place(pool: Any = pool, ring: Any = ring, unit: Array = unit, part: int = part) -> tuple[Any, Any]:
                page = memory.tables[own.seq, lax.div(unit, units_per_page)]
                row = memory.first_row + (page * shape.num_kv_heads + own.kv_head) * units_per_page + lax.rem(unit, units_per_page)
                return pool.at[row], ring.at[slot, pl.ds(part * shape.unit, shape.unit)]

            fetch_if(is_seen, page_and_place)
    is_last = cursor.step + 1 >= own.num_blocks
    last_segment = memory.ctas[cta, 1] - 1
    return _Cursor(
        cursor.number + 1,
        jnp.where(is_last, jnp.minimum(cursor.segment + 1, last_segment), cursor.segment),
        jnp.where(is_last, 0, cursor.step + 1),
    )


def _attend(shape: Sm80Shape, copies: Copies, memory: _Memory, cta: Array, qk_scale: Array, parts: Any, part_lses: Any) -> None:
    """Attention of each segment's rows over its blocks, with a running softmax in base 2."""
    num_segments, total = memory.ctas[cta, 1], memory.ctas[cta, 3] - memory.ctas[cta, 2]
    stages = jnp.int32(shape.stages)
    pieces_of_values = shape.units_per_block
    pieces_of_block = 1 + 2 * pieces_of_values
    width = slice_width(shape.head_dim)
    slices = [pl.ds(start, width) for start in range(0, shape.head_dim, width)]
    k_ring, v_ring = memory.rings

    cursor = _Cursor(jnp.int32(0), jnp.int32(0), jnp.int32(0))
    for _ in range(shape.stages - 1):
        cursor = _fetch_block(shape, copies, memory, cta, cursor, total)

    def attend_segment(index: Array, carry: tuple[Array, _Cursor]) -> tuple[Array, _Cursor]:
        done, cursor = carry
        own = segment_of(shape.num_kv_heads, memory.seqs, memory.ctas, cta, index)
        q_slot = lax.rem(index, stages)

        def attend_block(step: Array, carry: Any) -> Any:
            values, peak, weight_sum, cursor = carry
            begin = (own.first_block + step) * BLOCK_TOKENS
            slot = lax.rem(done + step, stages)
            # This block's keys are there; and nobody reads the block before any more, whose place the next one takes.
            copies.wait((shape.stages - 2) * pieces_of_block + pieces_of_values)
            cursor = _fetch_block(shape, copies, memory, cta, cursor, total)
            logits = jnp.zeros((shape.rows, BLOCK_TOKENS), jnp.float32)
            for columns in slices:
                logits = plgpu.mma(logits, memory.q_ring[q_slot, :, columns], k_ring.at[slot, :, columns].transpose((1, 0))[...])
            logits = logits * qk_scale
            if shape.soft_cap is not None:
                logits = jnp.tanh(logits) * (shape.soft_cap * LOG2E)
            position = lax.broadcasted_iota(jnp.int32, (shape.rows, BLOCK_TOKENS), 1) + begin
            logits = jnp.where((position >= own.first_seen) & (position < own.kv_len), logits, NOTHING)
            new_peak = jnp.maximum(peak, logits.max(axis=1))
            decay = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
            weight_sum = weight_sum * decay + weights.sum(axis=1)
            # Each warp has weights of some positions, and multiplies all positions by some columns of the values.
            memory.weights[...] = weights.astype(shape.dtype)
            copies.wait((shape.stages - 1) * pieces_of_block)

            # The rest of a last page, and what was not fetched, may be NaN, and 0 * NaN is NaN: values are masked as well as logits.
            @pl.when((begin + BLOCK_TOKENS > own.kv_len) | (begin < own.first_seen))
            def _() -> None:
                for columns in slices:
                    position = plgpu.broadcasted_iota(jnp.int32, (BLOCK_TOKENS, width), 0, layout=plgpu.Layout.WGMMA) + begin
                    is_seen = (position >= own.first_seen) & (position < own.kv_len)
                    old = plgpu.layout_cast(v_ring[slot, :, columns], plgpu.Layout.WGMMA)
                    v_ring[slot, :, columns] = jnp.where(is_seen, old, jnp.zeros_like(old))

            values = tuple(
                plgpu.mma(old * lax.broadcast_in_dim(decay, old.shape, [0]), memory.weights[...], v_ring[slot, :, columns])
                for old, columns in zip(values, slices, strict=True)
            )
            return values, new_peak, weight_sum, cursor

        start = (
            tuple(jnp.zeros((shape.rows, width), jnp.float32) for columns in slices),
            jnp.full((shape.rows,), NOTHING, jnp.float32),
            jnp.zeros((shape.rows,), jnp.float32),
            cursor,
        )
        values, peak, weight_sum, cursor = lax.fori_loop(0, own.num_blocks, attend_block, start)
        part = own.pair + cta
        for some, columns in zip(values, slices, strict=True):
            store_untiled(parts.at[part, :, columns], some * lax.broadcast_in_dim(1 / weight_sum, some.shape, [0]))
        store_untiled(part_lses.at[part], peak + jnp.log2(weight_sum))
        return done + own.num_blocks, cursor

    lax.fori_loop(0, num_segments, attend_segment, (jnp.int32(0), cursor))


def attend_parts(
    shape: Sm80Shape,
    q: Float[Array, "rows heads head_dim"],
    k_units: Float[Array, "pages page_size head_dim"],
    v_units: Float[Array, "pages page_size head_dim"],
    page_tables: Int32[Array, "seqs max_pages"],
    work: DecodeWork,
    first_row: Int32[Array, "1"],
    scale: Float[Array, "1"],
    copies: Copies,
    interpret: Any = None,
) -> tuple[Float[Array, "blocks heads head_dim"], Float[Array, "blocks heads"]]:
    """The persistent kernel: normalized partial results and the base-2 logarithms of their weights."""
    num_parts = q.shape[0] + shape.num_ctas

    def sm80_decode(q_ref: Any, k_ref: Any, v_ref: Any, tables: Any, seqs: Any, ctas: Any, row: Any, scale_ref: Any, *refs: Any) -> None:
        parts, part_lses, q_ring, k_ring, v_ring, weights = refs
        memory = _Memory(q_ref, (k_ref, v_ref), tables, seqs, ctas, row[0], q_ring, (k_ring, v_ring), weights)
        _attend(shape, copies, memory, lax.axis_index("cta"), scale_ref[0], parts, part_lses)

    run = plgpu.kernel(
        sm80_decode,
        out_type=(
            jax.ShapeDtypeStruct((num_parts, shape.rows, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_parts, shape.rows), jnp.float32),
        ),
        grid=(shape.num_ctas,),
        grid_names=("cta",),
        scratch_types=[
            _copied_tile((shape.stages, shape.rows, shape.head_dim), shape.dtype, shape.rows),
            _copied_tile((shape.stages, BLOCK_TOKENS, shape.head_dim), shape.dtype, shape.unit),
            _copied_tile((shape.stages, BLOCK_TOKENS, shape.head_dim), shape.dtype, shape.unit),
            tile((shape.rows, BLOCK_TOKENS), shape.dtype),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": interpret} if interpret is not None else {}),
    )
    return run(q, k_units, v_units, page_tables, work.seqs, work.ctas, first_row, scale)
