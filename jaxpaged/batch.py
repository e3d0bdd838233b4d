"""One step's inputs: the arrays of a bucket, how they travel, and the words for array axes.

Axes (every annotated array of the project uses these words and no others):

    tokens      rows of the flat token batch; tokens of all sequences lie one after another
    seqs        rows of sequences in a step
    pages       pages of the pool
    page_size   token slots in a page
    max_pages   entries of a sequence's page table
    heads       query heads
    kv_heads    key/value heads
    head_dim    numbers per head
    half_dim    half of the turned part of head_dim: angles of the rotary embedding
    ropes       tables of rotary angles that layers choose from
    embed       width of the residual stream
    ffw         width of the feed-forward block
    vocab       rows of the embedding and of the head
    experts     feed-forward blocks that a token is sent to some of
    layers      leading axis of stacked weights and of the pool
    rows        rows of anything that sequences or tokens were gathered into
    blocks      tiles of work inside a kernel
    slots       places of running sequences in the device's state
    groups      KV groups: layers that share page tables; of a linear map, 32 inputs that share a scale
    chunk       positions that a kernel walks at once
    banned      token ids that a row may not choose
    top         likeliest ids of a row
    in          inputs of a linear map
    out         outputs of a linear map
    tiles       groups of 16 outputs of a linear map, side by side in memory
    lanes       outputs of a tile
    packed      bytes of a tile's weights of one group of inputs
    half        bytes of packed pairs of 4-bit weights: half the inputs
    blob        numbers of a packed step
    places      whatever one counts
    columns     numbers of a row that lie side by side, whatever they mean

Everything a step needs travels to the device as one int32 array, the blob (`StepPacker` fills it); the step program takes it
apart (`unpack`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxpaged.request import MAX_BAD_WORDS, MAX_EOS_IDS, MAX_STOP_TOKEN_IDS

MAX_BANNED_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS + MAX_BAD_WORDS
"""End and stop ids of a row that `min_tokens` keeps away, and last tokens of bad words."""


class SamplingRows(NamedTuple):
    """How each row chooses its token."""

    temperature: Float[Array, "seqs"]
    top_k: Int32[Array, "seqs"]
    top_p: Float[Array, "seqs"]
    min_p: Float[Array, "seqs"]
    presence_penalty: Float[Array, "seqs"]
    frequency_penalty: Float[Array, "seqs"]
    repetition_penalty: Float[Array, "seqs"]
    has_bias: Int32[Array, "seqs"]
    num_logprobs: Int32[Array, "seqs"]
    seed: UInt32[Array, "seqs 2"]
    position: Int32[Array, "seqs"]
    banned_ids: Int32[Array, "seqs banned"]


class ScoredTokens(NamedTuple):
    """Tokens of prompts of which it is asked how likely the next one was: those first, then padding.

    Attributes:
        at: place in the step.
        next_ids: the id that follows in the prompt.
        num_top: likeliest ids that are wanted beside it; -1 for padding.
    """

    at: Int32[Array, "tokens"]
    next_ids: Int32[Array, "tokens"]
    num_top: Int32[Array, "tokens"]


class StepBatch(NamedTuple):
    """The arrays of one step. Tokens from `cu_q_lens[-1]` on, and sequences of `kv_lens` 0, are padding.

    A token whose `source_slots` is not negative is the id last sampled into that slot, which the host need not know yet.
    Each KV group has page tables of its own, and places of its own that a token is written to.

    A row whose hidden states are asked for (`pooling`) gives the sum of those of its tokens from `pool_starts` on, a place in the flat
    batch; other rows have one beyond all tokens. Its sum goes on from, and is kept in, the slot in `pool_slots`, if that is a slot.
    """

    token_ids: Int32[Array, "tokens"]
    source_slots: Int32[Array, "tokens"]
    positions: Int32[Array, "tokens"]
    write_pages: Int32[Array, "groups tokens"]
    write_offsets: Int32[Array, "tokens"]
    page_tables: Int32[Array, "groups seqs max_pages"]
    kv_lens: Int32[Array, "seqs"]
    cu_q_lens: Int32[Array, "seqs+1"]
    sample_tokens: Int32[Array, "seqs"]
    target_slots: Int32[Array, "seqs"]
    pool_starts: Int32[Array, "seqs"]
    pool_slots: Int32[Array, "seqs"]
    sampling: SamplingRows
    scored: ScoredTokens


class BatchLayout(NamedTuple):
    """Sizes of a bucket's arrays; hashable, the key of a compiled program."""

    num_tokens: int
    num_seqs: int
    max_pages: int
    page_size: int
    num_pages: int
    num_slots: int
    num_groups: int = 1

    @property
    def fields(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each array, in the order in which they lie in the blob; the page tables, which can be large, are last."""
        tokens, seqs = self.num_tokens, self.num_seqs
        return (
            ("token_ids", (tokens,)),
            ("source_slots", (tokens,)),
            ("positions", (tokens,)),
            ("write_pages", (self.num_groups, tokens)),
            ("write_offsets", (tokens,)),
            ("kv_lens", (seqs,)),
            ("cu_q_lens", (seqs + 1,)),
            ("sample_tokens", (seqs,)),
            ("target_slots", (seqs,)),
            ("pool_starts", (seqs,)),
            ("pool_slots", (seqs,)),
            ("temperature", (seqs,)),
            ("top_k", (seqs,)),
            ("top_p", (seqs,)),
            ("min_p", (seqs,)),
            ("presence_penalty", (seqs,)),
            ("frequency_penalty", (seqs,)),
            ("repetition_penalty", (seqs,)),
            ("has_bias", (seqs,)),
            ("num_logprobs", (seqs,)),
            ("seed", (seqs, 2)),
            ("position", (seqs,)),
            ("banned_ids", (seqs, MAX_BANNED_IDS)),
            ("scored_at", (tokens,)),
            ("scored_next_ids", (tokens,)),
            ("scored_num_top", (tokens,)),
            ("page_tables", (self.num_groups, seqs, self.max_pages)),
        )

    @property
    def blob_size(self) -> int:
        """Number of int32 in the blob."""
        return sum(int(np.prod(shape)) for _, shape in self.fields)


FLOAT_FIELDS = frozenset({"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})
UNSIGNED_FIELDS = frozenset({"seed"})


def unpack(blob: Int32[Array, "blob"], layout: BatchLayout) -> StepBatch:
    """Takes the blob apart on the device."""
    arrays: dict[str, jax.Array] = {}
    start = 0
    for name, shape in layout.fields:
        size = int(np.prod(shape))
        part = lax.slice(blob, (start,), (start + size,)).reshape(shape)
        if name in FLOAT_FIELDS:
            part = lax.bitcast_convert_type(part, np.float32)
        elif name in UNSIGNED_FIELDS:
            part = lax.bitcast_convert_type(part, np.uint32)
        arrays[name] = part
        start += size
    sampling = SamplingRows(**{name: arrays.pop(name) for name in SamplingRows._fields})
    scored = ScoredTokens(**{name: arrays.pop(f"scored_{name}") for name in ScoredTokens._fields})
    return StepBatch(sampling=sampling, scored=scored, **arrays)


def take_ids_from_slots(batch: StepBatch, last_ids: Int32[Array, "slots"]) -> StepBatch:
    """Fills in the token ids that the host did not know when it packed the step.

    A slot can hold the mark of a failed row (a negative number): its late token is computed from id 0 and thrown away by the host.
    """
    from_slots = jnp.maximum(last_ids.at[jnp.maximum(batch.source_slots, 0)].get(mode="fill", fill_value=0), 0)
    return batch._replace(token_ids=jnp.where(batch.source_slots >= 0, from_slots, batch.token_ids))
