"""Room 7: what a request has said so far, and the outputs made from it."""

from jaxpaged.detokenizer import Detokenizer
from jaxpaged.request import CompletionOutput, FinishReason, Request, RequestMetrics, RequestOutput, RequestOutputKind
from jaxpaged.sequence import Sequence
from jaxpaged.tokenizer import Tokenizer


class Answer:
    """The text side of one sequence; the scheduler owns the sequence itself."""

    def __init__(self, request: Request, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request, self.sequence = request, sequence
        self.metrics = RequestMetrics(arrival_s=request.arrival_s)
        self.error: str | None = None
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                prompt_token_ids=request.prompt_token_ids,
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

    def take_token(self) -> str | None:
        """Adds the sequence's newest token to the text; returns the stop string it completes, if any."""
        if self._detokenizer is None or self._ends_with_hidden_stop():
            return None
        self._new_text.append(self._detokenizer.append((self.sequence.token_ids[-1],)))
        return self._detokenizer.stop_match

    def is_due(self) -> bool:
        """Whether an unfinished request has an output to give now."""
        params = self.request.params
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        return self.sequence.num_output_tokens - self._num_given_tokens >= params.stream_interval

    def output(self) -> RequestOutput:
        """All so far, or what is new since the last call, as the request's `output_kind` says."""
        sequence = self.sequence
        text, first_token = "" if self._detokenizer is None else self._detokenizer.text, 0
        if self.request.params.output_kind is RequestOutputKind.DELTA:
            text, first_token = "".join(self._new_text), self._num_given_tokens
        self._new_text.clear()
        self._num_given_tokens = sequence.num_output_tokens
        completion = CompletionOutput(
            text=text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + first_token :],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=sequence.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.metrics.num_cached_tokens,
            error=self.error,
        )

    def finish_text(self) -> None:
        """Adds the text that was held back; the request has ended."""
        if self._detokenizer is not None and self._detokenizer.stop_match is None and self.error is None:
            self._new_text.append(self._detokenizer.finish())

    def _ends_with_hidden_stop(self) -> bool:
        """An end token or stop id ends the answer without being part of its text, unless stops were asked for."""
        sequence, params = self.sequence, self.request.params
        return (
            sequence.finish_reason is FinishReason.STOP
            and sequence.stop_reason.__class__ is not str
            and not params.include_stop_str_in_output
        )
