"""What happened, once: every log line, metric, progress bar and dashboard figure is a view of this stream.

An `Event` is a frozen msgspec Struct tagged by its name. `to_line` and `from_line` are exact inverses. Times are seconds:
`time_s` is wall-clock (for people), durations come from the monotonic clock.
"""

from typing import Protocol, runtime_checkable

import msgspec


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=True, kw_only=True):
    time_s: float


class EngineLoad(msgspec.Struct, frozen=True):
    """What one engine among several has to do; events tell what all of them have together beside it."""

    num_running: int
    num_waiting: int
    num_pages_total: int
    num_pages_in_use: int
    num_pages_cached: int


class PhaseChanged(_Event):
    """A start-up phase began or moved on; `phase` is find, download, load, pool, compile or warm_up.

    `done` of `total` parts of it are done, of a download or a load bytes; 0 of 0 where nobody knows. A server that was told to stop has
    the phase drain.
    """

    phase: str
    message: str
    done: int = 0
    total: int = 0


class ProgramCompiled(_Event):
    """One step program is ready. `from_cache`: fetched from the persistent compilation cache."""

    bucket_tokens: int
    seconds: float
    from_cache: bool
    after_ready: bool = False


class EngineStarted(_Event):
    """The engine is ready; every compilation after this is a bug and counted.

    `platform` is cpu or gpu, `attention` the implementation of its kernel; both are empty where nobody has said. `kernels` are an op and
    its implementation each, `kernels_refused` say of the others why they were not taken. `quantization` is that of the weights, and empty
    where they are not quantized. `num_engines` are the copies of the model; limits and sizes are those of one.
    """

    model: str
    dtype: str
    num_pages: int
    page_size: int
    pool_bytes: int
    weight_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    seconds: float
    num_programs: int
    platform: str = ""
    attention: str = ""
    kernels: tuple[str, ...] = ()
    kernels_refused: tuple[str, ...] = ()
    quantization: str = ""
    num_engines: int = 1


class RequestReceived(_Event):
    """A request reached the engine's door."""

    request_id: str
    num_prompt_tokens: int


class RequestRejected(_Event):
    """A request was turned away at the door; `code` is the error's."""

    request_id: str
    code: str
    message: str


class RequestQueued(_Event):
    """A request passed validation and waits for pages.

    `engine`, here and below, is the number of the copy of the model that has it, and `own_load` the load of that copy alone; None: there
    is one copy.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_waiting: int
    engine: int = 0
    own_load: EngineLoad | None = None


class RequestScheduled(_Event):
    """A request was admitted (first time, or again after a preemption) and owns pages."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_pages: int
    queue_s: float
    num_preemptions: int = 0


class RequestFirstToken(_Event):
    """The first output token left the device; `ttft_s` counts from arrival, once per request."""

    request_id: str
    ttft_s: float
    engine: int = 0


class RequestPreempted(_Event):
    """A running request lost its pages and will be recomputed."""

    request_id: str
    num_pages_freed: int
    num_computed_tokens: int


class RequestFinished(_Event):
    """A request ended: stop, length, abort or error; exactly one per queued request.

    With several samples: the least happy end among them, the prompt counted once, and the sum of their tokens and pages.
    `num_longest_tokens` are those of the longest sample.
    """

    request_id: str
    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_pages_freed: int
    num_preemptions: int
    ttft_s: float | None
    e2e_s: float
    queue_s: float
    message: str | None = None
    num_samples: int = 1
    num_longest_tokens: int = 0
    engine: int = 0


# fmt: off
TOKEN_GAP_BOUNDS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
# fmt: on
"""Upper bounds of the classes that gaps between two tokens of an answer are counted in; a last class holds longer ones. vLLM's are among
them."""


class StepFinished(_Event):
    """One engine step: what ran, how full, and where the time went (seconds).

    `token_gaps` says for each class of `TOKEN_GAP_BOUNDS_S` how many tokens came so long after the one before them in the same answer;
    together these gaps are `token_gaps_s`. Empty: there were none.

    `prefix_hits_tokens` of the `prefix_queries_tokens` prompt tokens of first admissions were found in the prefix cache;
    `prefill_recompute_tokens` are computed again after a preemption, and are no misses. `decision` says why so many were admitted, and is
    empty when nobody waited. `num_output_tokens` are the tokens that answers have got.
    """

    step: int
    bucket_tokens: int
    num_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_pages_total: int
    num_pages_in_use: int
    num_pages_cached: int
    schedule_s: float
    pack_s: float
    device_s: float
    update_s: float
    detokenize_s: float
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefill_recompute_tokens: int = 0
    token_gaps: tuple[int, ...] = ()
    token_gaps_s: float = 0.0
    num_output_tokens: int = 0
    decision: str = ""
    engine: int = 0
    own_load: EngineLoad | None = None

    @property
    def parts_s(self) -> tuple[float, float, float, float, float]:
        """Seconds of scheduling, packing, waiting for the device, updating and making text."""
        return self.schedule_s, self.pack_s, self.device_s, self.update_s, self.detokenize_s

    @property
    def admission_limit(self) -> str:
        """What kept the next request out, as `decision` has it: rows, tokens, pages, ...; empty: nothing did."""
        return self.decision.partition(": ")[2]


class LoadChanged(_Event):
    """What runs, waits and is held changed apart from a step: an abort, a pause, a reset of the prefix cache."""

    num_running: int
    num_waiting: int
    num_pages_total: int
    num_pages_in_use: int
    num_pages_cached: int
    engine: int = 0
    own_load: EngineLoad | None = None


class HttpAnswered(_Event):
    """A request over HTTP was answered, or its client left; `path` is empty where no route has it.

    `end` is stop, length, rejected, refused, aborted or failed, and empty for what asks the model nothing. `first_token_s` and
    `seconds` count from its arrival. `body` is what the client sent, or its beginning, and empty unless `log.prompts` asks for it.
    `answer_id` is the answer's own id; the engine's requests behind it are called the same, with their index behind. `num_merged`
    tokens of a stream came with one before, because the event loop or the client lagged. `is_routine`: a machine asked, as it does
    every few seconds (health, metrics). `method` is empty where no request could be read, and `status` 0 where nobody was answered.
    """

    request_id: str
    method: str
    path: str
    status: int
    end: str
    code: str
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float | None
    seconds: float
    body: str = ""
    answer_id: str = ""
    num_merged: int = 0
    is_routine: bool = False


class RequestTraced(_Event):
    """A client has said which span of its own trace an answer belongs to; told only where traces are sent.

    `answer_id` as in `HttpAnswered`, `parent` as in the header `traceparent` of W3C, version 00.
    """

    answer_id: str
    parent: str


class HealthChanged(_Event):
    """The engine's health moved: starting, ready, draining, paused, sleeping, dead."""

    state: str
    message: str = ""


class SinkDropped(_Event):
    """A file or terminal sink could not keep up or could not write; `count` events were lost to it."""

    sink: str
    count: int
    message: str


class EngineStopped(_Event):
    """The engine closed; `message` is empty after a requested stop."""

    message: str = ""


Event = (
    PhaseChanged
    | ProgramCompiled
    | EngineStarted
    | RequestReceived
    | RequestRejected
    | RequestQueued
    | RequestScheduled
    | RequestFirstToken
    | RequestPreempted
    | RequestFinished
    | StepFinished
    | LoadChanged
    | HttpAnswered
    | RequestTraced
    | HealthChanged
    | SinkDropped
    | EngineStopped
)

type EngineEvent = RequestQueued | RequestFirstToken | RequestFinished | StepFinished | LoadChanged
"""What a copy of the model says of itself where there are several."""


def told_alone(event: EngineEvent) -> EngineEvent:
    """What the engine that an event is from would have told if it were the only one."""
    match event:
        case RequestQueued(own_load=EngineLoad() as load):
            return msgspec.structs.replace(event, num_waiting=load.num_waiting)
        case StepFinished(own_load=EngineLoad() as load) | LoadChanged(own_load=EngineLoad() as load):
            return msgspec.structs.replace(event, **msgspec.structs.asdict(load))
    return event


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def to_line(event: Event) -> bytes:
    """One JSON object, without a newline; a step with 256 rows stays under 1 kB."""
    return _encoder.encode(event)


def from_line(line: bytes) -> Event:
    """The event that `to_line` wrote. Raises msgspec.ValidationError for anything else."""
    return _decoder.decode(line)


@runtime_checkable
class Sink(Protocol):
    """Takes every event, in order, on the engine's thread; must return within microseconds and never raise."""

    def __call__(self, event: Event, /) -> None: ...

    def close(self) -> None: ...
