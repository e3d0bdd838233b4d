"""Grouped matmul in C++ on CPU: `grouped.h` has the work. Only weights of groups that own rows are read, where they lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform


def refusals(x: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"numbers are float32 or bfloat16, not {x.dtype}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def grouped_matmul(
    x: Float[Array, "rows in"],
    weights: Float[Array, "*layers experts out in"],
    group_sizes: Int32[Array, "experts"],
    *,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "rows out"]:
    """The contract of `pallas_kernels.grouped_matmul`."""
    if layer is None:
        weights, layer = weights[None], 0
    result = jax.ShapeDtypeStruct((x.shape[0], weights.shape[-2]), jnp.float32)
    return jax.ffi.ffi_call("jaxpaged_grouped_matmul", result)(x, weights, group_sizes, jnp.asarray(layer, jnp.int32))
