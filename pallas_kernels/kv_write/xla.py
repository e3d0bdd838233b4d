"""Rotary embedding and scatter as plain XLA, for any device: the pools are updated in place where they are donated."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.kv_write.rotation import Written, highest, rotate


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
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)

    def put(pool: Array, new: Array) -> Array:
        limit = highest(pool.dtype)
        if limit < highest(new.dtype):
            # The cast would turn what is too large into NaN or infinity, which would then spread over the whole answer.
            # In float32, since bfloat16 has no number between 65280 and 65536.
            new = jnp.clip(new.astype(jnp.float32), -limit, limit)
        at = pool.at[write_pages, :, write_offsets] if layer is None else pool.at[layer, write_pages, :, write_offsets]
        return at.set(new.astype(pool.dtype), mode="drop", unique_indices=True)

    return Written(q, put(k_pages, k), put(v_pages, v))
