"""The books of requests over HTTP: each one that asked for an answer ends in exactly one way.

`RequestRecord` belongs to one request and is filled in by whoever answers it; `Ledger.close` decides its end and says it as an event,
from which the access line and the metrics are made.
"""

import enum
import threading
from collections import Counter
from collections.abc import Mapping

import msgspec

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.errors import JaxpagedError

RECORD_KEY = "jaxpaged.record"
"""Where the record of a request is in its ASGI scope."""

HEALTH_PATHS = frozenset({"/health", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
METRICS_PATH = "/metrics"
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/score"})
"""What is posted there asks the model for something."""


class End(enum.StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    REJECTED = "rejected"
    """An answer 4xx: the request is at fault."""
    REFUSED = "refused"
    """429 or 503: not now."""
    ABORTED = "aborted"
    """The client left."""
    FAILED = "failed"
    """An error that was told to the client."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """What is known of one HTTP request while it is answered.

    Attributes:
        request_id: the client's `x-request-id` if it is one, else ours; the answer's header carries it already.
        received_s: monotonic time.
        is_generation: whether it asks for an answer of the model, and so is in the ledger, refused or not.
        end: stop, length or failed, set by the route once it is known; None: follows from the status.
        code: of the error.
        num_prompt_tokens: of all prompts.
        num_output_tokens: of all answers so far.
        first_token_s: monotonic time at which the first token was there.
        status: what was answered; 0: nothing yet.
        body: the beginning of what the client sent, if `log.prompts` asks for it.
        answer_id: what the answer is called, "chatcmpl-..." and the like, once its body was read.
        num_merged: tokens of a stream that came with one before.
    """

    request_id: str
    method: str
    path: str
    received_s: float
    is_generation: bool = False
    end: End | None = None
    code: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    status: int = 0
    body: str = ""
    answer_id: str = ""
    num_merged: int = 0


def record_of(scope: Mapping[str, object]) -> RequestRecord:
    """The record of the request with this ASGI scope (`request.scope` of a handler)."""
    record = scope[RECORD_KEY]
    assert isinstance(record, RequestRecord)
    return record


class Ledger:
    """Counts requests that asked for an answer: open ones, and ended ones by their end.

    Args:
        emit: takes an event for each request that ended, of whatever kind.
        clocks: where times come from.
    """

    def __init__(self, emit: events.Sink, clocks: Clocks) -> None:
        self._emit, self._clocks = emit, clocks
        self._ends: Counter[End] = Counter()
        self._lock = threading.Lock()
        self.open: dict[int, RequestRecord] = {}

    @property
    def num_open(self) -> int:
        """Requests that are being answered, of whatever kind."""
        return len(self.open)

    @property
    def num_open_generations(self) -> int:
        """Those of them that ask the model for something."""
        return sum(record.is_generation for record in self.open.values())

    def ends(self) -> dict[End, int]:
        """How many ended so, each end named."""
        with self._lock:
            return {end: self._ends[end] for end in End}

    def begin(self, record: RequestRecord) -> None:
        """A request came in."""
        self.open[id(record)] = record

    def close(self, record: RequestRecord, *, is_complete: bool) -> None:
        """A request is over.

        Args:
            is_complete: the answer was written to its end; otherwise the client left, or the answer broke off.
        """
        end = self._end_of(record, is_complete=is_complete)
        if record.is_generation:
            with self._lock:
                self._ends[end] += 1
        self._emit(
            events.HttpAnswered(
                time_s=self._clocks.wall(),
                request_id=record.request_id,
                method=record.method,
                path=record.path,
                status=record.status,
                end=end.value if record.is_generation else "",
                code=record.code,
                num_prompt_tokens=record.num_prompt_tokens,
                num_output_tokens=record.num_output_tokens,
                first_token_s=None if record.first_token_s is None else record.first_token_s - record.received_s,
                seconds=self._clocks.monotonic() - record.received_s,
                body=record.body,
                answer_id=record.answer_id,
                num_merged=record.num_merged,
                is_routine=record.path in HEALTH_PATHS or record.path == METRICS_PATH,
            )
        )
        # Last: when nothing is open, everything is in the books.
        del self.open[id(record)]

    def turn_away(self, request_id: str, error: JaxpagedError, *, method: str, seconds: float, is_told: bool) -> None:
        """A connection ends that asked for too much, or for nothing that can be understood: no record was ever made.

        Args:
            method: empty where none could be read.
            seconds: since its beginning.
            is_told: whether the error was answered.
        """
        self._emit(
            events.HttpAnswered(
                time_s=self._clocks.wall(),
                request_id=request_id,
                method=method,
                path="",
                status=error.http_status if is_told else 0,
                end="",
                code=error.code,
                num_prompt_tokens=0,
                num_output_tokens=0,
                first_token_s=None,
                seconds=seconds,
            )
        )

    @staticmethod
    def _end_of(record: RequestRecord, *, is_complete: bool) -> End:
        if record.end is not None:
            return record.end
        if not is_complete or record.status == 0:
            return End.ABORTED
        if record.status in (429, 503):
            return End.REFUSED
        if record.status >= 500:
            return End.FAILED
        return End.REJECTED if record.status >= 400 else End.STOP
