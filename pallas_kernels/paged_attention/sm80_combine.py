"""The combination of partial results (`mosaic_combine`) on Ampere and Ada, without bulk copies: parts come straight into registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic_tiles import NOTHING, store_untiled
from pallas_kernels.paged_attention.mosaic_combine import add_part
from pallas_kernels.paged_attention.sm80_decode import MMA_ROWS


def _load(rows: Any) -> Any:
    return plgpu.load(rows, optimized=False)


def combine(
    parts: Float[Array, "blocks heads head_dim"],
    part_lses: Float[Array, "blocks heads"],
    pairs: Int32[Array, "rows 2"],
    scale: Float[Array, "1"],
    sinks: Float[Array, "kv_heads heads"] | None,
    *,
    num_kv_heads: int,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "rows heads head_dim"]:
    """As `mosaic_combine.combine`, of query heads whose number is a multiple of 16."""
    has_sinks = sinks is not None
    num_rows, head_dim = parts.shape[1:]

    def combine_sm80(parts_ref: Any, lses_ref: Any, pairs_ref: Any, scale_ref: Any, *rest: Any) -> None:
        sinks_ref, out = (rest[0], rest[1]) if has_sinks else (None, rest[0])
        pair = lax.axis_index("pair")
        first, count = pairs_ref[pair, 0], pairs_ref[pair, 1]

        def add(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            return add_part(carry, _load(parts_ref.at[first + step]), _load(lses_ref.at[first + step]))

        @pl.when(count > 0)
        def _() -> None:
            # A product's result lies in registers in a way that jax before 0.12 has no name for: this product of zeros says it.
            left, right = jnp.zeros((num_rows, MMA_ROWS), dtype), jnp.zeros((MMA_ROWS, head_dim), dtype)
            values = plgpu.mma(jnp.zeros((num_rows, head_dim), jnp.float32), left, right)
            if sinks_ref is None:
                peak, total = jnp.full((num_rows,), NOTHING, jnp.float32), jnp.zeros((num_rows,), jnp.float32)
            else:
                peak, total = _load(sinks_ref.at[lax.rem(pair, jnp.int32(num_kv_heads))]), jnp.full((num_rows,), 1, jnp.float32)
            values, _, total = lax.fori_loop(0, count, add, (values, peak, total))
            store_untiled(out.at[pair], values * lax.broadcast_in_dim(scale_ref[0] / total, values.shape, [0]))

    num_pairs = pairs.shape[0]
    run = plgpu.kernel(
        combine_sm80,
        out_type=jax.ShapeDtypeStruct((num_pairs, num_rows, head_dim), dtype),
        grid=(num_pairs,),
        grid_names=("pair",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": interpret} if interpret is not None else {}),
    )
    return run(parts, part_lses, pairs, scale, *([sinks] if has_sinks else []))
