"""Room 7: what a request has said so far, and the outputs made from it."""

from collections.abc import Sequence as SequenceOf

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.request import (
    LOWEST_LOGPROB,
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
)
from jaxpaged.sequence import Sequence
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.told_logprobs import PromptLogprobs, SpanLogprobs, TokenLogprobs, told


class Answer:
    """The text side of one sequence; the scheduler owns the sequence itself.

    Attributes:
        index: which sample of the request it is.
        is_moved: there is something that the next output has to tell.
        is_ended: its sequence has finished, and its text is complete.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_detokenizer",
        "_logprobs",
        "_new_text",
        "_num_given_tokens",
        "_params",
        "_tokenizer",
        "index",
        "is_ended",
        "is_moved",
        "sequence",
    )

    def __init__(self, sequence: Sequence, index: int, tokenizer: Tokenizer) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.index = index
        self.is_moved = self.is_ended = False
        self._params, self._tokenizer = params, tokenizer
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                prompt_token_ids=sequence.request.prompt_token_ids,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            if params.detokenize
            else None
        )
        self._new_text: list[str] = []
        self._num_given_tokens = 0

    def take_token(self, logprobs: TokenLogprobs | None = None) -> str | None:
        """Adds the sequence's newest token to the text; returns the stop string it completes, if any."""
        if self._logprobs is not None:
            assert logprobs is not None
            self._take_logprobs(self._logprobs, logprobs)
        if self._detokenizer is None or self._ends_with_hidden_stop():
            return None
        self._new_text.append(self._detokenizer.append((self.sequence.token_ids[-1],)))
        return self._detokenizer.stop_match

    def _take_logprobs(self, taken: list[dict[int, Logprob]], token: TokenLogprobs) -> None:
        taken.append(told(self.sequence.token_ids[-1], token, self._params.logprobs or 0, self._tokenizer))
        self._cumulative_logprob += max(token.chosen, LOWEST_LOGPROB)

    def is_due(self) -> bool:
        """Whether an unfinished answer has something to give now."""
        if self._params.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        return self.sequence.num_output_tokens - self._num_given_tokens >= self._params.stream_interval

    def completion(self) -> CompletionOutput:
        """All so far, or what is new since the last call, as the request's `output_kind` says."""
        sequence = self.sequence
        if self._params.output_kind is RequestOutputKind.DELTA:
            text, first_token = "".join(self._new_text), self._num_given_tokens
        else:
            text, first_token = "" if self._detokenizer is None else self._detokenizer.text, 0
        self._new_text.clear()
        self._num_given_tokens = sequence.num_output_tokens
        self.is_moved = False
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + first_token :],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
        )

    def finish_text(self) -> None:
        """Adds the text that was held back; the answer has ended."""
        if self._detokenizer is not None and self._detokenizer.stop_match is None:
            self._new_text.append(self._detokenizer.finish())

    def _ends_with_hidden_stop(self) -> bool:
        """An end token or stop id ends the answer without being part of its text, unless stops were asked for."""
        sequence = self.sequence
        return (
            sequence.finish_reason is FinishReason.STOP
            and sequence.stop_reason.__class__ is not str
            and not self._params.include_stop_str_in_output
        )


class OpenRequest:
    """A request that has not ended: the answers of its samples, and what they have in common.

    Attributes:
        request: what was asked for.
        answers: one for each sample, by index.
        metrics: times and counts over all samples.
        pooled: the hidden states that were asked for, once they are computed.
        error: what to tell whoever asked, if it fails or is given up; `error_code`: the kind of error.
        num_open: answers that have not ended.
    """

    __slots__ = ("_prompt_logprobs", "answers", "error", "error_code", "metrics", "num_open", "pooled", "request")

    def __init__(self, request: Request, samples: SequenceOf[Sequence], tokenizer: Tokenizer) -> None:
        self.request = request
        self.answers = [Answer(sequence, index, tokenizer) for index, sequence in enumerate(samples)]
        self.metrics = RequestMetrics(arrival_s=request.arrival_s)
        self.pooled: list[float] | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.num_open = len(samples)
        self._prompt_logprobs = None if request.params.prompt_logprobs is None else PromptLogprobs(request, tokenizer)

    def take_prompt_logprobs(self, logprobs: SpanLogprobs) -> None:
        """Adds what is known of the next tokens of the prompt."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.take(logprobs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers so far; the one that a request for an embedding chooses is none."""
        return 0 if self.request.pooling is not None else sum(answer.sequence.num_output_tokens for answer in self.answers)

    @property
    def num_longest_tokens(self) -> int:
        """Tokens of the longest answer so far."""
        return 0 if self.request.pooling is not None else max(answer.sequence.num_output_tokens for answer in self.answers)

    @property
    def finish_reason(self) -> FinishReason:
        """Why the whole request ended: the least happy end of a sample."""
        reasons = {answer.sequence.finish_reason for answer in self.answers}
        return next(reason for reason in _LEAST_HAPPY_FIRST if reason in reasons)

    def output(self) -> RequestOutput:
        """All samples as they are, or (kind DELTA) those that have moved since the last time."""
        request, metrics, answers = self.request, self.metrics, self.answers
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        if len(answers) > 1 and is_delta:
            answers = [answer for answer in answers if answer.is_moved]
        prompt_logprobs = None if self._prompt_logprobs is None else self._prompt_logprobs.entries()
        if is_delta and prompt_logprobs is not None:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[answer.completion() for answer in answers],
            finished=self.num_open == 0,
            metrics=metrics,
            num_cached_tokens=metrics.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            pooled=self.pooled,
            error=self.error,
            error_code=self.error_code,
        )


_LEAST_HAPPY_FIRST = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)
