"""Rows times a matrix of groups in C++ on CPU, for any number of rows: `int4.h` has the work."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform
from pallas_kernels.quantized_matmul.group_weights import TILE, Q4Weights, Q8Weights


def refusals(x: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"rows are float32 or bfloat16, not {x.dtype}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Q4Weights | Q8Weights,
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`."""
    parts = tuple(weights)
    if layer is None:
        parts, layer = tuple(part[None] for part in parts), 0
    name = "jaxpaged_q4_matmul" if isinstance(weights, Q4Weights) else "jaxpaged_q8_matmul"
    result = jax.ShapeDtypeStruct((x.shape[0], parts[0].shape[1] * TILE), jnp.float32)
    return jax.ffi.ffi_call(name, result)(x, *parts, jnp.asarray(layer, jnp.int32))
