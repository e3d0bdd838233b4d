"""The requests that have not ended: from the door to the last output, step by step.

Their sequences belong to the scheduler; what is known of them here is who asked, the text so far, and what to tell. A sample
that ends by itself (an end token, a stop, its length) leaves the others going. Whatever ends one from outside (an abort, a
time limit, a failure) ends the whole request.
"""

from collections.abc import Iterable, Mapping

from jaxpaged.clocks import Clocks
from jaxpaged.engine_events import EngineEvents
from jaxpaged.errors import InvalidRequestError, RequestFailedError
from jaxpaged.output import Answer, OpenRequest
from jaxpaged.request import FinishReason, Request, RequestOutput, RequestOutputKind, samples_of
from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.told_logprobs import ScoredSpan, SpanLogprobs, TokenLogprobs


class OpenRequests:
    """Queues requests, takes their tokens and makes their outputs.

    Args:
        scheduler: gets their sequences.
        tokenizer: for the text of answers.
        emit: is told what happens to them.
        clocks: where times come from.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, emit: EngineEvents, clocks: Clocks) -> None:
        self._scheduler, self._tokenizer, self._emit, self._clocks = scheduler, tokenizer, emit, clocks
        self._by_id: dict[str, OpenRequest] = {}
        self._by_sequence: dict[str, tuple[OpenRequest, Answer]] = {}
        self._outputs: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def ids(self) -> list[str]:
        """Of all of them."""
        return list(self._by_id)

    def add(self, request: Request) -> None:
        """Queues a request: all its samples or none. Raises as `Scheduler.add` does, and for an id that is in use."""
        n = request.params.n
        samples = [Sequence(request)] if n == 1 else [Sequence(sample) for sample in samples_of(request, n)]
        for name in (request.request_id, *(sample.request_id for sample in samples)):
            if name in self._by_id or name in self._by_sequence:
                raise InvalidRequestError(f"The request id {name!r} is already in use", param="request_id")
        opened = OpenRequest(request, samples, self._tokenizer)
        (self._scheduler.add_sample if request.is_let_in else self._scheduler.add)(samples[0])
        for sample in samples[1:]:
            self._scheduler.add_sample(sample)
        opened.metrics.queued_s = self._clocks.monotonic()
        self._by_id[request.request_id] = opened
        for answer in opened.answers:
            self._by_sequence[answer.sequence.request_id] = (opened, answer)
        self._emit.queued(opened, self._scheduler.num_waiting)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it is; None when it is not (or no longer) there."""
        opened = self._by_id.get(request_id)
        if opened is None:
            return None
        self._stop(opened, FinishReason.ABORT)
        return self._end(opened)

    def expire(self) -> bool:
        """Ends requests whose time is over; whether there were any."""
        expired = self._scheduler.expire()
        for sequence in expired:
            found = self._by_sequence.get(sequence.request_id)
            if found is not None:
                opened, _ = found
                opened.error, opened.error_code = sequence.message, sequence.error_code
                self._stop(opened, FinishReason.ABORT)
                self._outputs.append(self._end(opened))
        return bool(expired)

    def note_scheduled(self, step: ScheduledStep) -> None:
        """Tells who was admitted and who lost its pages."""
        for sequence in step.preempted:
            opened, _ = self._by_sequence[sequence.request_id]
            opened.metrics.num_preemptions = sum(answer.sequence.num_preemptions for answer in opened.answers)
            self._emit.preempted(sequence)
        now = self._clocks.monotonic()
        for sequence in step.admitted:
            metrics = self._by_sequence[sequence.request_id][0].metrics
            if metrics.first_scheduled_s is None:
                metrics.first_scheduled_s = now
                metrics.num_cached_tokens = sequence.num_cached_tokens
            self._emit.scheduled(sequence, metrics)

    def fail_row(self, row: ScheduledRow, message: str) -> None:
        """What a sample's row computed is of no use. Its request ends when tokens are taken in (`take_tokens`)."""
        opened, _ = self._by_sequence[row.sequence.request_id]
        self._fail(opened, message)

    def take_pooled(self, pooled: Mapping[str, list[float]]) -> None:
        """Keeps the hidden states that requests asked for until their last outputs; by sequence."""
        for request_id, numbers in pooled.items():
            self._by_sequence[request_id][0].pooled = numbers

    def take_prompt_logprobs(self, span: ScoredSpan, logprobs: SpanLogprobs) -> None:
        """Keeps what a row said of its prompt, once for each of its tokens."""
        sequence = span.row.sequence
        opened, answer = self._by_sequence[sequence.request_id]
        assert span.positions.start == sequence.first_unscored, f"{sequence}: {span.positions} do not go on from what is known"
        if answer.index == 0:
            opened.take_prompt_logprobs(logprobs)
        sequence.first_unscored = span.positions.stop

    def take_tokens(self, rows: Iterable[ScheduledRow], logprobs: Mapping[str, TokenLogprobs]) -> None:
        """Turns the newest token of each row into text, and makes the outputs that are due.

        Args:
            rows: those whose token the scheduler has taken in just now, and those that failed.
            logprobs: of their tokens, by sequence, for those that want them.
        """
        now = self._clocks.monotonic()
        moved: dict[OpenRequest, None] = {}
        by_sequence, outputs = self._by_sequence, self._outputs
        for row in rows:
            sequence = row.sequence
            opened, answer = by_sequence[sequence.request_id]
            if opened.error is None and opened.request.params.max_tokens != 0:
                self._take_token(opened, answer, now, logprobs.get(sequence.request_id))
            if sequence.is_finished:
                self._end_text(opened, answer)
            elif answer.is_due():
                answer.is_moved = True
            if answer.is_moved:
                moved[opened] = None
        for opened in moved:
            if opened.num_open == 0:
                outputs.append(self._end(opened))
            elif opened.request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(opened.output())

    def collect(self) -> list[RequestOutput]:
        """What is new since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def end_all(self, message: str) -> list[RequestOutput]:
        """Ends every request with an error; returns what is new, their last outputs among it."""
        for opened in list(self._by_id.values()):
            self._fail(opened, message)
            self._outputs.append(self._end(opened))
        return self.collect()

    def _take_token(self, opened: OpenRequest, answer: Answer, now: float, logprobs: TokenLogprobs | None) -> None:
        metrics = opened.metrics
        metrics.last_token_s = now
        metrics.num_output_tokens += 1
        if metrics.first_token_s is None:
            metrics.first_token_s = now
            self._emit.first_token(opened)
        try:
            stop = answer.take_token(logprobs)
        except Exception as error:  # a fault in one request's text must not reach the others
            self._fail(opened, f"the answer's text could not be made: {error}")
            return
        if stop is not None:
            self._scheduler.finish(answer.sequence, FinishReason.STOP, stop)

    def _fail(self, opened: OpenRequest, message: str) -> None:
        opened.error, opened.error_code = message, RequestFailedError.code
        self._stop(opened, FinishReason.ERROR)

    def _stop(self, opened: OpenRequest, reason: FinishReason) -> None:
        """Ends the samples that have not ended."""
        for answer in opened.answers:
            if not answer.is_ended:
                self._scheduler.finish(answer.sequence, reason)
                self._end_text(opened, answer)

    def _end_text(self, opened: OpenRequest, answer: Answer) -> None:
        """Once for each sample, when its sequence has finished; a request that has failed gets no more text."""
        if answer.is_ended:
            return
        answer.is_ended = answer.is_moved = True
        opened.num_open -= 1
        if opened.error is None:
            try:
                answer.finish_text()
            except Exception as error:
                self._scheduler.finish(answer.sequence, FinishReason.ERROR)
                self._fail(opened, f"the answer's text could not be made: {error}")

    def _end(self, opened: OpenRequest) -> RequestOutput:
        """The last output of a request that is over."""
        del self._by_id[opened.request.request_id]
        for answer in opened.answers:
            del self._by_sequence[answer.sequence.request_id]
        opened.metrics.finished_s = self._clocks.monotonic()
        output = opened.output()
        self._emit.finished(opened)
        return output
