"""Log-probabilities on the device: of chosen ids and of the likeliest ones, for tokens of answers and of prompts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxpaged.batch import SamplingRows, ScoredTokens
from jaxpaged.config import LogprobsMode
from jaxpaged.exact_counts import count
from jaxpaged.packed_columns import as_columns
from jaxpaged.request import MAX_LOGPROBS
from jaxpaged.sampling import processed_logits

SCORE_BLOCK = 32
"""Tokens of prompts whose logits are there at once: those of a whole step would not fit."""


class LogprobRows(NamedTuple):
    """For each row: its chosen id's log-probability (or logit) and rank (1: the likeliest), and the likeliest ids, in order.

    Of ids that are equally likely the smaller one comes first, as in the choice of a greedy row. They leave the device as
    columns of one array (`as_columns`), which the host takes apart (`ToldRows.of`).
    """

    chosen: Float[Array, "rows"]
    rank: Int32[Array, "rows"]
    top_ids: Int32[Array, "rows top"]
    top: Float[Array, "rows top"]


class StepResult(NamedTuple):
    """What a step gives, once it is computed. `np.asarray` of it waits for the ids.

    `logprobs` and `prompt` are columns of `LogprobRows`. `logprobs` and `pooled`: a row for each sequence; they mean something for those
    that asked. `prompt`: in the order of `StepBatch.scored`, at least one row for each token of the step.
    """

    ids: Int32[Array, "seqs"]
    logprobs: Int32[Array, "seqs columns"]
    prompt: Int32[Array, "rows columns"]
    pooled: Float[Array, "seqs embed"]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.ids, dtype=dtype, copy=copy)


def answer_logprobs(
    raw: Float[Array, "rows vocab"],
    shaped: Float[Array, "rows vocab"],
    ids: Int32[Array, "rows"],
    rows: SamplingRows,
    wanted: Bool[Array, "rows"],
    num_ids: int,
    mode: LogprobsMode,
) -> Int32[Array, "rows columns"]:
    """What is told of the chosen ids, as columns of `LogprobRows`; if no row wants any, nothing is computed.

    Args:
        raw: float32, as they came from the head.
        shaped: with biases and penalties.
        ids: those that were chosen.
        rows: how.
        wanted: rows that want it.
        num_ids: ids from here on (a head wider than the tokenizer) count as impossible.
        mode: "raw": what the model itself thought. "processed": after biases, penalties, temperature, min_p, top_k and top_p.
    """
    is_raw = mode in ("raw_logprobs", "raw_logits")

    def compute(logits: Array, ids: Array, rows: SamplingRows) -> Array:
        logits = _possible(logits, num_ids) if is_raw else processed_logits(logits, rows, num_ids)
        return _describe(logits, ids, jnp.bool_(True), num_ids, mode)

    def nothing(logits: Array, *_: Any) -> Array:
        return _no_rows(logits.shape[0], num_ids)

    return lax.cond(jnp.any(wanted), compute, nothing, raw if is_raw else shaped, ids, rows)


def prompt_logprobs(
    hidden: Float[Array, "tokens embed"],
    scored: ScoredTokens,
    head: Callable[[Float[Array, "rows embed"]], Float[Array, "rows vocab"]],
    num_ids: int,
    mode: LogprobsMode,
) -> Int32[Array, "rows columns"]:
    """What the model itself thought of tokens of prompts, block by block: never more logits than `SCORE_BLOCK` rows.

    As in vLLM, biases, penalties and temperature play no part in them, whatever the mode; the "logits" modes give logits.

    Args:
        hidden: of all tokens of the step.
        scored: which of them, and what follows each; those first, then padding. Without any, nothing is computed.
        head: hidden states -> float32 logits.
        num_ids: as for `answer_logprobs`.
        mode: as there.

    Returns:
        Columns of `LogprobRows`, with a row for each entry of `scored`, filled up to whole blocks. Those of padding mean nothing, nor do
        likeliest ids in a block in which nobody wants them.
    """
    num_tokens = hidden.shape[0]
    block = min(SCORE_BLOCK, num_tokens)
    num_blocks = -(-num_tokens // block)

    def in_blocks(array: Array, filler: int) -> Array:
        return jnp.pad(array, (0, num_blocks * block - num_tokens), constant_values=filler).reshape(num_blocks, block)

    def compute(at: Array, ids: Array, num_top: Array) -> Array:
        logits = _possible(head(hidden[at]), num_ids)
        return _describe(logits, ids, jnp.any(num_top > 0), num_ids, mode)

    def nothing(*_: Any) -> Array:
        return _no_rows(block, num_ids)

    def one_block(_: None, of_block: tuple[Array, Array, Array]) -> tuple[None, Array]:
        return None, lax.cond(of_block[2][0] >= 0, compute, nothing, *of_block)

    def all_blocks(scored: ScoredTokens) -> Array:
        arrays = in_blocks(scored.at, 0), in_blocks(scored.next_ids, 0), in_blocks(scored.num_top, -1)
        return lax.scan(one_block, None, arrays)[1].reshape(num_blocks * block, -1)

    return lax.cond(scored.num_top[0] >= 0, all_blocks, lambda _: _no_rows(num_blocks * block, num_ids), scored)


def _possible(logits: Float[Array, "rows vocab"], num_ids: int) -> Float[Array, "rows vocab"]:
    vocab = logits.shape[1]
    return logits if num_ids >= vocab else jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)


def _describe(
    logits: Float[Array, "rows vocab"], ids: Int32[Array, "rows"], has_top: Bool[Array, ""], num_ids: int, mode: LogprobsMode
) -> Int32[Array, "rows columns"]:
    num_rows, vocab = logits.shape
    num_top = _num_top(num_ids)
    chosen = jnp.take_along_axis(logits, jnp.maximum(ids, 0)[:, None], axis=1)
    is_before = (logits > chosen) | ((logits == chosen) & (jnp.arange(vocab) < ids[:, None]))
    rank = 1 + count(is_before)

    def find(logits: Array) -> Array:
        return as_columns(lax.top_k(logits, num_top))

    columns = lax.cond(has_top, find, lambda _: jnp.zeros((num_rows, 2 * num_top), jnp.int32), logits)
    top, top_ids = lax.bitcast_convert_type(columns[:, :num_top], jnp.float32), columns[:, num_top:]
    if mode in ("raw_logprobs", "processed_logprobs"):
        largest = jnp.max(logits, axis=-1, keepdims=True)
        total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True)) + largest
        chosen, top = chosen - total, top - total
    return as_columns(LogprobRows(chosen[:, 0], rank, top_ids, top))


def _num_top(num_ids: int) -> int:
    return min(MAX_LOGPROBS, num_ids)


def _no_rows(num_rows: int, num_ids: int) -> Int32[Array, "rows columns"]:
    return jnp.zeros((num_rows, 2 + 2 * _num_top(num_ids)), jnp.int32)
