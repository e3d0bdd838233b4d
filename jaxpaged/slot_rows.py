"""What the device must know of a sequence, per token of the vocabulary, when it moves into a slot."""

from typing import NamedTuple

import numpy as np

from jaxpaged.request import Request
from jaxpaged.sequence import Sequence

IN_PROMPT = 1
"""Lowest bit of a count: the prompt holds the token."""
PER_OUTPUT = 2
"""What one token of the answer adds to its count."""


class SlotRow(NamedTuple):
    """Rows of one slot: `counts` int32 [vocab], `bias` float32 [vocab]."""

    counts: np.ndarray
    bias: np.ndarray


def needs_slot_row(request: Request) -> bool:
    """Whether a request's choice of tokens depends on its slot's rows."""
    return request.params.has_penalty or has_bias(request)


def has_bias(request: Request) -> bool:
    """Whether some tokens are more, less or not at all to be chosen, throughout the answer."""
    params = request.params
    return bool(params.logit_bias) or params.allowed_token_ids is not None or any(len(word) == 1 for word in request.bad_words_ids)


def slot_row(sequence: Sequence, vocab: int) -> SlotRow:
    """The rows for a sequence as it is now: its prompt, and its answer so far."""
    request, params = sequence.request, sequence.request.params
    counts = np.zeros(vocab, np.int32)
    if params.has_penalty:
        outputs = np.asarray(sequence.token_ids[sequence.num_prompt_tokens :], np.int64)
        counts += PER_OUTPUT * np.bincount(outputs, minlength=vocab).astype(np.int32)
        counts[np.asarray(request.prompt_token_ids, np.int64)] |= IN_PROMPT
    bias = np.zeros(vocab, np.float32)
    if params.allowed_token_ids is not None:
        bias.fill(-np.inf)
        bias[list(params.allowed_token_ids)] = 0
    for token_id, value in (params.logit_bias or {}).items():
        bias[token_id] += value
    for word in request.bad_words_ids:
        if len(word) == 1:
            bias[word[0]] = -np.inf
    return SlotRow(counts, bias)


def ends_of_bad_words(sequence: Sequence) -> list[int]:
    """Ids that would complete a bad word of several tokens. As in vLLM, only words that begin in the answer count."""
    ids, num_outputs = sequence.token_ids, sequence.num_output_tokens
    return [
        word[-1]
        for word in sequence.request.bad_words_ids
        if 1 < len(word) <= num_outputs + 1 and tuple(ids[len(ids) - len(word) + 1 :]) == word[:-1]
    ]
