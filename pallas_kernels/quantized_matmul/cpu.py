"""Quantized matmul in C++ on CPU: `int8.h` has the work."""

import ctypes
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform
from pallas_kernels.quantized_matmul.weights import Int8Weights

PATHS = ("portable", "avx2", "avx512_vnni", "amx")
"""The instructions that it knows, in the order of `Path` in `int8_rows.h`; a processor that has one has those before it."""


@functools.cache
def _number(name: str) -> int:
    """What a function of the library says of this processor."""
    function = ctypes.CDLL(str(native.library().path))[name]
    function.restype = ctypes.c_int64
    return int(function())


def paths() -> tuple[str, ...]:
    """Those of `PATHS` that this processor has; none without a library."""
    return () if native.library().path is None else PATHS[: _number("jaxpaged_int8_path") + 1]


def max_rows() -> int:
    """Up to here it is faster than XLA with what this processor has: always with matrix tiles (AMX); 0 without a library."""
    return 0 if native.library().path is None else _number("jaxpaged_int8_max_rows")


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
    most: str = PATHS[-1],
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.quantized_matmul`. `most` of `PATHS` is the last that may be taken, for tests and measurements."""
    values, scales = weights
    if layer is None:
        values, scales, layer = values[None], scales[None], 0
    result = jax.ShapeDtypeStruct((x.shape[0], values.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call("jaxpaged_int8_matmul", result)
    return call(x, values, scales, jnp.asarray(layer, jnp.int32), most=np.int32(PATHS.index(most)))
