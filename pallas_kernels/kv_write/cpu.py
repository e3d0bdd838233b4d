"""Rotary embedding and writes in C++ on CPU: `write.h` has the work. The pools are the result's own memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform
from pallas_kernels.kv_write.rotation import Written

MAX_HEAD_DIM = 1024
_PAGES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)


def refusals(q: Any, k_pages: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"queries are float32 or bfloat16, not {q.dtype}")
    if k_pages.dtype not in _PAGES:
        refused.append(f"pages are float32, bfloat16 or float8_e4m3fn, not {k_pages.dtype}")
    if q.shape[2] > MAX_HEAD_DIM:
        refused.append(f"heads have up to {MAX_HEAD_DIM} dimensions, not {q.shape[2]}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def kv_write(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    write_pages: Int32[Array, "tokens"],
    write_offsets: Int32[Array, "tokens"],
    *,
    cos: Float[Array, "tokens half_dim"] | None,
    sin: Float[Array, "tokens half_dim"] | None,
    layer: int | Int32[Array, ""] | None,
) -> Written:
    """The contract of `pallas_kernels.kv_write`."""
    shape = k_pages.shape
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    if cos is None or sin is None:
        cos = sin = jnp.zeros((q.shape[0], 0), jnp.float32)
    results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, k_pages, v_pages))
    call = jax.ffi.ffi_call("jaxpaged_kv_write", results, input_output_aliases={3: 1, 4: 2})
    turned, *pools = call(q, k, v, k_pages, v_pages, write_pages, write_offsets, cos, sin, jnp.asarray(layer, jnp.int32))
    return Written(turned, *(pool.reshape(shape) for pool in pools))
