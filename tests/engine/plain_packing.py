"""Packing a step in the plainest way, from the sequences alone: what `StepPacker` has to give."""

from collections.abc import Sequence as Seq

import numpy as np

from jaxpaged.batch import MAX_BANNED_IDS, BatchLayout
from jaxpaged.request import MAX_BAD_WORDS
from jaxpaged.scheduler import ScheduledRow

type Arrays = dict[str, np.ndarray]


def plain_arrays(rows: Seq[ScheduledRow], layout: BatchLayout, no_token: int) -> Arrays:
    """The arrays of a step by name."""
    tokens, seqs = layout.num_tokens, layout.num_seqs
    arrays: Arrays = {
        "token_ids": np.zeros(tokens, np.int32),
        "source_slots": np.full(tokens, -1, np.int32),
        "positions": np.zeros(tokens, np.int32),
        # Padding is written beyond the pool.
        "write_pages": np.tile(np.arange(tokens, dtype=np.int32) + layout.num_pages, (layout.num_groups, 1)),
        "write_offsets": np.zeros(tokens, np.int32),
        "kv_lens": np.zeros(seqs, np.int32),
        "cu_q_lens": np.zeros(seqs + 1, np.int32),
        "sample_tokens": np.zeros(seqs, np.int32),
        "target_slots": np.full(seqs, layout.num_slots, np.int32),
        "pool_starts": np.full(seqs, tokens, np.int32),
        "pool_slots": np.full(seqs, layout.num_slots, np.int32),
        "temperature": np.zeros(seqs, np.float32),
        "top_k": np.zeros(seqs, np.int32),
        "top_p": np.zeros(seqs, np.float32),
        "min_p": np.zeros(seqs, np.float32),
        "presence_penalty": np.zeros(seqs, np.float32),
        "frequency_penalty": np.zeros(seqs, np.float32),
        "repetition_penalty": np.ones(seqs, np.float32),
        "has_bias": np.zeros(seqs, np.int32),
        "num_logprobs": np.full(seqs, -1, np.int32),
        "seed": np.zeros((seqs, 2), np.uint32),
        "position": np.zeros(seqs, np.int32),
        "banned_ids": np.full((seqs, MAX_BANNED_IDS), no_token, np.int32),
        "scored_at": np.zeros(tokens, np.int32),
        "scored_next_ids": np.zeros(tokens, np.int32),
        "scored_num_top": np.full(tokens, -1, np.int32),
        "page_tables": np.zeros((layout.num_groups, seqs, layout.max_pages), np.int32),
    }
    at = num_scored = 0
    for index, row in enumerate(rows):
        for position in range(row.start, row.start + row.num_tokens):
            if row.takes_from_slot:
                arrays["source_slots"][at] = row.slot
            else:
                arrays["token_ids"][at] = row.sequence.token_ids[position]
            arrays["positions"][at] = position
            arrays["write_offsets"][at] = position % layout.page_size
            sequence = row.sequence
            if sequence.first_unscored <= position + 1 < sequence.num_prompt_tokens:
                arrays["scored_at"][num_scored] = at
                arrays["scored_next_ids"][num_scored] = sequence.token_ids[position + 1]
                arrays["scored_num_top"][num_scored] = sequence.request.params.prompt_logprobs
                num_scored += 1
            for group, table in enumerate(row.sequence.tables):
                arrays["write_pages"][group, at] = table[position // layout.page_size]
            at += 1
        _fill_row(arrays, index, row, at)
    arrays["cu_q_lens"][len(rows) + 1 :] = at
    return arrays


def _fill_row(arrays: Arrays, index: int, row: ScheduledRow, at: int) -> None:
    sequence, end = row.sequence, row.start + row.num_tokens
    for group, table in enumerate(sequence.tables):
        arrays["page_tables"][group, index, : len(table)] = table
    arrays["kv_lens"][index] = arrays["position"][index] = end
    arrays["cu_q_lens"][index + 1] = at
    arrays["sample_tokens"][index] = at - 1
    if row.samples:
        arrays["target_slots"][index] = row.slot
    request, params = sequence.request, sequence.request.params
    arrays["top_p"][index] = 1
    if not params.is_greedy:
        arrays["temperature"][index] = params.temperature
        arrays["top_k"][index] = 0 if params.top_k == -1 else params.top_k
        arrays["top_p"][index] = params.top_p
        arrays["min_p"][index] = params.min_p
        arrays["seed"][index] = (request.seed % 2**32, request.seed // 2**32)
    if request.pooling == "mean":
        arrays["pool_starts"][index], arrays["pool_slots"][index] = at - row.num_tokens, row.slot
    if request.pooling == "last" and row.samples:
        arrays["pool_starts"][index] = at - 1
    arrays["presence_penalty"][index] = params.presence_penalty
    arrays["frequency_penalty"][index] = params.frequency_penalty
    arrays["repetition_penalty"][index] = params.repetition_penalty or 1
    one_token_words = [word for word in request.bad_words_ids if len(word) == 1]
    arrays["has_bias"][index] = bool(params.logit_bias or params.allowed_token_ids or one_token_words)
    if params.logprobs is not None:
        arrays["num_logprobs"][index] = params.logprobs
    if row.samples:
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        long_words = [list(word) for word in request.bad_words_ids if len(word) > 1]
        ends = [word[-1] for word in long_words if answer[len(answer) + 1 - len(word) :] == word[:-1] and len(answer) + 1 >= len(word)]
        first = MAX_BANNED_IDS - MAX_BAD_WORDS
        arrays["banned_ids"][index, first : first + len(ends)] = ends
    if row.samples and end - sequence.num_prompt_tokens < params.min_tokens:
        banned = [*request.eos_token_ids, *(params.stop_token_ids or ())]
        arrays["banned_ids"][index, : len(banned)] = banned
