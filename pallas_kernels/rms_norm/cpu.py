"""Root mean square normalization in C++ on CPU: `norm.h` has the work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform


def refusals(x: Any, weight: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if x.dtype != weight.dtype:
        refused.append(f"rows are {x.dtype} and the weight is {weight.dtype}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"numbers are float32 or bfloat16, not {x.dtype}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def rms_norm(
    x: Float[Array, "*rows embed"],
    weight: Float[Array, "*layers embed"],
    *,
    eps: float,
    offset: float,
    is_scaled_wide: bool,
    layer: int | Int32[Array, ""] | None,
) -> Float[Array, "*rows embed"]:
    """The contract of `pallas_kernels.rms_norm`."""
    if layer is None:
        weight, layer = weight[None], 0
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call("jaxpaged_rms_norm", jax.ShapeDtypeStruct(rows.shape, rows.dtype))
    options = {"eps": np.float32(eps), "offset": np.float32(offset), "is_scaled_wide": is_scaled_wide}
    return call(rows, weight, jnp.asarray(layer, jnp.int32), **options).reshape(x.shape)
