"""Where events go: log lines for people, JSON lines, several at once.

A sink takes every event on the engine's thread and must never hold it up. File and terminal sinks therefore only put the event
into a bounded queue; a thread of their own formats and writes. What cannot be queued or written is dropped and counted.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from jaxpaged import events
from jaxpaged.config import LogConfig
from jaxpaged.events import Event, Sink, SinkDropped
from jaxpaged.log_format import MAX_ID_CHARS, Level, LogFormatter
from jaxpaged.log_targets import STDERR_FD, FileTarget, StreamTarget, Target

MAX_QUEUED_EVENTS = 8192
MAX_EVENTS_PER_WRITE = 256
CLOSE_TIMEOUT_S = 2.0
REPORT_INTERVAL_S = 1.0


class QueueSink:
    """Formats and writes events on a thread of its own, from a bounded queue.

    Args:
        name: for the count of what was lost.
        target: where lines go.
        render: event -> bytes with line ends, `b""` for nothing; called on the thread, in order.
        max_queued: events held at most.
    """

    def __init__(self, name: str, target: Target, render: Callable[[Event], bytes], *, max_queued: int = MAX_QUEUED_EVENTS) -> None:
        self.name = name
        self._target = target
        self._render = render
        self._max_queued = max_queued
        self._queue: SimpleQueue[Event | threading.Event | None] = SimpleQueue()
        self._num_overflowed = 0
        self._num_unwritten = 0
        self._last_error = ""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"jaxpaged-log-{name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event, /) -> None:
        """Queues the event, or drops and counts it. Never waits, never raises."""
        if self._is_closed or self._queue.qsize() >= self._max_queued:
            # The report of a loss that is itself lost must not keep itself alive.
            if not isinstance(event, SinkDropped):
                self._num_overflowed += 1
            return
        self._queue.put(event)

    @property
    def num_dropped(self) -> int:
        """Events lost so far."""
        return self._num_overflowed + self._num_unwritten

    @property
    def last_error(self) -> str:
        """Why the last event was lost."""
        return self._last_error or "the writer does not keep up"

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Waits until all that was queued is written or lost; False if that took longer."""
        if self._is_closed:
            return not self._thread.is_alive()
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Writes what is queued and stops; gives up after `timeout_s` on a target that blocks."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._target.stop_waiting()
            self._thread.join(0.5)
            return
        self._target.close()

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            batch: list[Event] = []
            marks: list[threading.Event] = []
            is_last = False
            item: Event | threading.Event | None = first
            while True:
                if item is None:
                    is_last = True
                elif isinstance(item, threading.Event):
                    marks.append(item)
                else:
                    batch.append(item)
                if is_last or len(batch) >= MAX_EVENTS_PER_WRITE:
                    break
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    break
            self._write(batch)
            for mark in marks:
                mark.set()
            if is_last:
                return

    def _write(self, batch: Sequence[Event]) -> None:
        lines: list[bytes] = []
        kinds: list[Event] = []
        for event in batch:
            try:
                text = self._render(event)
            except Exception as e:  # an event that cannot be shown must not end the log
                self._lose([event], f"{type(e).__name__}: {e}")
                continue
            if text:
                lines.append(text)
                kinds.append(event)
        while lines:
            try:
                num_written = self._target.write(lines)
            except OSError as e:
                self._lose(kinds, e.strerror or str(e))
                return
            lines, kinds = lines[num_written:], kinds[num_written:]

    def _lose(self, lost: Sequence[Event], why: str) -> None:
        self._num_unwritten += sum(not isinstance(event, SinkDropped) for event in lost)
        self._last_error = why


class _Branch(msgspec.Struct):
    """One sink of a `FanOut` and what is known of its losses."""

    sink: Sink
    name: str
    num_raised: int = 0
    num_reported: int = 0
    last_error: str = ""


class FanOut:
    """Gives every event to several sinks in order, and turns their losses into `SinkDropped` events, at most one per sink and second.

    Args:
        sinks: called in this order on the caller's thread. One that raises is counted and does not disturb the others.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._branches = [_Branch(sink, sink.name if isinstance(sink, QueueSink) else type(sink).__name__) for sink in sinks]
        self._reported_s = float("-inf")

    def __call__(self, event: Event, /) -> None:
        """Never raises."""
        self._send(event)
        # abs: a clock that was set back must not silence the report.
        if abs(event.time_s - self._reported_s) >= REPORT_INTERVAL_S or isinstance(event, events.EngineStopped):
            self._reported_s = event.time_s
            for branch in self._branches:
                self._report(branch, event.time_s)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits for the sinks that write on threads."""
        for branch in self._branches:
            if isinstance(branch.sink, QueueSink):
                branch.sink.flush(timeout_s)

    def close(self) -> None:
        """Closes every sink."""
        for branch in self._branches:
            with contextlib.suppress(Exception):
                branch.sink.close()

    def _send(self, event: Event) -> None:
        for branch in self._branches:
            try:
                branch.sink(event)
            except Exception as e:
                branch.num_raised += 1
                branch.last_error = f"{type(e).__name__}: {e}"

    def _report(self, branch: _Branch, time_s: float) -> None:
        num_lost, why = branch.num_raised, branch.last_error
        if isinstance(branch.sink, QueueSink) and branch.sink.num_dropped:
            num_lost += branch.sink.num_dropped
            why = branch.sink.last_error
        if num_lost > branch.num_reported:
            count, branch.num_reported = num_lost - branch.num_reported, num_lost
            self._send(SinkDropped(time_s=time_s, sink=branch.name, count=count, message=why))


def json_line(event: Event) -> bytes:
    """One line of a JSON log. A request id longer than 128 characters is cut: it comes from outside."""
    if isinstance(event, _WITH_ID) and len(event.request_id) > MAX_ID_CHARS:
        event = msgspec.structs.replace(event, request_id=event.request_id[: MAX_ID_CHARS - 3] + "...")
    return events.to_line(event) + b"\n"


_WITH_ID = (
    events.RequestReceived,
    events.RequestRejected,
    events.RequestQueued,
    events.RequestScheduled,
    events.RequestFirstToken,
    events.RequestPreempted,
    events.RequestFinished,
)


def text_renderer(level: Level, interval_s: float) -> Callable[[Event], bytes]:
    """Event -> the lines for people that are at least as important as `level`."""
    formatter = LogFormatter(interval_s)

    def render(event: Event) -> bytes:
        lines = (str(line) + "\n" for line in formatter.lines(event) if line.level >= level)
        return "".join(lines).encode("utf-8", "backslashreplace")

    return render


def open_log(config: LogConfig, *, fd: int = STDERR_FD) -> QueueSink:
    """The log that `config` asks for. `log.level` chooses lines for people; a JSON log always holds every event.

    Args:
        config: the `log` section.
        fd: where to write when no `log.file` is given.

    Raises:
        ConfigError: the log file cannot be opened.
    """
    target: Target = FileTarget(Path(config.file), config.max_bytes) if config.file else StreamTarget(fd)
    render = json_line if config.format == "json" else text_renderer(Level[config.level.upper()], config.interval_s)
    return QueueSink(config.file or "terminal", target, render)


class MemorySink:
    """Keeps every event in a list, for tests and for programs that read them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event, /) -> None:
        """Appends."""
        self.events.append(event)

    def close(self) -> None:
        """Keeps what is there."""
