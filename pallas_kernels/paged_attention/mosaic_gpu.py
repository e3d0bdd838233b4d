"""Paged attention on Hopper GPUs: a kernel for one-token sequences and one for longer query spans, in one program."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu_target import HOPPER_MULTIPROCESSORS, gpu_target, hopper_refusals
from pallas_kernels.mosaic_tiles import ROWS, has_tiling
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS
from pallas_kernels.paged_attention.mosaic_decode import decode
from pallas_kernels.paged_attention.mosaic_prefill import MAX_WIDENED_HEAD_DIM, prefill

MAX_HEAD_DIM = 256


def refusals(q: Any, k_pages: Any, is_causal: bool) -> list[str]:
    """A sentence for each thing that the kernels cannot do; the operands follow the contract."""
    target = gpu_target()
    if target is None:
        return ["it needs an NVIDIA GPU of compute capability 9.0, and this program is for another device"]
    found = domain_refusals(q, k_pages)
    if not is_causal:
        found.append("its rows see no later positions")
    return found + hopper_refusals(target)


def domain_refusals(q: Any, k_pages: Any) -> list[str]:
    """A sentence for each limit that dtypes and shapes break, whatever the device."""
    found = []
    page_size, head_dim = k_pages.shape[-2:]
    heads_per_kv_head = q.shape[1] // k_pages.shape[-3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"queries are bfloat16 or float16, not {q.dtype}")
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn):
        found.append(f"pages are of the queries' dtype or float8_e4m3fn, not {k_pages.dtype} beside {q.dtype}")
    elif not has_tiling(head_dim, k_pages.dtype) or head_dim > MAX_HEAD_DIM:
        step = 32 // jnp.dtype(k_pages.dtype).itemsize
        found.append(f"head_dim is a multiple of {step} and at most {MAX_HEAD_DIM} with {k_pages.dtype} pages, not {head_dim}")
    if page_size % 8 or (BLOCK_TOKENS % page_size and page_size % BLOCK_TOKENS):
        found.append(f"page_size is 8, 16, 32 or a multiple of {BLOCK_TOKENS}, not {page_size}")
    if heads_per_kv_head > ROWS:
        found.append(f"at most {ROWS} query heads share a KV head, not {heads_per_kv_head}")
    return found


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
    scale: float,
    sliding_window: int | Int32[Array, ""] | None,
    soft_cap: float | None,
    sinks: Float[Array, "heads"] | None = None,
    is_causal: bool = True,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
    num_ctas: int | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens heads head_dim"]:
    """The contract of `pallas_kernels.paged_attention`; `num_ctas` and `interpret` are for tests."""
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    if group is None:
        page_tables, group = page_tables[None], 0
    if num_ctas is None:
        target = gpu_target()
        num_ctas = HOPPER_MULTIPROCESSORS if target is None else target.num_multiprocessors
    operands = (
        q,
        k_pages,
        v_pages,
        page_tables,
        kv_lens,
        cu_q_lens,
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(group, jnp.int32),
        jnp.asarray(scale * k_scale, jnp.float32),
        jnp.asarray(v_scale, jnp.float32),
        None if sliding_window is None else jnp.asarray(sliding_window, jnp.int32),
        sinks,
    )
    decoded = decode(*operands, soft_cap=soft_cap, num_ctas=num_ctas, interpret=interpret)
    if q.shape[0] == 1:
        return decoded

    is_longer = cu_q_lens[1:] - cu_q_lens[:-1] > 1

    # Each fills rows of its own, and leaves 0 in the others.
    def with_longer(decoded: Array) -> Array:
        return decoded + prefill(*operands, soft_cap=soft_cap, interpret=interpret)

    def with_longer_by_xla(decoded: Array) -> Array:
        # A sequence without positions costs XLA nothing.
        return decoded + xla.paged_attention(
            q,
            k_pages,
            v_pages,
            page_tables,
            jnp.where(is_longer, kv_lens, 0),
            cu_q_lens,
            layer=layer,
            group=group,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            is_causal=is_causal,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    is_too_wide = k_pages.dtype != q.dtype and q.shape[2] > MAX_WIDENED_HEAD_DIM
    return lax.cond(jnp.any(is_longer), with_longer_by_xla if is_too_wide else with_longer, lambda decoded: decoded, decoded)
