"""Log-probabilities on the device: of the chosen ids, and of the largest ones, from the model's own logits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxpaged.request import MAX_LOGPROBS


class LogprobRows(NamedTuple):
    """For each row: its chosen id's log-probability and rank (1: the likeliest), and the likeliest ids, in order."""

    chosen: Float[Array, "seqs"]
    rank: Int32[Array, "seqs"]
    top_ids: Int32[Array, "seqs top"]
    top: Float[Array, "seqs top"]


class StepResult(NamedTuple):
    """What a step gives, once it is computed. `np.asarray` of it waits for the ids.

    `logprobs` and `pooled` mean something for rows that asked.
    """

    ids: Int32[Array, "seqs"]
    logprobs: LogprobRows
    pooled: Float[Array, "seqs embed"]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.ids, dtype=dtype, copy=copy)


def log_probabilities(
    logits: Float[Array, "rows vocab"], ids: Int32[Array, "rows"], num_logprobs: Int32[Array, "rows"], num_ids: int
) -> LogprobRows:
    """What the model itself thought: before biases, penalties and temperature ("raw_logprobs" of vLLM).

    Args:
        logits: float32, as they came from the head.
        ids: those that were chosen.
        num_logprobs: how many likeliest ids a row wants; negative: nothing. If no row wants any, nothing is computed.
        num_ids: ids from here on (a head wider than the tokenizer) count as impossible.
    """
    num_rows, vocab = logits.shape
    num_top = min(MAX_LOGPROBS, num_ids)

    def compute(logits: Array, ids: Array) -> LogprobRows:
        possible = jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)
        largest = jnp.max(possible, axis=-1)
        total = jnp.log(jnp.sum(jnp.exp(possible - largest[:, None]), axis=-1)) + largest
        chosen = jnp.take_along_axis(possible, jnp.maximum(ids, 0)[:, None], axis=1)
        rank = 1 + jnp.sum(possible > chosen, axis=-1, dtype=jnp.int32)
        top, top_ids = lax.top_k(possible, num_top)
        return LogprobRows(chosen[:, 0] - total, rank, top_ids.astype(jnp.int32), top - total[:, None])

    def nothing(logits: Array, ids: Array) -> LogprobRows:
        zeros = jnp.zeros((num_rows, num_top), jnp.float32)
        return LogprobRows(zeros[:, 0], jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, num_top), jnp.int32), zeros)

    return lax.cond(jnp.any(num_logprobs >= 0), compute, nothing, logits, ids)
