"""Dense matmul in C++ on CPU: `dense.h` has the work."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform


def refusals(x: Any, matrix: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"numbers are float32 or bfloat16, not {x.dtype}")
    elif x.dtype != matrix.dtype:
        refused.append(f"rows are {x.dtype} and the matrix is {matrix.dtype}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def dense_matmul(
    x: Float[Array, "rows in"], matrix: Float[Array, "*layers out in"], *, layer: int | Int32[Array, ""] | None
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.dense_matmul`."""
    if layer is None:
        matrix, layer = matrix[None], 0
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("jaxpaged_dense_matmul", result)(x, matrix, jnp.asarray(layer, jnp.int32))
