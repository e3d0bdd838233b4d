"""Events as lines for people.

Everything here depends on the events alone (their own times, never the clock), so replaying a JSON log gives the same lines.
"""

import enum
from datetime import UTC, datetime

import msgspec

from jaxpaged import events
from jaxpaged.counts import counted
from jaxpaged.events import Event

MAX_ID_CHARS = 128
MAX_MESSAGE_CHARS = 1000
MAX_GAP_S = 1.0
"""A longer pause between two steps is idleness: it is no part of a rate, and the next interval begins after it."""
PHASES_IN_BYTES = ("download", "load")
"""Their messages say how far they are."""


class Level(enum.IntEnum):
    """How important a line is; the names are those of `log.level`."""

    DEBUG = 0
    INFO = 1
    WARNING = 2
    ERROR = 3


class LogLine(msgspec.Struct, frozen=True):
    """One line for people: wall-clock seconds, importance and text."""

    time_s: float
    level: Level
    text: str

    def __str__(self) -> str:
        # Outside the years that dates can have, the number itself is better than no line.
        try:
            stamp = datetime.fromtimestamp(self.time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        except (OverflowError, ValueError, OSError):
            stamp = repr(self.time_s)
        return f"{stamp} {self.level.name:<7} {self.text}"


def clean(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Text from outside made safe for one line of a log or terminal: escaped, then cut at `max_chars` characters."""
    head = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:max_chars])
    return head if len(text) <= max_chars and len(head) <= max_chars else head[: max_chars - 3] + "..."


def clean_id(request_id: str) -> str:
    """A request id for a line: escaped, at most 128 characters, quoted where it could pass for other words of the line."""
    text = clean(request_id.replace("\\", "\\\\"), MAX_ID_CHARS)
    is_word = text != "" and all(c.isalnum() or c in "._:@/+-#" for c in text)
    return text if is_word else '"' + text.replace('"', "'") + '"'


def percent(part: int, whole: int) -> str:
    """`45.2 %`; of nothing it is 0."""
    return f"{100 * part / whole if whole else 0:.1f} %"


class _Interval(msgspec.Struct):
    """Sums of the steps since the last line about the whole engine."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_tokens: int = 0
    num_padding: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preempted: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefill_recompute_tokens: int = 0


class LogFormatter:
    """Turns the event stream into lines; keeps the sums of the current interval and the compile count.

    Args:
        interval_s: seconds (of event time) between two lines about the whole engine.
    """

    def __init__(self, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._sums = _Interval()
        self._interval_began_s: float | None = None
        self._last_step: events.StepFinished | None = None
        self._num_compiled = 0
        self._num_from_cache = 0
        self._num_programs = 0
        self._phase_said, self._phase_said_s = "", float("-inf")

    def lines(self, event: Event) -> list[LogLine]:
        """The lines of one event, in order; most events have one, a step has none until the interval is over."""
        match event:
            case events.StepFinished():
                return self._step(event)
            case events.ProgramCompiled():
                return [self._compiled(event)]
            case events.PhaseChanged():
                return self._phase_lines(event)
            case events.EngineStopped():
                return [*self._interval_line(event.time_s), self._plain(event)]
            case _:
                return [self._plain(event)]

    def compile_progress(self) -> str:
        """`compiling 7/12 (5 from cache)`, counted from the events seen."""
        cached = f" ({self._num_from_cache} from cache)" if self._num_from_cache else ""
        return f"compiling {self._num_compiled}/{self._num_programs}{cached}"

    def _phase_lines(self, event: events.PhaseChanged) -> list[LogLine]:
        """A line per phase; of parts that are done quickly one after the other, one line a second and the last.

        A download draws its own lines or bar on the terminal, so only its beginning and its end are told.
        """
        text, is_last = self._phase(event), event.done == event.total
        is_soon = 0 <= event.time_s - self._phase_said_s < MAX_GAP_S or event.phase == "download"
        is_quiet = event.phase == self._phase_said and event.done > 0 and not is_last and is_soon
        if is_quiet:
            return [LogLine(event.time_s, Level.DEBUG, text)]
        self._phase_said, self._phase_said_s = event.phase, event.time_s
        return [LogLine(event.time_s, Level.INFO, text)]

    def _phase(self, event: events.PhaseChanged) -> str:
        if event.phase == "compile" and event.total:
            if event.done == 0:
                self._num_compiled = self._num_from_cache = 0
            self._num_programs = event.total
            self._num_compiled = max(self._num_compiled, event.done)
            return self.compile_progress()
        count = f" {event.done}/{event.total}" if event.total and event.phase not in PHASES_IN_BYTES else ""
        name = clean(event.phase.replace("_", " "), 32)
        return f"{name}{count}: {clean(event.message)}" if event.message else name + count

    def _compiled(self, event: events.ProgramCompiled) -> LogLine:
        origin = "read from the cache" if event.from_cache else "compiled"
        text = f"program for {counted(event.bucket_tokens, 'token')} {origin} in {event.seconds:.2f} s"
        if event.after_ready:
            return LogLine(event.time_s, Level.WARNING, f"{text}, after ready: requests waited for it")
        self._num_compiled += 1
        self._num_from_cache += event.from_cache
        if self._num_programs:
            return LogLine(event.time_s, Level.DEBUG, f"{self.compile_progress()}: {text}")
        return LogLine(event.time_s, Level.DEBUG, text)

    def _step(self, event: events.StepFinished) -> list[LogLine]:
        step_s = event.schedule_s + event.pack_s + event.device_s + event.update_s + event.detokenize_s
        gap_s = None if self._last_step is None else event.time_s - self._last_step.time_s
        follows = gap_s is not None and 0 <= gap_s <= step_s + MAX_GAP_S
        sums = self._sums
        sums.num_steps += 1
        sums.busy_s += gap_s if follows and gap_s is not None else step_s
        sums.num_tokens += event.num_tokens
        sums.num_padding += event.bucket_tokens - event.num_tokens
        sums.num_prefill_tokens += event.num_prefill_tokens
        sums.num_decode_tokens += event.num_decode_tokens
        sums.num_preempted += event.num_preempted
        sums.prefix_queries_tokens += event.prefix_queries_tokens
        sums.prefix_hits_tokens += event.prefix_hits_tokens
        sums.prefill_recompute_tokens += event.prefill_recompute_tokens
        self._last_step = event
        if self._interval_began_s is None or not follows:
            self._interval_began_s = event.time_s - step_s
        lines = [
            LogLine(
                event.time_s,
                Level.DEBUG,
                f"step {event.step}{f' of engine {event.engine}' if event.own_load else ''}: {event.num_seqs} sequences, "
                f"{event.num_prefill_tokens} prompt + {event.num_decode_tokens} generated "
                f"+ {event.bucket_tokens - event.num_tokens} padding = {counted(event.bucket_tokens, 'token')} in {1000 * step_s:.1f} ms "
                f"(device {1000 * event.device_s:.1f} ms){': ' + clean(event.decision) if event.decision else ''}",
            )
        ]
        elapsed_s = event.time_s - self._interval_began_s
        is_idle = event.num_running == 0 and event.num_waiting == 0
        if elapsed_s >= self._interval_s or (is_idle and sums.busy_s >= MAX_GAP_S):
            lines += self._interval_line(event.time_s)
        return lines

    def _interval_line(self, time_s: float) -> list[LogLine]:
        """The line about the whole engine; none when no step ran. Starts the next interval."""
        sums = self._sums
        last = self._last_step
        if last is None or sums.num_steps == 0:
            return []
        busy_s = max(sums.busy_s, 1e-9)
        text = (
            f"running {last.num_running}, waiting {last.num_waiting}; "
            f"batch {sums.num_tokens / sums.num_steps:.1f} tokens + {sums.num_padding / sums.num_steps:.1f} padding "
            f"(mean of {sums.num_steps} steps); "
            f"pages {percent(last.num_pages_in_use, last.num_pages_total)} of {last.num_pages_total} in use; "
            f"prompt {sums.num_prefill_tokens / busy_s:.1f} tokens/s, generation {sums.num_decode_tokens / busy_s:.1f} tokens/s; "
            f"prefix hits {percent(sums.prefix_hits_tokens, sums.prefix_queries_tokens)}"
        )
        if sums.num_preempted:
            text += f"; preempted {sums.num_preempted}"
        if sums.prefill_recompute_tokens:
            text += f"; {counted(sums.prefill_recompute_tokens, 'token')} computed again"
        self._sums = _Interval()
        self._interval_began_s = time_s
        return [LogLine(time_s, Level.INFO, text)]

    def _plain(self, event: Event) -> LogLine:
        """The line of an event that depends on nothing but itself."""
        level, text = _plain_text(event)
        return LogLine(event.time_s, level, text)


def _plain_text(event: Event) -> tuple[Level, str]:
    match event:
        case events.RequestScheduled(num_preemptions=0):
            return Level.INFO, (
                f"request {clean_id(event.request_id)} added: {counted(event.num_prompt_tokens, 'prompt token')}, "
                f"{event.num_cached_tokens} cached, {counted(event.num_pages, 'page')} allocated"
                f"{f', waited {event.queue_s:.3f} s' if event.queue_s >= 0.01 else ''}"
            )
        case events.RequestScheduled():
            return Level.INFO, (
                f"request {clean_id(event.request_id)} resumed after preemption {event.num_preemptions}: "
                f"{counted(event.num_cached_tokens, 'token')} cached, {counted(event.num_pages, 'page')} allocated"
            )
        case events.RequestFinished():
            return (Level.ERROR if event.reason == "error" else Level.INFO), _finished_text(event)
        case events.RequestReceived():
            return Level.DEBUG, f"request {clean_id(event.request_id)} received: {counted(event.num_prompt_tokens, 'prompt token')}"
        case events.RequestQueued():
            return (
                Level.DEBUG,
                f"request {clean_id(event.request_id)} queued behind {event.num_waiting}, at most {counted(event.max_tokens, 'token')}",
            )
        case events.RequestRejected():
            return Level.INFO, f"request {clean_id(event.request_id)} rejected ({clean(event.code, 64)}): {clean(event.message)}"
        case events.RequestFirstToken():
            return Level.DEBUG, f"request {clean_id(event.request_id)} has its first token after {event.ttft_s:.3f} s"
        case events.RequestPreempted():
            return Level.INFO, (
                f"request {clean_id(event.request_id)} preempted: {counted(event.num_pages_freed, 'page')} freed, "
                f"{counted(event.num_computed_tokens, 'token')} to compute again"
            )
        case events.EngineStarted():
            return Level.INFO, (
                f"ready in {event.seconds:.1f} s: {clean(event.model, MAX_ID_CHARS)} in {clean(event.dtype, 32)}"
                f"{' with weights in ' + clean(event.quantization, 32) if event.quantization else ''}, "
                f"weights {event.weight_bytes / 2**20:.0f} MiB, {counted(event.num_pages, 'page')} of {counted(event.page_size, 'token')} "
                f"({event.pool_bytes / 2**20:.0f} MiB), {counted(event.num_programs, 'program')}; "
                f"per step at most {counted(event.max_num_seqs, 'sequence')} "
                f"and {counted(event.max_num_batched_tokens, 'token')}; context {counted(event.max_model_len, 'token')}"
                f"{f'; {event.num_engines} copies of the model, each so' if event.num_engines > 1 else ''}"
                f"{_kernels_text(event)}"
            )
        case events.HealthChanged():
            level = Level.ERROR if event.state == "dead" else Level.DEBUG if event.state in ("starting", "ready") else Level.INFO
            if event.state == "ready" and event.message:
                level = Level.INFO
            return level, f"health: {clean(event.state, 32)}{': ' + clean(event.message) if event.message else ''}"
        case events.HttpAnswered():
            return (Level.DEBUG if event.is_routine else Level.INFO), _answered_text(event)
        case events.RequestTraced():
            return Level.DEBUG, f"answer {clean(event.answer_id, MAX_ID_CHARS)} belongs to the trace {clean(event.parent, 64)}"
        case events.LoadChanged():
            return Level.DEBUG, (
                f"running {event.num_running}, waiting {event.num_waiting}; "
                f"pages {percent(event.num_pages_in_use, event.num_pages_total)} of {event.num_pages_total} in use"
            )
        case events.SinkDropped():
            return Level.WARNING, f"{event.count} events were lost to the {clean(event.sink, 64)} log: {clean(event.message)}"
        case events.EngineStopped():
            return (Level.ERROR if event.message else Level.INFO), f"stopped{': ' + clean(event.message) if event.message else ''}"
        case _:
            # A new kind of event still leaves a trace, until its own line is written.
            return Level.DEBUG, clean(repr(event))


def _kernels_text(event: events.EngineStarted) -> str:
    """The implementations, and on a GPU why those of more promise were not taken; elsewhere everybody knows."""
    refused = event.kernels_refused if event.platform not in ("", "cpu") else ()
    told = (f"; {label} {', '.join(map(clean, parts))}" for label, parts in (("kernels:", event.kernels), ("not taken:", refused)) if parts)
    return "".join(told)


def _finished_text(event: events.RequestFinished) -> str:
    parts = [f"{event.num_samples} answers"] if event.num_samples > 1 else []
    parts.append(counted(event.num_output_tokens, "token"))
    if event.ttft_s is not None:
        parts.append(f"first token after {event.ttft_s:.3f} s")
        parts.append(f"{decode_rate(event.num_output_tokens, event.ttft_s, event.e2e_s):.1f} tokens/s")
    parts.append(f"{counted(event.num_pages_freed, 'page')} freed")
    if event.num_preemptions:
        parts.append(f"preempted {event.num_preemptions} times")
    message = f": {clean(event.message)}" if event.message else ""
    return f"request {clean_id(event.request_id)} finished ({clean(event.reason, 32)}): {', '.join(parts)}{message}"


def _answered_text(event: events.HttpAnswered) -> str:
    ends = ", ".join(clean(word, 64) for word in (event.end, event.code) if word)
    parts = [f"{event.seconds:.3f} s"]
    if event.end:
        parts.append(f"{counted(event.num_prompt_tokens, 'prompt token')} + {counted(event.num_output_tokens, 'token')}")
    if event.first_token_s is not None:
        parts.append(f"first token after {event.first_token_s:.3f} s")
    if event.num_merged:
        parts.append(f"{counted(event.num_merged, 'token')} merged")
    if event.answer_id:
        parts.append(f"answer {clean_id(event.answer_id)}")
    if event.body:
        parts.append(f"body {clean(event.body)}")
    path = clean(event.path, MAX_ID_CHARS) or ("(no such path)" if event.status in (404, 405) else "(not looked up)")
    what = f"{clean(event.method, 16)} {path}" if event.method else "(no request)"
    return f"request {clean_id(event.request_id)} {what} {event.status or 'left'}{f' ({ends})' if ends else ''}: {', '.join(parts)}"


def decode_rate(num_output_tokens: int, ttft_s: float, e2e_s: float) -> float:
    """Tokens per second after the first one; with a single token, over the whole time."""
    if num_output_tokens > 1 and e2e_s > ttft_s:
        return (num_output_tokens - 1) / (e2e_s - ttft_s)
    return num_output_tokens / e2e_s if e2e_s > 0 else 0.0
