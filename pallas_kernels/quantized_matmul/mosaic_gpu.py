"""Quantized matmul of few rows on Hopper GPUs: the domain of the Mosaic kernel (`mosaic_kernel.py`), and what XLA does around it.

Before it, rows are padded to a multiple of 8, and for int8 quantized to their two parts, which the matrix unit multiplies as integers.
After it, the parts of each tile are added in the order of the inputs and scaled, which XLA does in one pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu_target import gpu_target, hopper_refusals
from pallas_kernels.quantized_matmul.mosaic_kernel import TILE_OUT, MatmulShape, sum_parts
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.shares import Shares, share_out
from pallas_kernels.quantized_matmul.weights import LOW_LEVELS, Fp8Weights, Int4Weights, Int8Weights

MAX_ROWS = 64
"""With more rows the products cost more than the weights, and XLA widens them once for all rows."""

HOPPER_MULTIPROCESSORS = 132
UNIT_BYTES = 128
GROUP_SIZES = (64, 128)


def refusals(x: Any, weights: Any) -> list[str]:
    """A sentence for each thing that the kernel cannot do; the operands follow the contract."""
    target = gpu_target()
    if target is None:
        return ["it needs an NVIDIA GPU of compute capability 9.0, and this program is for another device"]
    return [*domain_refusals(x, weights), *hopper_refusals(target)]


def domain_refusals(x: Any, weights: Any) -> list[str]:
    """A sentence for each limit that dtypes and shapes break, whatever the device."""
    found = []
    (num_rows, num_in), num_out = x.shape, weights.values.shape[-2]
    if not isinstance(weights, Int8Weights) and x.dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"rows beside {type(weights).__name__} are bfloat16 or float16, not {x.dtype}")
    if not 0 < num_rows <= MAX_ROWS:
        found.append(f"1 to {MAX_ROWS} rows, not {num_rows}")
    if num_in % 64:
        found.append(f"inputs are a multiple of 64, not {num_in}")
    if num_out < TILE_OUT or num_out % 8:
        found.append(f"outputs are a multiple of 8 and at least {TILE_OUT}, not {num_out}")
    if isinstance(weights, Int4Weights):
        size = num_in // weights.scales.shape[-2]
        if size not in GROUP_SIZES:
            found.append(f"groups are of 64 or 128 inputs, not of {size}")
        dtype = weights.scales.dtype
        if dtype != weights.zeros.dtype or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            found.append(f"scales and zero points are float32, bfloat16 or float16 alike, not {dtype} and {weights.zeros.dtype}")
    return found


def matmul_shape(weights: Any, num_rows: int, row_dtype: Any, num_ctas: int) -> MatmulShape:
    """What the kernel is built for, of operands that are not refused."""
    kind = {Int8Weights: "int8", Int4Weights: "int4", Fp8Weights: "fp8"}[type(weights)]
    num_out, row_bytes = weights.values.shape[-2:]
    per_byte = 2 if kind == "int4" else 1
    num_in = row_bytes * per_byte
    # Whole groups: a row of bytes that is a multiple of 32 only has groups of 64.
    unit_bytes = next(size for size in (UNIT_BYTES, 64, 32) if row_bytes % size == 0)
    columns = -(-num_rows // 8) * 8
    return MatmulShape(
        kind=kind,
        columns=2 * columns if kind == "int8" else columns,
        unit_in=unit_bytes * per_byte,
        row_dtype=jnp.dtype(jnp.int8 if kind == "int8" else row_dtype),
        group_size=num_in // weights.scales.shape[-2] if kind == "int4" else 0,
        scale_dtype=jnp.dtype(weights.scales.dtype),
        shares=share_out(num_out, TILE_OUT, row_bytes // unit_bytes, num_ctas),
    )


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Int8Weights | Int4Weights | Fp8Weights,
    *,
    layer: int | Int32[Array, ""] | None,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`; `num_ctas` and `interpret` are for tests."""
    if layer is None:
        weights, layer = jax.tree.map(lambda part: part[None], weights), 0
    if num_ctas is None:
        target = gpu_target()
        num_ctas = HOPPER_MULTIPROCESSORS if target is None else target.num_multiprocessors
    return _multiply(x, weights, jnp.asarray(layer, jnp.int32), num_ctas=num_ctas, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("num_ctas", "interpret"))
def _multiply(x: Any, weights: Any, layer: Array, *, num_ctas: int, interpret: Any) -> Array:
    num_rows = x.shape[0]
    shape = matmul_shape(weights, num_rows, x.dtype, num_ctas)
    values, scales, zeros = weights.values, None, None
    padded = jnp.pad(x, ((0, -num_rows % 8), (0, 0)))
    if shape.kind == "int8":
        high, low, row_scales = quantize_rows(padded)
        padded = jnp.concatenate([high, low])
    elif shape.kind == "int4":
        values = lax.bitcast_convert_type(values, jnp.int4).reshape(*values.shape[:-1], -1)
        scales, zeros = weights.scales, weights.zeros
    parts = sum_parts(shape, values, padded, scales, zeros, layer.reshape(1), interpret)
    sums = add_parts(shape.shares, parts)
    if shape.kind == "int4":
        return sums[:num_rows]
    out_scales = lax.dynamic_index_in_dim(weights.scales, layer, keepdims=False)
    if shape.kind == "fp8":
        return sums[:num_rows] * out_scales
    high, low = jnp.split(sums.astype(jnp.float32), 2)
    return ((high * LOW_LEVELS + low) * out_scales * row_scales[:, None])[:num_rows]


def add_parts(shares: Shares, parts: Array) -> Array:
    """Sums [columns, out] of parts [parts, columns, 128], each in the order of the inputs; what is no part is not looked at."""
    of_tiles = [shares.parts_of(index) for index in range(shares.num_tiles)]
    sums = jnp.zeros((), parts.dtype)
    for step in range(max(map(len, of_tiles))):
        own = np.array([min(part.start + step, part.stop - 1) for part in of_tiles])
        is_part = np.array([step < len(part) for part in of_tiles])
        # Not a sum over an axis, of which XLA may choose the order by the shape.
        added = parts[own] if is_part.all() else jnp.where(is_part[:, None, None], parts[own], 0)
        sums = sums + added if step else added
    last = shares.num_out % TILE_OUT
    rows = sums.transpose(1, 0, 2).reshape(sums.shape[1], -1)
    if last:  # the last tile overlaps the one before
        rows = jnp.concatenate([rows[:, : shares.num_out - last], rows[:, rows.shape[1] - last :]], axis=1)
    return rows
