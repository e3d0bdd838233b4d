"""Rotation as a product of complex numbers, and a write of one token after another: written to be believed."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.kv_write.rotation import Written, highest


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
    if cos is not None and sin is not None:
        turn = lax.complex(cos.astype(jnp.float32), sin.astype(jnp.float32))
        q, k = _turned(q, turn), _turned(k, turn)

    def write_token(token: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        at = (layer, write_pages[token], slice(None), write_offsets[token])
        is_ours = write_pages[token] < pools[0].shape[1]
        return tuple(  # type: ignore[return-value]
            jnp.where(is_ours, pool.at[at].set(_bounded(new[token], pool.dtype)), pool) for pool, new in zip(pools, (k, v), strict=True)
        )

    k_pages, v_pages = lax.fori_loop(0, q.shape[0], write_token, (k_pages, v_pages))
    return Written(q, k_pages.reshape(shape), v_pages.reshape(shape))


def _turned(x: Array, turn: Array) -> Array:
    half = turn.shape[1]
    wide = x.astype(jnp.float32)
    pairs = lax.complex(wide[..., :half], wide[..., half : 2 * half]) * turn[:, None]
    return jnp.concatenate([pairs.real, pairs.imag, wide[..., 2 * half :]], axis=-1).astype(x.dtype)


def _bounded(new: Array, dtype: jnp.dtype) -> Array:
    limit = highest(dtype)
    return jnp.clip(new.astype(jnp.float32), -limit, limit).astype(dtype)
