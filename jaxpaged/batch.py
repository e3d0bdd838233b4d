"""One step's inputs: packing scheduled sequences into the arrays of a bucket, and the words for array axes.

Axes (every annotated array of the project uses these words and no others):

    tokens      rows of the flat token batch; tokens of all sequences lie one after another
    seqs        rows of sequences in a step
    pages       pages of the pool
    page_size   token slots in a page
    max_pages   entries of a sequence's page table
    heads       query heads
    kv_heads    key/value heads
    head_dim    numbers per head
    half_dim    half of head_dim: angles of the rotary embedding
    embed       width of the residual stream
    ffw         width of the feed-forward block
    vocab       rows of the embedding and of the head
    layers      leading axis of stacked weights and of the pool
    rows        rows of anything that sequences or tokens were gathered into
    blocks      tiles of work inside a kernel
    slots       places of running sequences in the device's state
    chunk       positions that a kernel walks at once
    banned      token ids that a row may not choose
    in          inputs of a linear map
    out         outputs of a linear map
    blob        numbers of a packed step

Everything a step needs travels to the device as one int32 array, the blob (`pack`); the step program takes it apart (`unpack`).
A blob is a fresh array each step: an aligned numpy argument is used in place on CPU, so writing to it later would change a
running step.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxpaged.request import MAX_EOS_IDS, MAX_STOP_TOKEN_IDS
from jaxpaged.scheduled_step import ScheduledRow
from jaxpaged.sequence import NO_SLOT

MAX_BANNED_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS
"""End and stop ids of a row that `min_tokens` keeps away."""


class SamplingRows(NamedTuple):
    """How each row chooses its token."""

    temperature: Float[Array, "seqs"]
    top_k: Int32[Array, "seqs"]
    top_p: Float[Array, "seqs"]
    min_p: Float[Array, "seqs"]
    seed: UInt32[Array, "seqs 2"]
    position: Int32[Array, "seqs"]
    banned_ids: Int32[Array, "seqs banned"]


class StepBatch(NamedTuple):
    """The arrays of one step. Tokens from `cu_q_lens[-1]` on, and sequences of `kv_lens` 0, are padding.

    A token whose `source_slots` is not negative is the id last sampled into that slot, which the host need not know yet.
    """

    token_ids: Int32[Array, "tokens"]
    source_slots: Int32[Array, "tokens"]
    positions: Int32[Array, "tokens"]
    write_pages: Int32[Array, "tokens"]
    write_offsets: Int32[Array, "tokens"]
    page_tables: Int32[Array, "seqs max_pages"]
    kv_lens: Int32[Array, "seqs"]
    cu_q_lens: Int32[Array, "seqs+1"]
    sample_tokens: Int32[Array, "seqs"]
    target_slots: Int32[Array, "seqs"]
    sampling: SamplingRows


class BatchLayout(NamedTuple):
    """Sizes of a bucket's arrays; hashable, the key of a compiled program."""

    num_tokens: int
    num_seqs: int
    max_pages: int
    page_size: int
    num_pages: int
    num_slots: int

    @property
    def fields(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each array, in the order in which they lie in the blob."""
        tokens, seqs = self.num_tokens, self.num_seqs
        return (
            ("token_ids", (tokens,)),
            ("source_slots", (tokens,)),
            ("positions", (tokens,)),
            ("write_pages", (tokens,)),
            ("write_offsets", (tokens,)),
            ("page_tables", (seqs, self.max_pages)),
            ("kv_lens", (seqs,)),
            ("cu_q_lens", (seqs + 1,)),
            ("sample_tokens", (seqs,)),
            ("target_slots", (seqs,)),
            ("temperature", (seqs,)),
            ("top_k", (seqs,)),
            ("top_p", (seqs,)),
            ("min_p", (seqs,)),
            ("seed", (seqs, 2)),
            ("position", (seqs,)),
            ("banned_ids", (seqs, MAX_BANNED_IDS)),
        )

    @property
    def blob_size(self) -> int:
        """Number of int32 in the blob."""
        return sum(int(np.prod(shape)) for _, shape in self.fields)


_FLOATS = frozenset({"temperature", "top_p", "min_p"})
_UNSIGNED = frozenset({"seed"})


def _views(blob: np.ndarray, layout: BatchLayout) -> dict[str, np.ndarray]:
    views, start = {}, 0
    for name, shape in layout.fields:
        size = int(np.prod(shape))
        part = blob[start : start + size].reshape(shape)
        views[name] = part.view(np.float32) if name in _FLOATS else part.view(np.uint32) if name in _UNSIGNED else part
        start += size
    return views


def pack(rows: Seq[ScheduledRow], layout: BatchLayout, no_token: int) -> np.ndarray:
    """Returns the blob of a step: int32 [layout.blob_size].

    Args:
        rows: what the scheduler chose; their tokens together are at most `layout.num_tokens`.
        layout: the bucket.
        no_token: an id beyond the vocabulary, which fills the unused banned ids.
    """
    blob = np.zeros(layout.blob_size, np.int32)
    view = _views(blob, layout)
    view["banned_ids"].fill(no_token)
    view["source_slots"].fill(NO_SLOT)
    view["target_slots"].fill(layout.num_slots)  # beyond the slots: dropped
    # Padding tokens write to distinct pages beyond the pool, which the device drops.
    view["write_pages"][:] = np.arange(layout.num_pages, layout.num_pages + layout.num_tokens)
    page_size = layout.page_size
    at = 0
    for index, row in enumerate(rows):
        sequence, count = row.sequence, row.num_tokens
        start, end = row.start, row.start + count
        here = slice(at, at + count)
        pages = np.asarray(sequence.pages, np.int32)
        view["page_tables"][index, : len(pages)] = pages
        if count == 1:
            if row.takes_from_slot:
                view["source_slots"][at] = row.slot
            else:
                view["token_ids"][at] = sequence.token_ids[start]
            view["positions"][at] = start
            view["write_pages"][at] = pages[start // page_size]
            view["write_offsets"][at] = start % page_size
        else:
            positions = np.arange(start, end, dtype=np.int32)
            view["token_ids"][here] = sequence.token_ids[start:end]
            view["positions"][here] = positions
            view["write_pages"][here] = pages[positions // page_size]
            view["write_offsets"][here] = positions % page_size
        view["kv_lens"][index] = end
        at += count
        view["cu_q_lens"][index + 1] = at
        view["sample_tokens"][index] = at - 1
        if row.samples:
            view["target_slots"][index] = row.slot
        _pack_sampling(view, index, row, end)
    view["cu_q_lens"][len(rows) + 1 :] = at
    return blob


def _pack_sampling(view: dict[str, np.ndarray], index: int, row: ScheduledRow, position: int) -> None:
    request = row.sequence.request
    params = request.params
    if params.is_greedy:
        view["top_p"][index] = 1.0
    else:
        assert params.temperature is not None
        view["temperature"][index] = params.temperature
        view["top_k"][index] = max(params.top_k or 0, 0)
        view["top_p"][index] = 1.0 if params.top_p is None else params.top_p
        view["min_p"][index] = params.min_p or 0.0
        view["seed"][index] = (request.seed & 0xFFFFFFFF, request.seed >> 32)
    view["position"][index] = position
    if position - row.sequence.num_prompt_tokens < params.min_tokens:
        banned = [*request.eos_token_ids, *(params.stop_token_ids or ())]
        view["banned_ids"][index, : len(banned)] = banned


def unpack(blob: Int32[Array, "blob"], layout: BatchLayout) -> StepBatch:
    """Takes the blob apart on the device; the inverse of `pack`'s layout."""
    arrays: dict[str, jax.Array] = {}
    start = 0
    for name, shape in layout.fields:
        size = int(np.prod(shape))
        part = lax.slice(blob, (start,), (start + size,)).reshape(shape)
        if name in _FLOATS:
            part = lax.bitcast_convert_type(part, np.float32)
        elif name in _UNSIGNED:
            part = lax.bitcast_convert_type(part, np.uint32)
        arrays[name] = part
        start += size
    sampling = SamplingRows(**{name: arrays.pop(name) for name in SamplingRows._fields})
    return StepBatch(sampling=sampling, **arrays)


def take_ids_from_slots(batch: StepBatch, last_ids: Int32[Array, "slots"]) -> StepBatch:
    """Fills in the token ids that the host did not know when it packed the step.

    A slot can hold the mark of a failed row (a negative number): its late token is computed from id 0 and thrown away by the host.
    """
    from_slots = jnp.maximum(last_ids.at[jnp.maximum(batch.source_slots, 0)].get(mode="fill", fill_value=0), 0)
    return batch._replace(token_ids=jnp.where(batch.source_slots >= 0, from_slots, batch.token_ids))
