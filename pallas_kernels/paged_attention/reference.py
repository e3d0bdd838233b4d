"""Paged attention written to be believed: gather every page of every row, one softmax in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


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
    sinks: Float[Array, "heads"] | None,
    is_causal: bool,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
) -> Float[Array, "tokens heads head_dim"]:
    """The contract of `pallas_kernels.paged_attention`, in tokens x max_pages x page_size memory."""
    if layer is not None:
        k_pages, v_pages = k_pages[layer], v_pages[layer]
    if group is not None:
        page_tables = page_tables[group]
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]

    token = jnp.arange(num_tokens)
    seq = jnp.searchsorted(cu_q_lens, token, side="right") - 1  # the last sequence that begins at or before this row
    is_live = token < cu_q_lens[-1]
    seq = jnp.where(is_live, seq, 0)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token if is_causal else kv_lens[seq] - 1

    def history(pages: Array) -> Array:  # -> [tokens, kv_heads, max_pages * page_size, head_dim]
        own = jnp.moveaxis(pages[page_tables[seq]], 2, 1)
        return own.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32)

    keys, values = history(k_pages) * k_scale, history(v_pages) * v_scale
    kv_position = jnp.arange(keys.shape[2])
    visible = (kv_position <= position[:, None]) & is_live[:, None]
    if sliding_window is not None:
        visible &= kv_position > position[:, None] - sliding_window
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    logits = jnp.einsum("tkgd,tkpd->tkgp", grouped, keys, precision=jax.lax.Precision.HIGHEST) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    takes_part = jnp.broadcast_to(visible[:, None, None], logits.shape)
    if sinks is not None:
        of_row = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1), (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, of_row], axis=-1)
        takes_part = jnp.concatenate([takes_part, jnp.ones_like(of_row, bool)], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1, where=takes_part)[..., : keys.shape[2]]
    # What is not visible may be NaN, and 0 * NaN is NaN: the values are masked as well as the logits.
    values = jnp.where(visible[:, None, :, None], values, 0)
    weights = jnp.where(visible[:, None, None], weights, 0)
    out = jnp.einsum("tkgp,tkpd->tkgd", weights, values, precision=jax.lax.Precision.HIGHEST)
    out = jnp.where(is_live[:, None, None], out.reshape(q.shape), 0)
    return out.astype(q.dtype)
