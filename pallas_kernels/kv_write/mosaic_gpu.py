"""Rotary embedding and the write of new keys and values as one kernel on Hopper GPUs, in the memory of the pool.

A CTA does one token: bulk copies bring its heads and its angles into shared memory, a warpgroup turns up to 64 heads at a time, and bulk
copies take the queries to the result and keys and values to their page, one box `[kv_heads, head_dim]` each. Values need no arithmetic
unless the pages are of another type. What is moved is all the cost: at 32 tokens of 48 heads of 128 numbers, 0.8 MB.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu_target import gpu_target, hopper_refusals
from pallas_kernels.kv_write.rotation import Written, highest
from pallas_kernels.mosaic_tiles import ROWS, load_untiled, store_untiled

MAX_HEAD_DIM = 256
MAX_HEADS = 256
"""Sides of a bulk copy's box."""


def refusals(q: Any, k_pages: Any, cos: Any) -> list[str]:
    """A sentence for each thing that the kernel cannot do; the operands follow the contract."""
    target = gpu_target()
    if target is None:
        return ["it needs an NVIDIA GPU of compute capability 9.0, and this program is for another device"]
    return [*domain_refusals(q, k_pages, cos), *hopper_refusals(target)]


def domain_refusals(q: Any, k_pages: Any, cos: Any) -> list[str]:
    """A sentence for each limit that dtypes and shapes break, whatever the device."""
    found = []
    head_dim, heads, kv_heads = k_pages.shape[-1], q.shape[1], k_pages.shape[-3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"queries are bfloat16 or float16, not {q.dtype}")
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn):
        found.append(f"pages are of the queries' dtype or float8_e4m3fn, not {k_pages.dtype} beside {q.dtype}")
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        found.append(f"head_dim is a multiple of 16 and at most {MAX_HEAD_DIM}, not {head_dim}")
    if cos is not None and (cos.shape[-1] % 8 or 2 * cos.shape[-1] > head_dim):
        found.append(f"half_dim is a multiple of 8 and at most half of head_dim, not {cos.shape[-1]}")
    if heads > MAX_HEADS or kv_heads > MAX_HEADS:
        found.append(f"at most {MAX_HEADS} heads, not {max(heads, kv_heads)}")
    return found


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
    interpret: Any = None,
) -> Written:
    """The contract of `pallas_kernels.kv_write`; `interpret` is for tests."""
    shape = k_pages.shape
    if layer is None:
        k_pages, v_pages, layer = k_pages[None], v_pages[None], 0
    angles = None if cos is None or sin is None else (cos.astype(jnp.float32), sin.astype(jnp.float32))
    places = (jnp.asarray(layer, jnp.int32), write_pages, write_offsets)
    written = _write(q, k, v, k_pages, v_pages, places, angles, interpret=interpret)
    return Written(written.q, written.k_pages.reshape(shape), written.v_pages.reshape(shape))


@functools.partial(jax.jit, static_argnames=("interpret",))
def _write(q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, places: Any, angles: Any, *, interpret: Any) -> Written:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_layers, num_pages, _, page_size, _ = k_pages.shape
    layer, write_pages, write_offsets = places
    # Layers and pages as one axis, so that no layer is sliced out of the pool; a token of no page gets a row beyond all.
    rows = jnp.where(write_pages < num_pages, layer * num_pages + write_pages, num_layers * num_pages).astype(jnp.int32)
    half = 0 if angles is None else angles[0].shape[1]
    is_recast = k_pages.dtype != k.dtype

    def write_tokens(*refs: Any) -> None:
        q_ref, k_ref, v_ref, rows_ref, offsets_ref, *rest = refs
        angle_refs, rest = rest[: 2 if half else 0], rest[2 if half else 0 :]
        k_pool, v_pool, q_out, q_smem, k_smem, v_smem, cos_smem, sin_smem, *casts, full = rest
        angles_smem = (cos_smem, sin_smem)
        token = lax.axis_index("token")
        copies = [(q_ref.at[token], q_smem.at[pl.ds(0, num_heads)]), (k_ref.at[token], k_smem.at[pl.ds(0, num_kv_heads)])]
        copies.append((v_ref.at[token], v_smem.at[pl.ds(0, num_kv_heads)]))
        copies += [(source.at[token], target) for source, target in zip(angle_refs, angles_smem, strict=False)]
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, full)
        plgpu.barrier_wait(full)

        def column(ref: Any) -> Array:
            return lax.broadcast_in_dim(plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(0)), (ROWS, half), [1])

        def turn(tile: Any, num_rows: int) -> None:
            cos, sin = map(column, angles_smem)
            for begin in range(0, num_rows, ROWS):
                own = pl.ds(begin, ROWS)
                low, high = pl.ds(0, half), pl.ds(half, half)
                first, second = load_untiled(tile.at[own, low]), load_untiled(tile.at[own, high])
                store_untiled(tile.at[own, low], first * cos - second * sin)
                store_untiled(tile.at[own, high], second * cos + first * sin)

        def recast(tile: Any, target: Any, num_rows: int) -> None:
            limit = highest(target.dtype)
            for begin in range(0, num_rows, ROWS):
                own = pl.ds(begin, ROWS)
                store_untiled(target.at[own], jnp.clip(load_untiled(tile.at[own]), -limit, limit))

        if half:
            turn(q_smem, num_heads)
            turn(k_smem, num_kv_heads)
        new = [k_smem, v_smem]
        if is_recast:
            for tile, target in zip(new, casts, strict=True):
                recast(tile, target, num_kv_heads)
            new = casts
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(0, num_heads)], q_out.at[token])
        row, offset = rows_ref[token], offsets_ref[token]

        @pl.when(row < num_layers * num_pages)
        def _() -> None:
            for tile, pool in zip(new, (k_pool, v_pool), strict=True):
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, num_kv_heads)], pool.at[row, :, offset])

        plgpu.wait_smem_to_gmem(0)

    def tile(num_rows: int, dtype: Any) -> Any:
        return plgpu.SMEM((-(-num_rows // ROWS) * ROWS, head_dim), dtype)

    pool_shape = (num_layers * num_pages, num_kv_heads, page_size, head_dim)
    pools = [jax.new_ref(pool.reshape(pool_shape)) for pool in (k_pages, v_pages)]
    run = plgpu.kernel(
        write_tokens,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tokens,),
        grid_names=("token",),
        scratch_types=[
            tile(num_heads, q.dtype),
            tile(num_kv_heads, k.dtype),
            tile(num_kv_heads, v.dtype),
            plgpu.SMEM((max(half, 8),), jnp.float32),
            plgpu.SMEM((max(half, 8),), jnp.float32),
            *[tile(num_kv_heads, k_pages.dtype)] * (2 if is_recast else 0),
            plgpu.Barrier(num_arrivals=5 if half else 3),
        ],
        **({"interpret": interpret} if interpret is not None else {}),
    )
    turned = run(q, k, v, rows, write_offsets, *(angles or ()), *pools)
    return Written(turned, *(jax.freeze(pool).reshape(k_pages.shape) for pool in pools))
