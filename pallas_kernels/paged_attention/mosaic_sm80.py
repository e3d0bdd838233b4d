"""Paged attention on Ampere and Ada GPUs: a kernel for one-token sequences; longer query spans are XLA's, in the same program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu_target import GpuTarget, gpu_target
from pallas_kernels.mosaic_tiles import LOG2E
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS, SEQ, share_out
from pallas_kernels.paged_attention.sm80_combine import combine
from pallas_kernels.paged_attention.sm80_decode import (
    AsyncCopies,
    Copies,
    Sm80Shape,
    attend_parts,
    copy_swizzle,
    padded_rows,
    shared_bytes,
)

SHARED_BYTES = {(8, 0): 164 * 1024, (8, 6): 100 * 1024, (8, 7): 164 * 1024, (8, 9): 100 * 1024}
"""Shared memory of a multiprocessor by compute capability. Each CTA takes 1 KB more than it asks for."""

ASSUMED = GpuTarget("A100", (8, 0), 108)
"""What is assumed where no device can be asked."""

MAX_STAGES = 4
MAX_PIECES = 63
"""Groups of copies that the hardware counts."""

MAX_ELEMENTS = 64 * 128
"""Of the results of a KV head: beyond, they do not fit into the registers."""


def refusals(q: Any, k_pages: Any, is_causal: bool) -> list[str]:
    """A sentence for each thing that the kernel cannot do; the operands follow the contract."""
    target = gpu_target()
    if target is None:
        return ["it needs an NVIDIA GPU of compute capability 8.0, 8.6, 8.7 or 8.9, and this program is for another device"]
    found = domain_refusals(q, k_pages)
    if not is_causal:
        found.append("its rows see no later positions")
    if target.capability not in SHARED_BYTES:
        has = "an unknown one" if target.capability is None else ".".join(map(str, target.capability))
        found.append(f"it needs compute capability 8.0, 8.6, 8.7 or 8.9, and {target.kind} has {has}")
    elif not found and occupancy(q, k_pages, target.capability) is None:
        least = shared_bytes(padded_rows(q, k_pages), q.shape[2], 2)
        most = SHARED_BYTES[target.capability] - 1024
        found.append(f"it needs {least} bytes of shared memory for a head_dim of {q.shape[2]}, and {target.kind} has {most}")
    return found


def domain_refusals(q: Any, k_pages: Any) -> list[str]:
    """A sentence for each limit that dtypes and shapes break, whatever the device."""
    found = []
    page_size, head_dim = k_pages.shape[-2:]
    rows = padded_rows(q, k_pages)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"queries are bfloat16 or float16, not {q.dtype}")
    elif k_pages.dtype != q.dtype:
        found.append(f"pages are of the queries' dtype, not {k_pages.dtype} beside {q.dtype}")
    if page_size % 8 or (BLOCK_TOKENS % page_size and page_size % BLOCK_TOKENS):
        found.append(f"page_size is 8, 16, 32 or a multiple of {BLOCK_TOKENS}, not {page_size}")
    elif head_dim % 32:
        found.append(f"head_dim is a multiple of 32, not {head_dim}")
    elif copy_swizzle(min(page_size, BLOCK_TOKENS), head_dim) is None:
        found.append(f"four warps cannot share out a copy of {page_size} tokens of a head_dim of {head_dim}: larger pages are needed")
    if rows > BLOCK_TOKENS or rows * head_dim > MAX_ELEMENTS:
        most = min(BLOCK_TOKENS, MAX_ELEMENTS // head_dim // 16 * 16)
        found.append(f"at most {most} query heads share a KV head with a head_dim of {head_dim}, not {q.shape[1] // k_pages.shape[-3]}")
    return found


def occupancy(q: Any, k_pages: Any, capability: tuple[int, int]) -> tuple[int, int] | None:
    """CTAs of a multiprocessor, and blocks of keys and values in a CTA's shared memory; None: there is no room for two blocks.

    Two CTAs, if there is room, so that one multiplies while the other waits.
    """
    rows, head_dim, page_size = padded_rows(q, k_pages), q.shape[2], k_pages.shape[-2]
    pieces = 1 + 2 * (BLOCK_TOKENS // min(page_size, BLOCK_TOKENS))
    for num_ctas in (2, 1):
        room = SHARED_BYTES[capability] // num_ctas - 1024
        fitting = [stages for stages in range(2, MAX_STAGES + 1) if shared_bytes(rows, head_dim, stages) <= room]
        fitting = [stages for stages in fitting if stages * pieces <= MAX_PIECES]
        if fitting:
            return num_ctas, fitting[-1]
    return None


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
    copies: Copies | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens heads head_dim"]:
    """The contract of `pallas_kernels.paged_attention`; `num_ctas`, `copies` and `interpret` are for tests."""
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    if group is None:
        page_tables, group = page_tables[None], 0
    target = gpu_target() or ASSUMED
    assert target.capability is not None, "refused before"
    plan = occupancy(q, k_pages, target.capability)
    assert plan is not None, "refused before"
    ctas_per_multiprocessor, stages = plan
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
    decoded = decode(
        *operands,
        soft_cap=soft_cap,
        num_ctas=num_ctas or target.num_multiprocessors * ctas_per_multiprocessor,
        stages=stages,
        copies=copies or AsyncCopies(),
        interpret=interpret,
    )
    if q.shape[0] == 1:
        return decoded
    is_longer = cu_q_lens[1:] - cu_q_lens[:-1] > 1

    # Each fills rows of its own, and leaves 0 in the others.
    def with_longer(decoded: Array) -> Array:
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

    return lax.cond(jnp.any(is_longer), with_longer, lambda decoded: decoded, decoded)


@functools.partial(jax.jit, static_argnames=("soft_cap", "num_ctas", "stages", "copies", "interpret"))
def decode(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "layers pages kv_heads page_size head_dim"],
    page_tables: Int32[Array, "groups seqs max_pages"],
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    layer: Int32[Array, ""],
    group: Int32[Array, ""],
    qk_scale: Float[Array, ""],
    v_scale: Float[Array, ""],
    sliding_window: Int32[Array, ""] | None,
    sinks: Float[Array, "heads"] | None,
    *,
    soft_cap: float | None,
    num_ctas: int,
    stages: int,
    copies: Copies,
    interpret: Any = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Rows of one-token sequences attended; all other rows are 0. `qk_scale` multiplies the products of queries and stored keys."""
    num_tokens, num_heads, head_dim = q.shape
    num_layers, num_pages, num_kv_heads, page_size, _ = k_pages.shape
    heads_per_kv_head = num_heads // num_kv_heads
    unit = min(page_size, BLOCK_TOKENS)
    shape = Sm80Shape(
        num_kv_heads=num_kv_heads,
        rows=padded_rows(q, k_pages),
        head_dim=head_dim,
        unit=unit,
        units_per_page=page_size // unit,
        dtype=q.dtype,
        soft_cap=soft_cap,
        num_ctas=num_ctas,
        stages=stages,
    )
    work = share_out(kv_lens, cu_q_lens, sliding_window, num_tokens=num_tokens, num_kv_heads=num_kv_heads, num_ctas=num_ctas)
    # The group's tables are found by row, so that they are never copied out of all groups' tables.
    num_groups, num_seqs, max_pages = page_tables.shape
    work = work._replace(seqs=work.seqs.at[:, SEQ].add(group * num_seqs))
    # Page numbers are not negative: this makes an array of what is a slice of the packed step, which would keep the kernel out of the
    # step's command buffer.
    page_tables = jnp.maximum(page_tables.reshape(num_groups * num_seqs, max_pages), 0)

    def padded(x: Array) -> Array:  # [.., num_kv_heads * heads_per_kv_head, ..] -> [.., rows, ..], a row of the first axis a pair
        return jnp.pad(x, ((0, 0), (0, shape.rows - heads_per_kv_head), *((0, 0) for _ in x.shape[2:])))

    # A sequence that is not to be done here has a row beyond all: it gets zeros, and gives nothing.
    queries = q.at[work.rows].get(mode="fill", fill_value=0).reshape(-1, heads_per_kv_head, head_dim)
    units = (num_layers * num_pages * num_kv_heads * shape.units_per_page, unit, head_dim)
    first_row = (layer * (num_pages * num_kv_heads * shape.units_per_page)).reshape(1)
    qk_scale = jnp.asarray(qk_scale * (LOG2E if soft_cap is None else 1 / soft_cap), jnp.float32).reshape(1)
    parts, lses = attend_parts(
        shape, padded(queries), k_pages.reshape(units), v_pages.reshape(units), page_tables, work, first_row, qk_scale, copies, interpret
    )
    base2_sinks = None if sinks is None else padded(sinks.astype(jnp.float32).reshape(num_kv_heads, heads_per_kv_head) * LOG2E)
    out_scale = jnp.asarray(v_scale, jnp.float32).reshape(1)
    values = combine(parts, lses, work.pairs, out_scale, base2_sinks, num_kv_heads=num_kv_heads, dtype=q.dtype, interpret=interpret)
    values = values[:, :heads_per_kv_head].reshape(-1, num_heads, head_dim)
    return jnp.zeros_like(q).at[work.rows].set(values, mode="drop")
