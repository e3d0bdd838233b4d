"""Matrices in a Hopper multiprocessor's shared memory: how they lie, how much there is."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup's matrix tile."""

SMEM_BYTES = 227 * 1024 - 3 * 1024
"""Shared memory of a multiprocessor, less what barriers and the compiler's own scratch take."""

LOG2E = math.log2(math.e)
NOTHING = -1e30
"""A logit that weighs nothing beside any other; not -inf, for which maximum minus maximum would be NaN."""


def tiling(width: int, dtype: Any) -> tuple[Any, Any]:
    """How a matrix of `width` columns lies: tiles of 8 rows, as wide as the largest swizzle that divides the width, at most 64 columns."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(swizzle for swizzle in (128, 64, 32) if width * itemsize % swizzle == 0 and swizzle // itemsize <= 64)
    # mypy takes the empty body of their base class's method for an abstract one.
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def has_tiling(width: int, dtype: Any) -> bool:
    """Whether a matrix of so many columns can be cut into tiles."""
    return width * jnp.dtype(dtype).itemsize % 32 == 0


def tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Scratch of this shape for `plgpu.kernel`, tiled."""
    return plgpu.SMEM(shape, dtype, transforms=tiling(shape[-1], dtype))


def column_slices(width: int, dtype: Any) -> list[Any]:
    """Slices of a tiled matrix, so that a warpgroup need not hold all of it in registers at once."""
    step = tiling(width, dtype)[0].tiling[1]
    return [pl.ds(start, step) for start in range(0, width, step)]


HAS_UNTILED = hasattr(plgpu, "store")
"""Whether this jax reads and writes plain rows of shared memory with threads that do not fall on different banks; 0.12 does."""


def load_untiled(rows: Any) -> Any:
    """A float32 matrix of `ROWS` rows from rows that lie plainly in shared memory, where nothing has to be fast."""
    if HAS_UNTILED:
        return plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    return plgpu.layout_cast(rows[...], plgpu.Layout.WGMMA).astype(jnp.float32)


def store_untiled(rows: Any, values: Any) -> None:
    """Writes a matrix back to such rows, in their type."""
    if HAS_UNTILED:
        plgpu.store(rows, values.astype(rows.dtype), optimized=False)
    else:
        rows[...] = values.astype(rows.dtype)
