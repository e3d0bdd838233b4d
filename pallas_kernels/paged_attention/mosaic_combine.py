"""One kernel that weighs the float32 partial results of each (sequence, KV head) and adds the attention sinks, on Hopper."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic_tiles import NOTHING, ROWS, store_untiled, tile


def add_part(carry: tuple[Array, Array, Array], part: Array, lse: Array) -> tuple[Array, Array, Array]:
    """Adds a normalized part with its base-2 logarithm to the sum of values, the largest logarithm so far, and the sum of weights."""
    values, peak, total = carry
    new_peak = jnp.maximum(peak, lse)
    decay, weight = jnp.exp2(peak - new_peak), jnp.exp2(lse - new_peak)
    values = values * lax.broadcast_in_dim(decay, values.shape, [0]) + part * lax.broadcast_in_dim(weight, part.shape, [0])
    return values, new_peak, total * decay + weight


def combine(
    parts: Float[Array, "blocks heads head_dim"],
    part_lses: Float[Array, "blocks 64"],
    pairs: Int32[Array, "rows 2"],
    scale: Float[Array, "1"],
    sinks: Float[Array, "... heads"] | None,
    *,
    num_kv_heads: int,
    heads_per_kv_head: int,
    stride: int,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "rows _ head_dim"]:
    """Weighs the partial results of each pair.

    Args:
        parts: normalized partial results of the tile of query heads in which a pair's are; those of one pair lie side by side.
        part_lses: the base-2 logarithms of their weights.
        pairs: of each pair the first of its parts and how many there are; one without any gives 0.
        scale: multiplies the result.
        sinks: base-2 logits that take weight and give no value, in the same tiles; None: without.
        num_kv_heads: KV heads; that of pair p is p modulo their number.
        heads_per_kv_head: query heads of a pair.
        stride: query heads from one KV head's to the next one's, as tiles count them.
        dtype: of the result.
        interpret: parameters of the GPU interpreter.
    """
    has_sinks = sinks is not None
    # Of a tile's heads, where those of a KV head begin.
    begins = range(0, parts.shape[1], stride)
    num_rows, head_dim = parts.shape[1:]
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def combine_parts(parts_ref: Any, lses_ref: Any, pairs_ref: Any, scale_ref: Any, *rest: Any) -> None:
        sinks_ref, (out, o_smem, lse_smem, out_smem, full) = (rest[0], rest[1:]) if has_sinks else (None, rest)
        pair = lax.axis_index("pair")
        first_head = lax.rem(pair, jnp.int32(num_kv_heads)) * stride
        first, count = pairs_ref[pair, 0], pairs_ref[pair, 1]
        own_rows = pl.ds(0, num_rows)
        nothing = plgpu.layout_cast(jnp.full((ROWS, head_dim), 0, jnp.float32), plgpu.Layout.WGMMA)

        def add(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            plgpu.copy_gmem_to_smem(parts_ref.at[first + step], o_smem.at[own_rows], full)
            plgpu.copy_gmem_to_smem(lses_ref.at[first + step], lse_smem, full)
            plgpu.barrier_wait(full)
            lse = plgpu.layout_cast(lse_smem[...], row_layout)
            part = plgpu.layout_cast(o_smem[...], plgpu.Layout.WGMMA)
            plgpu.commit_smem()
            return add_part(carry, part, lse)

        def give(values: Array) -> None:
            store_untiled(out_smem, values)
            plgpu.commit_smem()
            for begin in begins:

                @pl.when(lax.rem(first_head, jnp.int32(num_rows)) == begin)
                def _(begin: int = begin) -> None:
                    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(begin, heads_per_kv_head)], out.at[pair])

            plgpu.wait_smem_to_gmem(0)

        @pl.when(count == 0)
        def _() -> None:
            give(nothing)

        @pl.when(count > 0)
        def _() -> None:
            if sinks_ref is None:
                peak = plgpu.layout_cast(jnp.full((ROWS,), NOTHING, jnp.float32), row_layout)
                total = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), row_layout)
            else:
                plgpu.copy_gmem_to_smem(sinks_ref.at[lax.div(first_head, jnp.int32(num_rows))], lse_smem.at[own_rows], full)
                plgpu.barrier_arrive(full)  # the barrier expects two copies
                plgpu.barrier_wait(full)
                peak = plgpu.layout_cast(lse_smem[...], row_layout)
                plgpu.commit_smem()
                total = plgpu.layout_cast(jnp.full((ROWS,), 1, jnp.float32), row_layout)
            values, _, total = lax.fori_loop(0, count, add, (nothing, peak, total))
            give(values * lax.broadcast_in_dim(scale_ref[0] / total, values.shape, [0]))

    num_pairs = pairs.shape[0]
    run = plgpu.kernel(
        combine_parts,
        out_type=jax.ShapeDtypeStruct((num_pairs, heads_per_kv_head, head_dim), dtype),
        grid=(num_pairs,),
        grid_names=("pair",),
        scratch_types=[
            tile((ROWS, head_dim), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS, head_dim), dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": interpret} if interpret is not None else {}),
    )
    return run(parts, part_lses, pairs, scale, *([sinks] if has_sinks else []))
