"""What is told of log-probabilities: the device's numbers become entries by token id, with text and bytes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxpaged.request import LOWEST_LOGPROB, Logprob, Request
from jaxpaged.scheduled_step import ScheduledRow
from jaxpaged.tokenizer import Tokenizer


class TokenLogprobs(NamedTuple):
    """What the device says of one token: its log-probability and rank, and the likeliest ids with theirs."""

    chosen: float
    rank: int
    top_ids: list[int]
    top: list[float]


class ToldRows(NamedTuple):
    """`LogprobRows` of a step on the host."""

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray

    @classmethod
    def of(cls, columns: np.ndarray) -> "ToldRows":
        """Takes the device's int32 [rows, columns] apart: `chosen` and `top` as bits of float32, `rank`, `top_ids`."""
        num_top = columns.shape[1] // 2 - 1
        floats = columns[:, : num_top + 1].view(np.float32)
        return cls(floats[:, 0], columns[:, num_top + 1], columns[:, num_top + 2 :], floats[:, 1:])


class ScoredSpan(NamedTuple):
    """Tokens of a prompt of which a step says how likely they were.

    Attributes:
        row: the row that says it.
        row_index: its place in the step.
        positions: of the tokens in the prompt.
        first: place of the first of them among all that the step scores.
    """

    row: ScheduledRow
    row_index: int
    positions: range
    first: int


class SpanLogprobs(NamedTuple):
    """The device's numbers for one span: for each token its own and its rank, and the likeliest ids with theirs."""

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray

    @classmethod
    def of(cls, span: ScoredSpan, arrays: Iterable[np.ndarray]) -> "SpanLogprobs":
        """A span's own copy out of the arrays of the whole step."""
        places = slice(span.first, span.first + len(span.positions))
        chosen, rank, top_ids, top = (array[places] for array in arrays)
        num_top = span.row.sequence.request.params.prompt_logprobs or 0
        return cls(chosen.copy(), rank.copy(), top_ids[:, :num_top].copy(), top[:, :num_top].copy())

    @property
    def is_usable(self) -> bool:
        """Whether no number is NaN."""
        return not np.isnan(self.chosen).any()


def told(token_id: int, token: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Id -> entry of one token, which comes first, and of the `num_top` likeliest ones."""
    pairs = {token_id: (token.chosen, token.rank)}
    for rank, (likely_id, value) in enumerate(zip(token.top_ids[:num_top], token.top, strict=False), 1):
        pairs.setdefault(likely_id, (value, rank))
    return {
        likely_id: Logprob(max(value, LOWEST_LOGPROB), rank, tokenizer.token_text(likely_id), tokenizer.token_bytes[likely_id])
        for likely_id, (value, rank) in pairs.items()
    }


class PromptLogprobs:
    """What is known of a prompt's tokens. It is told once the whole prompt has been computed.

    Args:
        request: whose prompt it is, with `prompt_logprobs`.
        tokenizer: for the text of tokens.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._token_ids, self._tokenizer = request.prompt_token_ids, tokenizer
        self._num_top = request.params.prompt_logprobs or 0
        self._first = min(request.score_from, len(self._token_ids))
        self._spans: list[SpanLogprobs] = []
        self._num_missing = len(self._token_ids) - self._first
        self._entries: list[dict[int, Logprob] | None] | None = None

    def take(self, span: SpanLogprobs) -> None:
        """Adds the numbers of the next tokens."""
        self._spans.append(span)
        self._num_missing -= len(span.chosen)

    def entries(self) -> list[dict[int, Logprob] | None] | None:
        """For each token of the prompt its entries, None for tokens that nothing is asked of; None as long as some are missing."""
        if self._entries is None and self._num_missing == 0:
            self._entries = [None] * self._first
            for span in self._spans:
                columns = (array.tolist() for array in span)
                for token in map(TokenLogprobs, *columns):
                    token_id = self._token_ids[len(self._entries)]
                    self._entries.append(told(token_id, token, self._num_top, self._tokenizer))
            self._spans.clear()
        return self._entries
