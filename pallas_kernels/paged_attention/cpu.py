"""Paged attention in C++ on CPU: `attend.h` has the work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels import native
from pallas_kernels.gpu_target import platform

_PAGES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)
_NO_WINDOW = 2**31 - 1


def refusals(q: Any, k_pages: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        refused.append(f"queries are float32 or bfloat16, not {q.dtype}")
    if k_pages.dtype not in _PAGES:
        refused.append(f"pages are float32, bfloat16 or float8_e4m3fn, not {k_pages.dtype}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    page_tables: Int32[Array, "*groups seqs max_pages"],
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    *,
    layer: int | Int32[Array, ""] | None,
    group: int | Int32[Array, ""] | None,
    scale: float | Float[Array, ""],
    sliding_window: int | Int32[Array, ""] | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None,
    is_causal: bool,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
) -> Float[Array, "tokens heads head_dim"]:
    """The contract of `pallas_kernels.paged_attention`."""
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    if group is None:
        page_tables, group = page_tables[None], 0
    window = _NO_WINDOW if sliding_window is None else sliding_window
    places = jnp.stack([jnp.asarray(number, jnp.int32) for number in (layer, group, window)])
    factors = jnp.stack([jnp.asarray(number, jnp.float32) for number in (scale * k_scale, v_scale)])
    own_sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call("jaxpaged_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    operands = (q, k_pages, v_pages, page_tables, kv_lens, cu_q_lens, places, factors, own_sinks)
    return call(*operands, soft_cap=np.float32(soft_cap or 0), is_causal=is_causal)
