"""Beam search: keep the likeliest few beginnings of an answer, extend each by one token at a time, and keep the likeliest again.

What is kept, and when the search ends, is as in Hugging Face transformers (`generate(num_beams=W, do_sample=False)`, with
`early_stopping=False`); the names are vLLM's. The search itself runs no model: whoever drives it asks for the likeliest next ids.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import msgspec

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import LOWEST_LOGPROB, MAX_LOGPROBS, FinishReason, Logprob, RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0
"""Of either sign; lengths to the power of more than that leave the range of floats."""


class BeamSearchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to search. Raises InvalidRequestError naming field, value and limit.

    Attributes:
        beam_width: beginnings that are kept, and answers that come out; 1 to 10.
        max_tokens: tokens of an answer at most.
        ignore_eos: go on past the model's end tokens.
        temperature: 0 or 1, which mean the same: nothing is drawn, and the model's own log-probabilities are added up.
        length_penalty: the score of a finished answer is its log-probability over its number of tokens (an end token counts) to
            this power; larger prefers longer answers; -10 to 10.
        include_stop_str_in_output: an end token belongs to the text; seen only with `skip_special_tokens=False`.
        skip_special_tokens: leave control tokens out of the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        width, penalty = self.beam_width, self.length_penalty
        if width.__class__ is not int or not 1 <= width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"beam_width must be an integer between 1 and {MAX_BEAM_WIDTH}, got {width!r:.40}", param="beam_width"
            )
        if penalty.__class__ not in (int, float) or not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
            limit = f"between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
            raise InvalidRequestError(f"length_penalty must be a number {limit}, got {penalty!r:.40}", param="length_penalty")
        if self.max_tokens is None:
            raise InvalidRequestError("max_tokens must be an integer, got None", param="max_tokens")
        SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )
        if self.temperature not in (0, 1):
            raise InvalidRequestError(
                f"temperature must be 0 or 1 in a beam search, which draws nothing, got {self.temperature!r:.40}", param="temperature"
            )


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One answer that was found.

    Attributes:
        tokens: prompt and answer, with the end token.
        num_prompt_tokens: how many of them are the prompt.
        logprobs: for each token of the answer, id -> log-probability of the likeliest ids, of which it is one.
        cum_logprob: sum of the log-probabilities of the answer's tokens.
        score: what answers are ordered by, `cum_logprob` over the length to the power of `length_penalty`.
        text: of prompt and answer, as in vLLM.
        output_text: of the answer alone.
        finish_reason: stop at an end token, length, or why the search was given up.
        stop_reason: None, as for all end tokens.
    """

    tokens: list[int]
    num_prompt_tokens: int
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    score: float
    text: str
    output_text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None

    @property
    def output_token_ids(self) -> list[int]:
        """The answer alone."""
        return self.tokens[self.num_prompt_tokens :]


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The answers to one prompt, best first: `beam_width` of them.

    A search that was aborted, or that failed (`error` says why), gives what it had, with that `finish_reason`. `error_code` is the `code`
    of one of the classes of `errors`; `num_cached_tokens` of the prompt were found in the prefix cache when the search began.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None
    error_code: str | None = None
    num_cached_tokens: int = 0


class _Beam(NamedTuple):
    """The beginning of an answer, or a whole one. `told`: of each token, what the model said of the likeliest ids there."""

    token_ids: tuple[int, ...]
    told: tuple[dict[int, Logprob], ...]
    total: float


class _Candidate(NamedTuple):
    """A beam, by its index, and one token more."""

    total: float
    beam: int
    token_id: int


class _Finished(NamedTuple):
    """A whole answer."""

    beam: _Beam
    score: float
    reason: FinishReason


class BeamSearch:
    """The search for the answers to one prompt.

    Ask the model for the `num_logprobs` likeliest ids after each of `histories`, and `advance` by what it says, until `is_done`.

    Args:
        prompt_token_ids: the prompt.
        params: how to search.
        eos_token_ids: the model's end tokens.
        max_tokens: of an answer at most; at least 1.
    """

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Set[int], max_tokens: int) -> None:
        self._prompt = list(prompt_token_ids)
        self._params = params
        self._ends = frozenset() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self._beams = [_Beam((), (), 0.0)]
        self._finished: list[_Finished] = []
        self.num_logprobs = num_logprobs_for(params, eos_token_ids)

    @property
    def is_done(self) -> bool:
        """Whether the answers are found."""
        return not self._beams

    @property
    def num_tokens(self) -> int:
        """Tokens that each beam has."""
        return len(self._beams[0].token_ids) if self._beams else 0

    @property
    def histories(self) -> list[list[int]]:
        """Prompt and beginning of an answer, of every beam."""
        return [[*self._prompt, *beam.token_ids] for beam in self._beams]

    def advance(self, told: Sequence[dict[int, Logprob]]) -> None:
        """Extends the beams by one token.

        Args:
            told: for each of `histories`, the likeliest next ids with their log-probabilities.
        """
        width, is_last = self._params.beam_width, self.num_tokens + 1 >= self._max_tokens
        candidates = [
            _Candidate(beam.total + entry.logprob, index, token_id)
            for index, (beam, entries) in enumerate(zip(self._beams, told, strict=True))
            for token_id, entry in entries.items()
            if entry.logprob > LOWEST_LOGPROB
        ]
        candidates.sort(key=lambda candidate: -candidate.total)
        # Those beyond the first `width` are there to go on, so that ends do not use up the beams.
        ending = [candidate for candidate in candidates[:width] if is_last or candidate.token_id in self._ends]
        going_on = [] if is_last else [candidate for candidate in candidates if candidate.token_id not in self._ends][:width]
        self._finished += [self._finish(self._extended(candidate, told), FinishReason.LENGTH) for candidate in ending]
        self._finished.sort(key=lambda finished: -finished.score)
        del self._finished[width:]
        self._beams = [self._extended(candidate, told) for candidate in going_on]
        if self._beams and len(self._finished) == width and self._score(self._beams[0]) <= self._finished[-1].score:
            # As in transformers, no matter how the scores of longer answers may still rise.
            self._beams = []

    def output(self, tokenizer: Tokenizer, *, given_up: FinishReason | None = None, error: str | None = None) -> BeamSearchOutput:
        """The answers that were found.

        Args:
            tokenizer: for the texts.
            given_up: why the search ends here, if it was not done; what the beams hold takes the places that are left.
            error: what to tell of that.
        """
        found = self._finished
        if given_up is not None:
            going_on = [self._finish(beam, given_up) for beam in self._beams if beam.token_ids]
            found = sorted([*found, *going_on], key=lambda finished: -finished.score)[: self._params.beam_width]
        return BeamSearchOutput(sequences=[self._sequence(finished, tokenizer) for finished in found], error=error)

    def _extended(self, candidate: _Candidate, told: Sequence[dict[int, Logprob]]) -> _Beam:
        beam = self._beams[candidate.beam]
        return _Beam((*beam.token_ids, candidate.token_id), (*beam.told, told[candidate.beam]), candidate.total)

    def _score(self, beam: _Beam) -> float:
        return float(beam.total / len(beam.token_ids) ** self._params.length_penalty)

    def _finish(self, beam: _Beam, reason: FinishReason) -> _Finished:
        return _Finished(beam, self._score(beam), FinishReason.STOP if beam.token_ids[-1] in self._ends else reason)

    def _sequence(self, finished: _Finished, tokenizer: Tokenizer) -> BeamSearchSequence:
        beam, params = finished.beam, self._params
        is_end_hidden = finished.reason is FinishReason.STOP and not params.include_stop_str_in_output
        shown = beam.token_ids[:-1] if is_end_hidden else beam.token_ids
        answer = Detokenizer(tokenizer, prompt_token_ids=self._prompt, skip_special_tokens=params.skip_special_tokens)
        output_text = answer.append(shown) + answer.finish()
        return BeamSearchSequence(
            tokens=[*self._prompt, *beam.token_ids],
            num_prompt_tokens=len(self._prompt),
            logprobs=list(beam.told),
            cum_logprob=beam.total,
            score=finished.score,
            text=tokenizer.decode([*self._prompt, *shown], params.skip_special_tokens),
            output_text=output_text,
            finish_reason=finished.reason,
        )


def num_logprobs_for(params: BeamSearchParams, eos_token_ids: Set[int]) -> int:
    """Likeliest ids to ask for after each beam: enough for `beam_width` that go on, and all ends among the first ones.

    Twice the width is enough unless the model has more end tokens than there are beams.
    """
    width = params.beam_width
    num_ends = 0 if params.ignore_eos else len(eos_token_ids)
    return min(MAX_LOGPROBS, max(2 * width, width + num_ends))


def step_params(params: BeamSearchParams, eos_token_ids: Set[int]) -> SamplingParams:
    """Parameters of the request that one beam makes at each step."""
    return SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=num_logprobs_for(params, eos_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
