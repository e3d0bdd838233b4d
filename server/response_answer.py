"""The bodies of one response, whole and as events."""

import uuid
from typing import Any

import msgspec

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import JaxpagedError
from jaxpaged.request import FinishReason, RequestOutput
from server.choices import TokenNames, chat_logprobs
from server.errors import told_error
from server.generation import Job, Outputs
from server.ledger import End
from server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputLogprob,
    OutputMessage,
    OutputText,
    OutputTokenLogprob,
    ResponseEvent,
    ResponseFault,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from server.requests import Asked
from server.response_store import StoredResponse
from server.streaming import encode, tell_failure
from server.tally import Tally


class ResponseAnswer:
    """Makes them, and keeps the stored response up to date.

    Args:
        asked: the request.
        job: what the engine is asked for.
        stored: the response, in progress.
        engine: for names of tokens.
        has_logprobs: log-probabilities were asked for.
    """

    def __init__(
        self, asked: Asked[ResponsesRequest], job: Job, stored: StoredResponse, engine: EngineClient, *, has_logprobs: bool
    ) -> None:
        self._asked, self._stored = asked, stored
        self._tally = Tally(asked.record, job, is_streamed=bool(asked.body.stream))
        self._names = TokenNames(engine.get_tokenizer().special_ids)
        self._num_top = asked.body.top_logprobs or 0 if has_logprobs else 0
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._at: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._num_events = 0
        self._texts: list[str] = []
        self._told_logprobs: list[OutputTokenLogprob] = []
        self._is_cut = False

    def whole(self, output: RequestOutput) -> ResponseObject:
        """The answer at once."""
        self._tally.take([(0, output)])
        (completion,) = output.outputs
        self._settle(completion.text, self._logprobs(completion), is_cut=completion.finish_reason is FinishReason.LENGTH)
        self._tally.finish()
        return self._stored.response

    def cancelled(self) -> ResponseObject:
        """The response that somebody has cancelled."""
        self._asked.record.end = End.ABORTED
        return self._stored.response

    def opening(self) -> bytes:
        """See `Telling`: a stream begins with `response.created`, and ends with the whole response in any case."""
        response, empty = self._stored.response, OutputMessage(id=self._item_id, status="in_progress", content=[])
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=empty),
                self._event("response.content_part.added", **self._at, part=OutputText(text="")),
            )
        )

    def news(self, outputs: Outputs) -> bytes:
        """See `Telling`."""
        if self._stored.is_cancelled:
            return b""
        self._tally.take(outputs)
        completion = outputs[0][1].outputs[0]
        new = self._logprobs(completion)
        self._texts.append(completion.text)
        self._told_logprobs += new
        self._is_cut |= completion.finish_reason is FinishReason.LENGTH
        if not (completion.text or new):
            return b""
        return self._event("response.output_text.delta", **self._at, delta=completion.text, logprobs=new)

    def closing(self) -> bytes:
        """See `Telling`."""
        stored = self._stored
        if stored.is_cancelled:
            return self._event("response.incomplete", response=self.cancelled())
        self._settle("".join(self._texts), self._told_logprobs, is_cut=self._is_cut)
        (item,) = stored.response.output
        self._tally.finish()
        return b"".join(
            (
                self._event("response.output_text.done", **self._at, text=item.content[0].text, logprobs=self._told_logprobs),
                self._event("response.content_part.done", **self._at, part=item.content[0]),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{stored.response.status}", response=stored.response),
            )
        )

    def failure(self, error: Exception) -> bytes:
        """See `Telling`."""
        if self._stored.is_cancelled:
            return self.closing()
        if isinstance(error, JaxpagedError):
            return self._event(*self._failed(error))
        return tell_failure(self._asked.record, error)

    def _failed(self, error: JaxpagedError) -> tuple[str, ResponseObject]:
        told = told_error(error)
        self._asked.record.end, self._asked.record.code = End.FAILED, told.code
        fault = ResponseFault("rate_limit_exceeded" if told.http_status == 429 else "server_error", told.message)
        self._stored.response = msgspec.structs.replace(self._stored.response, status="failed", error=fault)
        return "response.failed", self._stored.response

    def _settle(self, text: str, logprobs: list[OutputTokenLogprob], *, is_cut: bool) -> None:
        """The response is complete, or as complete as it was to become."""
        usage = self._tally.usage()
        status: Any = "incomplete" if is_cut else "completed"
        item = OutputMessage(id=self._item_id, status=status, content=[OutputText(text=text, logprobs=logprobs)])
        self._stored.response = msgspec.structs.replace(
            self._stored.response,
            status=status,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=[item],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        )

    def _logprobs(self, completion: Any) -> list[OutputTokenLogprob]:
        told = chat_logprobs(completion, self._num_top, self._names)
        if told is None:
            return []
        return [
            OutputTokenLogprob(
                entry.token,
                entry.logprob,
                entry.bytes or [],
                [OutputLogprob(top.token, top.logprob, top.bytes or []) for top in entry.top_logprobs],
            )
            for entry in told.content
        ]

    def _event(self, kind: str, response: ResponseObject | Any = msgspec.UNSET, **fields: Any) -> bytes:
        made = ResponseEvent(type=kind, sequence_number=self._num_events, response=response, **fields)
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(made) + b"\n\n"
