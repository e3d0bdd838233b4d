"""The walk over a quantized matrix on Hopper: weights stream through a ring of shared memory and are multiplied from registers.

A CTA walks its range of the work (`shares`) unit by unit. A producer warpgroup fetches a unit of the weights, [128 outputs, up to 128 bytes
of inputs], and the same inputs of all rows by bulk copies, and runs ahead over the borders between tiles. Two compute warpgroups of 64
outputs each widen the weights in registers and multiply them by the rows, which lie in shared memory: outputs are the 64-row side of the
matrix unit, rows its short side, so that few rows waste nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic_tiles import ROWS, SMEM_BYTES, tile
from pallas_kernels.quantized_matmul.shares import Shares

NUM_COMPUTE = 2
TILE_OUT = NUM_COMPUTE * ROWS
"""Outputs of a tile."""

RING_BYTES = 128 * 1024
"""Weights in flight at most. By Little's law about 36 KB a multiprocessor cover 1 us of latency at 4.8 TB/s."""

MAX_STAGES = 16
COMPUTE_REGISTERS, PRODUCER_REGISTERS = 216, 40


class MatmulShape(NamedTuple):
    """What the kernel is built for.

    Attributes:
        kind: int8, int4 or fp8.
        columns: columns of the product: rows of activations rounded up to 8; of int8 both parts of each.
        unit_in: inputs of a unit.
        row_dtype: of the activations, int8 for int8.
        group_size: inputs that share a scale; 0 where a scale is of a whole output.
        scale_dtype: of the groups' scales and zero points.
    """

    kind: str
    columns: int
    unit_in: int
    row_dtype: Any
    group_size: int
    scale_dtype: Any
    shares: Shares

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in a unit."""
        return TILE_OUT * self.unit_in // (2 if self.kind == "int4" else 1)

    @property
    def groups(self) -> int:
        """Groups of inputs in a unit."""
        return self.unit_in // self.group_size if self.group_size else 0

    @property
    def result_columns(self) -> int:
        """Columns of the result that shared memory holds at a time."""
        return next(columns for columns in (32, 24, 16, 8) if self.columns % columns == 0)

    @property
    def stages(self) -> int:
        """Units in flight: what shared memory holds beside the result."""
        scale_bytes = 2 * self.groups * TILE_OUT * jnp.dtype(self.scale_dtype).itemsize
        stage_bytes = self.weight_bytes + self.columns * self.unit_in * jnp.dtype(self.row_dtype).itemsize + scale_bytes
        return min((SMEM_BYTES - TILE_OUT * self.result_columns * 4) // stage_bytes, RING_BYTES // self.weight_bytes, MAX_STAGES)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of weights that a CTA can have asked for and not yet used."""
        return self.stages * self.weight_bytes

    @property
    def sum_dtype(self) -> Any:
        return jnp.int32 if self.kind == "int8" else jnp.float32


class _Ring(NamedTuple):
    """Shared memory of a CTA and the barriers that hand it to and fro."""

    weights: Any
    rows: Any
    scales: Any
    zeros: Any
    full: Any
    free: Any


def _weight_tiles(shape: MatmulShape, dtype: Any) -> Any:
    if shape.kind != "int4":
        return tile((shape.stages, TILE_OUT, shape.unit_in), dtype)
    # Tiles of 8 outputs, as wide as a unit.
    transforms = plgpu.TilingTransform((8, shape.unit_in)), plgpu.SwizzleTransform(shape.unit_in // 2)  # type: ignore[abstract]
    return plgpu.SMEM((shape.stages, TILE_OUT, shape.unit_in), dtype, transforms=transforms)


def _first_out(shape: MatmulShape, index: Array) -> Array:
    """The first output of a tile: the last tile overlaps the one before instead of reaching beyond the matrix."""
    return jnp.minimum(index * TILE_OUT, shape.shares.num_out - TILE_OUT)


def _produce(shape: MatmulShape, drains: bool, sources: Any, layer: Array, ring: _Ring) -> None:
    values, rows, scales, zeros = sources
    begin, end = shape.shares.range_of(lax.axis_index("cta"))
    stages = jnp.int32(shape.stages)

    def fetch(count: Array, _: None) -> None:
        slot = lax.rem(count, stages)
        index, unit = shape.shares.place_of(begin + count)
        outs = pl.ds(_first_out(shape, index), TILE_OUT)
        inputs = pl.ds(unit * shape.unit_in, shape.unit_in)

        @pl.when(count >= stages)
        def wait() -> None:
            plgpu.barrier_wait(ring.free.at[slot])

        full = ring.full.at[slot]
        plgpu.copy_gmem_to_smem(values.at[layer, outs, inputs], ring.weights.at[slot], full)
        plgpu.copy_gmem_to_smem(rows.at[:, inputs], ring.rows.at[slot], full)
        if shape.groups:
            groups = pl.ds(unit * shape.groups, shape.groups)
            plgpu.copy_gmem_to_smem(scales.at[layer, groups, outs], ring.scales.at[slot], full)
            plgpu.copy_gmem_to_smem(zeros.at[layer, groups, outs], ring.zeros.at[slot], full)

    lax.fori_loop(0, end - begin, fetch, None)
    if drains:

        def drain(count: Array, _: None) -> None:
            plgpu.barrier_wait(ring.free.at[lax.rem(count, stages)])

        lax.fori_loop(jnp.maximum(end - begin - stages, 0), end - begin, drain, None)


def _widened(shape: MatmulShape, weights: Array) -> Array:
    """Numbers of 4 or 8 bits in the type of the rows; all of them are numbers of bfloat16 and float16 too."""
    if shape.kind == "int4":
        wide = weights.astype(jnp.bfloat16)
        return wide if shape.row_dtype == jnp.bfloat16 else wide.astype(jnp.float32).astype(shape.row_dtype)
    wide = weights.astype(jnp.float16)  # Mosaic has no conversion from e4m3 to bfloat16
    return wide if shape.row_dtype == jnp.float16 else wide.astype(jnp.float32).astype(shape.row_dtype)


def _multiply(shape: MatmulShape, is_interpreted: bool, sums: Array, ring: _Ring, slot: Array) -> Array:
    """Adds a unit's products [64, columns] to the sums."""
    own = pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)

    def product(weights: Any, rows: Any) -> Array:
        if is_interpreted and shape.kind != "int8":
            # The interpreter has no product with a left side in registers.
            return jnp.dot(weights, rows[...], preferred_element_type=jnp.float32)

        def accumulate(accumulator: Any) -> Array:
            plgpu.wgmma(accumulator, weights, rows)
            return accumulator[...]

        return pl.run_scoped(accumulate, plgpu.ACC((ROWS, shape.columns), shape.sum_dtype))

    rows = ring.rows.at[slot]
    if shape.kind == "int8":
        return sums + product(ring.weights.at[slot, own], rows.transpose((1, 0)))
    if shape.kind == "fp8":
        weights = plgpu.layout_cast(ring.weights[slot, own], plgpu.Layout.WGMMA_UPCAST_2X)
        weights = plgpu.layout_cast(weights, plgpu.Layout.WGMMA)
        return sums + product(_widened(shape, weights), rows.transpose((1, 0)))

    nibbles = plgpu.layout_cast(ring.weights[slot, own], plgpu.Layout.WGMMA_UPCAST_4X)
    nibbles = plgpu.layout_cast(nibbles, plgpu.Layout.WGMMA)

    def of_group(ref: Any, group: int) -> Array:
        return plgpu.layout_cast(ref[slot, group, own], plgpu.Layout.WGMMA.reduce(1))

    for group in range(shape.groups):
        inputs = slice(group * shape.group_size, (group + 1) * shape.group_size)
        weights = _widened(shape, nibbles[:, inputs])
        zeros = of_group(ring.zeros, group).astype(shape.row_dtype)
        weights = weights - lax.broadcast_in_dim(zeros, weights.shape, [0])
        scales = of_group(ring.scales, group).astype(jnp.float32)
        of_inputs = product(weights, rows.at[:, pl.ds(inputs.start, shape.group_size)].transpose((1, 0)))
        sums = sums + of_inputs * lax.broadcast_in_dim(scales, of_inputs.shape, [0])
    return sums


def _consume(shape: MatmulShape, is_interpreted: bool, parts: Any, ring: _Ring, result: Any) -> None:
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    begin, end = shape.shares.range_of(cta)
    num_units = jnp.int32(shape.shares.num_units)

    def sum_tile(index: Array, _: None) -> None:
        low = jnp.maximum(begin, index * num_units)
        high = jnp.minimum(end, (index + 1) * num_units)

        def sum_unit(position: Array, sums: Array) -> Array:
            slot = lax.rem(position - begin, jnp.int32(shape.stages))
            plgpu.barrier_wait(ring.full.at[slot])
            sums = _multiply(shape, is_interpreted, sums, ring, slot)
            if is_interpreted:
                plgpu.commit_smem()  # the interpreter wants reads ordered before the next copy
            plgpu.barrier_arrive(ring.free.at[slot])
            return sums

        zero = plgpu.layout_cast(jnp.full((ROWS, shape.columns), 0, shape.sum_dtype), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(low, high, sum_unit, zero)
        # Turned, so that outputs lie side by side for whoever adds the parts.
        for first in range(0, shape.columns, shape.result_columns):
            # The copy before must have read what is written now.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            turned = plgpu.layout_cast(sums[:, first : first + shape.result_columns], plgpu.Layout.WGMMA_TRANSPOSED)
            result.at[warpgroup].transpose((1, 0))[...] = turned
            plgpu.commit_smem()
            columns, outs = pl.ds(first, shape.result_columns), pl.ds(warpgroup * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(result.at[warpgroup], parts.at[index + cta, columns, outs])

    lax.fori_loop(lax.div(begin, num_units), lax.div(end - 1, num_units) + 1, sum_tile, None)
    plgpu.wait_smem_to_gmem(0)


def sum_parts(
    shape: MatmulShape, values: Array, rows: Array, scales: Array | None, zeros: Array | None, layer: Array, interpret: Any
) -> Array:
    """Parts [tiles + ctas - 1, columns, 128] of the product of the matrix and the rows; those that no CTA has are left as they are.

    Args:
        values: [layers, out, in] int8, int4 or float8_e4m3fn.
        rows: [columns, in].
        scales, zeros: [layers, groups, out] with int4.
        layer: [1].
    """
    is_interpreted = interpret is not None
    num_groups = 2 if shape.groups else 0

    def quantized_matmul(values_ref: Any, rows_ref: Any, layer_ref: Any, *refs: Any) -> None:
        group_refs, (parts, weights, rows_smem, *more) = refs[:num_groups], refs[num_groups:]
        group_smem, (result, full, free) = more[:num_groups], more[num_groups:]
        scales_smem, zeros_smem = group_smem or (None, None)
        ring = _Ring(weights, rows_smem, scales_smem, zeros_smem, full, free)

        @pl.when(lax.axis_index("warpgroup") == NUM_COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            sources = (values_ref, rows_ref, *(group_refs or (None, None)))
            # The interpreter insists that every completed phase of a barrier is seen; a GPU does not mind.
            _produce(shape, is_interpreted, sources, layer_ref[0], ring)

        @pl.when(lax.axis_index("warpgroup") < NUM_COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _consume(shape, is_interpreted, parts, ring, result)

    stages = shape.stages
    run = plgpu.kernel(
        quantized_matmul,
        out_type=jax.ShapeDtypeStruct((shape.shares.num_parts, shape.columns, TILE_OUT), shape.sum_dtype),
        grid=(shape.shares.num_ctas,),
        grid_names=("cta",),
        num_threads=NUM_COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=[
            _weight_tiles(shape, values.dtype),
            tile((stages, shape.columns, shape.unit_in), rows.dtype),
            *[plgpu.SMEM((stages, shape.groups, TILE_OUT), shape.scale_dtype)] * num_groups,
            tile((NUM_COMPUTE, shape.result_columns, ROWS), shape.sum_dtype),
            plgpu.Barrier(num_arrivals=2 + num_groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=stages),
        ],
        **({"interpret": interpret} if is_interpreted else {}),
    )
    return run(values, rows, layer, *(() if scales is None else (scales, zeros)))
