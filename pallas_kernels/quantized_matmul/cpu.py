"""Quantized matmul in C++ on CPU: `int8.h` has the work."""

import ctypes
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform
from pallas_kernels.quantized_matmul.weights import Int8Weights


@functools.cache
def max_rows() -> int:
    """Up to here it is faster than XLA with what this processor has: always with matrix tiles (AMX); 0 without a library."""
    path = native.library().path
    if path is None:
        return 0
    function = ctypes.CDLL(str(path)).jaxpaged_int8_max_rows
    function.restype = ctypes.c_int64
    return int(function())


def refusals(x: Any, weights: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if not isinstance(weights, Int8Weights):
        refused.append(f"{type(weights).__name__} are left to XLA")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"rows are float32 or bfloat16, not {x.dtype}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Int8Weights,
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`."""
    values, scales = weights
    if layer is None:
        values, scales, layer = values[None], scales[None], 0
    result = jax.ShapeDtypeStruct((x.shape[0], values.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("jaxpaged_int8_matmul", result)(x, values, scales, jnp.asarray(layer, jnp.int32))
