"""Sums of hidden states on the device: what embeddings are made of (`embeddings`).

A step adds up the final hidden states (behind the last norm) of the tokens of each row that asks for it. A prompt that is computed
in several steps goes on from the sum in its slot. A step in which nobody asks computes nothing.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpaged.batch import StepBatch
from jaxpaged.exact_counts import count


def pool_rows(hidden: Float[Array, "tokens embed"], batch: StepBatch, kept: Float[Array, "slots embed"]) -> Float[Array, "seqs embed"]:
    """Each row's sum so far, in float32; 0 for rows that do not ask.

    A row with a hidden state that is no finite number gives NaN; the others are not touched by it.

    Args:
        hidden: of every token of the step.
        batch: `pool_starts` says where the sum of a row begins, and `pool_slots` where its earlier steps left theirs.
        kept: sums of the slots' earlier steps.
    """
    starts, ends = batch.cu_q_lens[:-1], batch.cu_q_lens[1:]

    def add_up(hidden: Array, kept: Array) -> Array:
        token = jnp.arange(hidden.shape[0])
        is_own = ((token >= batch.pool_starts[:, None]) & (token < ends[:, None])).astype(jnp.float32)
        # A product, not a scatter, whose order of additions a GPU leaves open; what is not finite would spread to all rows in it.
        is_usable = count(jnp.isfinite(hidden)) == hidden.shape[1]
        usable = jnp.where(is_usable[:, None], hidden.astype(jnp.float32), 0)
        sums = jnp.matmul(is_own, usable, precision=lax.Precision.HIGHEST)
        is_spoiled = count((is_own > 0) & ~is_usable) > 0
        # The first step of a prompt begins anew, whatever the slot's last owner left there.
        is_first = batch.kv_lens == ends - starts
        earlier = jnp.where(is_first[:, None], 0, kept.at[batch.pool_slots].get(mode="fill", fill_value=0))
        return jnp.where(is_spoiled[:, None], jnp.nan, earlier + sums)

    def nothing(hidden: Array, kept: Array) -> Array:
        return jnp.zeros((ends.shape[0], hidden.shape[1]), jnp.float32)

    return lax.cond(jnp.any(batch.pool_starts < ends), add_up, nothing, hidden, kept)


def keep_sums(kept: Float[Array, "slots embed"], batch: StepBatch, pooled: Float[Array, "seqs embed"]) -> Float[Array, "slots embed"]:
    """Puts the sums into the slots of rows whose prompts go on."""
    return kept.at[batch.pool_slots].set(pooled, mode="drop")
