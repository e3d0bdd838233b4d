"""Grouped matmul on Hopper GPUs: one persistent kernel over (group, columns, block of rows).

A CTA walks every `num_ctas`-th item of the line. A producer warpgroup fetches rows and weights by bulk copies into a ring of shared memory
and runs ahead over the borders between items; one compute warpgroup multiplies 64 rows, or two multiply 128. What is fetched of x are
`block_rows` rows, as few as 16: the rest of the 64-row tile of the matrix unit is computed from whatever lies there and never written,
since rows do not touch each other and the weights are the cost. The sums of a row are taken in one order, whatever the other rows are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu_target import HOPPER_MULTIPROCESSORS, gpu_target, hopper_refusals
from pallas_kernels.grouped_matmul.block_work import (
    ALIGNMENT,
    FIRST_BLOCK,
    FIRST_ROW,
    GROUP,
    NUM_BLOCKS,
    NUM_ROWS,
    BlockWork,
    cut_into_blocks,
)
from pallas_kernels.mosaic_tiles import ROWS, SMEM_BYTES, store_untiled, tile

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 16, 2 * ROWS
STEP = 32
"""Inputs and outputs of a matrix are a multiple of this many: the narrowest tile."""

MAX_DEPTH = 64
"""Inputs that one step of the ring holds: as wide as the widest swizzle."""

ITEMS_PER_CTA = 2
"""Narrower columns are taken before a multiprocessor has fewer items than this."""

WEIGHT_BYTES = 128 * 1024
"""Shared memory for weights in flight. By Little's law about 36 KB a multiprocessor cover 1 us of latency at 4.8 TB/s."""

COMPUTE_REGISTERS, PRODUCER_REGISTERS = 232, 40


class MatmulShape(NamedTuple):
    """What the kernel is built for.

    Attributes:
        block_rows: rows of an item, of which `num_compute` warpgroups take 64 each.
        columns: outputs of an item.
        depth: inputs of a step of the ring.
        staged: outputs that a warpgroup puts into shared memory at a time, to be written from there.
    """

    num_rows: int
    num_groups: int
    num_in: int
    num_out: int
    dtype: Any
    num_ctas: int
    block_rows: int
    columns: int
    depth: int
    staged: int
    stages: int

    @property
    def num_compute(self) -> int:
        return -(-self.block_rows // ROWS)

    @property
    def fetched_rows(self) -> int:
        """Rows of x with as many behind them as make whole tiles, and one block."""
        return max(-(-self.num_rows // ALIGNMENT) * ALIGNMENT, self.block_rows)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of weights and rows that a CTA can have asked for and not yet used."""
        return self.stages * (self.columns + self.block_rows) * self.depth * jnp.dtype(self.dtype).itemsize


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of an item: a power of two about twice as large as a group is when rows are spread evenly, so that few groups need two items;
    128, which take two warpgroups, where an even group has more than 64."""
    even = -(-num_rows // num_groups)
    if even > ROWS:
        return MAX_BLOCK_ROWS
    return min(ROWS, max(MIN_BLOCK_ROWS, 1 << (2 * even - 1).bit_length()))


def plan(num_rows: int, num_groups: int, num_in: int, num_out: int, dtype: Any, num_ctas: int) -> MatmulShape:
    """Chooses tiles by the bytes that they move: each item reads `columns * num_in` weights, and `block_rows * num_in` of x from the L2."""
    rows = block_rows(num_rows, num_groups)
    widest = 256 if rows > ROWS else 128
    widths = [width for width in range(widest, 0, -STEP) if num_out % width == 0 and (width % 64 == 0 or width <= 96)]
    num_blocks = max(min(num_rows, num_groups), num_rows // rows)
    columns = next((width for width in widths if num_blocks * (num_out // width) >= ITEMS_PER_CTA * num_ctas or width <= 64), widths[-1])
    depth = MAX_DEPTH if num_in % MAX_DEPTH == 0 else STEP
    num_compute = -(-rows // ROWS)
    # All of a narrow item at once; of a wide one as much as leaves room for the ring.
    staged = columns if num_compute == 1 else 64 if columns % 64 == 0 else STEP
    weight_bytes = columns * depth * jnp.dtype(dtype).itemsize
    stage_bytes = num_compute * ROWS * depth * jnp.dtype(dtype).itemsize + weight_bytes
    stages = min((SMEM_BYTES - num_compute * ROWS * staged * 4) // stage_bytes, WEIGHT_BYTES // weight_bytes)
    return MatmulShape(num_rows, num_groups, num_in, num_out, dtype, num_ctas, rows, columns, depth, staged, stages)


def refusals(x: Any, weights: Any) -> list[str]:
    """A sentence for each thing that the kernel cannot do; the operands follow the contract."""
    target = gpu_target()
    if target is None:
        return ["it needs an NVIDIA GPU of compute capability 9.0, and this program is for another device"]
    return [*domain_refusals(x, weights), *hopper_refusals(target)]


def domain_refusals(x: Any, weights: Any) -> list[str]:
    """A sentence for each limit that dtypes and shapes break, whatever the device."""
    found = []
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"rows are bfloat16 or float16, not {x.dtype}")
    found += [
        f"a matrix has a multiple of {STEP} {name}, not {size}"
        for name, size in (("inputs", weights.shape[-1]), ("outputs", weights.shape[-2]))
        if size % STEP
    ]
    if x.shape[0] == 0:
        found.append("there are no rows")
    return found


class _Item(NamedTuple):
    """One block of rows for some columns.

    Attributes:
        matrix: index of the group's weights among those of all layers.
        column: in units of `MatmulShape.columns`. The compiler must see of a place in a matrix that it is a multiple of a tile.
        tile: first row that is fetched, in units of 8.
        lead: rows of the tile before the first that counts.
        num_rows: rows that count.
        num_steps: of the ring; 0 for rows that belong to no group.
    """

    matrix: Array
    column: Array
    tile: Array
    lead: Array
    num_rows: Array
    num_steps: Array


def _item(shape: MatmulShape, work: Any, first_matrix: Any, index: Array) -> _Item:
    """Item `index` of the line: group by group, of a group column by column, so that CTAs share a column's weights in the L2."""
    blocks = work[0]
    num_columns = jnp.int32(shape.num_out // shape.columns)
    # As many items as blocks a column: this is some block of the group, or beyond the line, where nobody uses it.
    block = jnp.minimum(lax.div(index, num_columns), blocks.shape[0] - 1)
    group, first_block, num_blocks = blocks[block, GROUP], blocks[block, FIRST_BLOCK], jnp.maximum(blocks[block, NUM_BLOCKS], 1)
    first_row, end = blocks[block, FIRST_ROW], blocks[block, FIRST_ROW] + blocks[block, NUM_ROWS]
    within = index - first_block * num_columns
    begin = first_row - lax.rem(first_row, jnp.int32(ALIGNMENT)) + lax.rem(within, num_blocks) * shape.block_rows
    low, high = jnp.maximum(begin, first_row), jnp.minimum(begin + shape.block_rows, end)
    # A tile that would end behind the last row begins before its block.
    tile = lax.div(jnp.minimum(begin, shape.fetched_rows - shape.block_rows), jnp.int32(ALIGNMENT))
    return _Item(
        first_matrix[0] + group,
        lax.div(within, num_blocks),
        tile,
        low - tile * ALIGNMENT,
        high - low,
        jnp.where(group < shape.num_groups, shape.num_in // shape.depth, 0),
    )


class _Ring(NamedTuple):
    """Shared memory of a CTA and the barriers that hand it to and fro."""

    x: Any
    weights: Any
    full: Any
    free: Any


def _walk(shape: MatmulShape, work: Any, first_matrix: Any, do: Any) -> Array:
    """`do(item, done)` for each item of this CTA, `done` being the steps of the ring before it; returns the steps of all."""
    cta = lax.axis_index("cta")
    num_items = work[1][0] * (shape.num_out // shape.columns)
    num_own = lax.div(num_items - cta + shape.num_ctas - 1, jnp.int32(shape.num_ctas))

    def step(turn: Array, carry: tuple[_Item, Array]) -> tuple[_Item, Array]:
        own, done = carry
        # Asked for before it is needed, since the answer takes long.
        after = _item(shape, work, first_matrix, cta + (turn + 1) * shape.num_ctas)
        do(own, done)
        return after, done + own.num_steps

    return lax.fori_loop(0, num_own, step, (_item(shape, work, first_matrix, cta), jnp.int32(0)))[1]


def _produce(shape: MatmulShape, drains: bool, x: Any, weights: Any, work: Any, first_matrix: Any, ring: _Ring) -> None:
    """Fetches rows and weights in the order in which they are needed, as far ahead as the ring holds."""
    part_rows = min(shape.block_rows, ROWS)

    def fetch(own: _Item, done: Array) -> None:
        def fetch_step(step: Array, none: None) -> None:
            count = done + step
            slot = lax.rem(count, jnp.int32(shape.stages))

            @pl.when(count >= shape.stages)
            def _() -> None:
                plgpu.barrier_wait(ring.free.at[slot])

            inputs = pl.ds(step * shape.depth, shape.depth)
            own_weights = weights.at[own.matrix, pl.ds(own.column * shape.columns, shape.columns), inputs]
            plgpu.copy_gmem_to_smem(own_weights, ring.weights.at[slot], ring.full.at[slot])
            for part in range(shape.num_compute):
                rows = pl.ds(own.tile * ALIGNMENT + part * ROWS, part_rows)
                plgpu.copy_gmem_to_smem(x.at[rows, inputs], ring.x.at[slot, part, pl.ds(0, part_rows)], ring.full.at[slot])

        lax.fori_loop(0, own.num_steps, fetch_step, None)

    done = _walk(shape, work, first_matrix, fetch)
    if drains:

        def drain(count: Array, _: None) -> None:
            plgpu.barrier_wait(ring.free.at[lax.rem(count, jnp.int32(shape.stages))])

        lax.fori_loop(jnp.maximum(done - shape.stages, 0), done, drain, None)


def _consume(shape: MatmulShape, work: Any, first_matrix: Any, out: Any, ring: _Ring, staging: Any) -> None:
    """The sums of each item, written where its rows are and nowhere else."""
    warpgroup = lax.axis_index("warpgroup")
    part_rows = min(shape.block_rows, ROWS)
    own_staging = staging.at[warpgroup]

    def slot_of(count: Array) -> Array:
        return lax.rem(count, jnp.int32(shape.stages))

    def multiply(own: _Item, done: Array) -> None:
        first = jnp.clip(own.lead - warpgroup * ROWS, 0, part_rows)
        num_own = jnp.clip(own.lead + own.num_rows - warpgroup * ROWS, 0, part_rows) - first
        row = own.tile * ALIGNMENT + warpgroup * ROWS + first

        def add_up(sums: Any) -> Array:
            def add(step: Array, none: None) -> None:
                slot = slot_of(done + step)
                plgpu.barrier_wait(ring.full.at[slot])
                plgpu.wgmma(sums, ring.x.at[slot, warpgroup], ring.weights.at[slot].transpose((1, 0)))
                # One product goes on while the next is asked for; that before has been read from shared memory.
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _() -> None:
                    plgpu.barrier_arrive(ring.free.at[slot_of(done + step - 1)])

            lax.fori_loop(0, own.num_steps, add, None)
            return sums[...]

        @pl.when(num_own > 0)
        def _() -> None:
            sums = pl.run_scoped(add_up, plgpu.ACC((ROWS, shape.columns), jnp.float32))

            @pl.when(own.num_steps > 0)
            def _() -> None:
                plgpu.barrier_arrive(ring.free.at[slot_of(done + own.num_steps - 1)])

            for begin in range(0, shape.columns, shape.staged):
                # The copies before must have read what is written now.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_untiled(own_staging, sums[:, begin : begin + shape.staged])
                plgpu.commit_smem()
                _write_rows(own_staging, out.at[:, pl.ds(own.column * shape.columns + begin, shape.staged)], first, row, num_own, shape)

        if shape.num_compute > 1:

            @pl.when(num_own == 0)
            def _() -> None:
                def skip(step: Array, _: None) -> None:
                    slot = slot_of(done + step)
                    plgpu.barrier_wait(ring.full.at[slot])
                    plgpu.barrier_arrive(ring.free.at[slot])

                lax.fori_loop(0, own.num_steps, skip, None)

    _walk(shape, work, first_matrix, multiply)
    plgpu.wait_smem_to_gmem(0)


def _write_rows(source: Any, target: Any, first: Array, row: Array, num_rows: Array, shape: MatmulShape) -> None:
    """Copies rows of shared memory from `first` on to `row` on: a bulk copy has one size, so it takes one for each bit of the number."""
    size = min(shape.block_rows, ROWS)
    while size:
        if size <= shape.num_rows:
            done = num_rows & ~jnp.int32(2 * size - 1)

            @pl.when(num_rows & size != 0)
            def _(size: int = size, done: Array = done) -> None:
                plgpu.copy_smem_to_gmem(source.at[pl.ds(first + done, size)], target.at[pl.ds(row + done, size)])

        size //= 2


@functools.partial(jax.jit, static_argnames=("shape", "interpret"))
def multiply_blocks(
    shape: MatmulShape,
    x: Float[Array, "rows in"],
    weights: Float[Array, "experts out in"],
    work: BlockWork,
    first_matrix: Int32[Array, "1"],
    interpret: Any = None,
) -> Float[Array, "rows out"]:
    """The persistent kernel; `weights` are those of all layers, this one's from `first_matrix` on."""
    is_interpreted = interpret is not None

    def multiply_groups(x_ref: Any, weights_ref: Any, blocks: Any, num_blocks: Any, matrix: Any, out: Any, *scratch: Any) -> None:
        x_smem, weights_smem, staging, full, free = scratch
        ring = _Ring(x_smem, weights_smem, full, free)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == shape.num_compute)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            # The interpreter insists that every completed phase of a barrier is seen; a GPU does not mind.
            _produce(shape, is_interpreted, x_ref, weights_ref, (blocks, num_blocks), matrix, ring)

        @pl.when(warpgroup < shape.num_compute)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _consume(shape, (blocks, num_blocks), matrix, out, ring, staging)

    run = plgpu.kernel(
        multiply_groups,
        out_type=jax.ShapeDtypeStruct((shape.num_rows, shape.num_out), jnp.float32),
        grid=(shape.num_ctas,),
        grid_names=("cta",),
        num_threads=shape.num_compute + 1,
        thread_name="warpgroup",
        scratch_types=[
            tile((shape.stages, shape.num_compute, ROWS, shape.depth), x.dtype),
            tile((shape.stages, shape.columns, shape.depth), x.dtype),
            plgpu.SMEM((shape.num_compute, ROWS, shape.staged), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + shape.num_compute, num_barriers=shape.stages),
            plgpu.Barrier(num_arrivals=shape.num_compute, num_barriers=shape.stages),
        ],
        **({"interpret": interpret} if is_interpreted else {}),
    )
    fetched = jnp.pad(x, ((0, shape.fetched_rows - shape.num_rows), (0, 0)))
    return run(fetched, weights, work.blocks, work.num_blocks, first_matrix)


def grouped_matmul(
    x: Float[Array, "rows in"],
    weights: Float[Array, "*layers experts out in"],
    group_sizes: Int32[Array, "experts"],
    *,
    layer: int | Int32[Array, ""] | None,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.grouped_matmul`; `num_ctas` and `interpret` are for tests."""
    if num_ctas is None:
        target = gpu_target()
        num_ctas = HOPPER_MULTIPROCESSORS if target is None else target.num_multiprocessors
    num_groups, num_out, num_in = weights.shape[-3:]
    shape = plan(x.shape[0], num_groups, num_in, num_out, x.dtype, num_ctas)
    work = cut_into_blocks(group_sizes, num_rows=shape.num_rows, block_rows=shape.block_rows)
    first_matrix = jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1) * num_groups
    return multiply_blocks(shape, x, weights.reshape(-1, num_out, num_in), work, first_matrix, interpret)
