"""How far a transfer is: one report type, a meter that makes reports, and the two ways to draw them.

Rich is imported only when a bar is drawn on a terminal. Drawing never fails a transfer: a closed or full stream is ignored.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, cast, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import rich.progress

RATE_WINDOW_S = 5.0
LINE_INTERVAL_S = 3.0
LINE_STEP = 0.1
QUIET_LINE_INTERVAL_S = 15.0
FOLDER_POLL_S = 0.2


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a transfer. Unknown figures are None; a finished report is the last of its label."""

    label: str
    done_bytes: int
    total_bytes: int | None
    rate_bytes_per_s: float | None
    eta_s: float | None
    elapsed_s: float
    is_finished: bool = False


@runtime_checkable
class TextStream(Protocol):
    """What is needed of a stream to draw on it."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@runtime_checkable
class Progress(Protocol):
    """Draws reports and notes. Calls may come from a second thread, one at a time."""

    def show(self, report: TransferReport) -> None: ...

    def note(self, message: str) -> None: ...

    def close(self) -> None: ...


class SilentProgress:
    """Draws nothing."""

    def show(self, report: TransferReport) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Unfailing:
    """A stream whose other end may be gone or full: what cannot be written is dropped (rich would end the process)."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str, /) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def write_line(self, line: str) -> None:
        self.write(line + "\n")
        self.flush()


class LineProgress:
    """Plain lines: at most one per `LINE_INTERVAL_S` and 10 %, or one per 15 s while slow; always one at the end."""

    def __init__(self, stream: TextStream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = _Unfailing(stream)
        self._clock = clock
        self._label: str | None = None
        self._last_s = 0.0
        self._last_done_bytes = 0

    def show(self, report: TransferReport) -> None:
        now_s = self._clock()
        if report.label != self._label:
            self._label, self._last_s, self._last_done_bytes = report.label, now_s, report.done_bytes
        if not report.is_finished and not self._is_due(report, now_s):
            return
        self._last_s, self._last_done_bytes = now_s, report.done_bytes
        self._stream.write_line(f"{report.label}: {figures(report)}")
        if report.is_finished:
            self._label = None

    def _is_due(self, report: TransferReport, now_s: float) -> bool:
        waited_s = now_s - self._last_s
        if waited_s < LINE_INTERVAL_S:
            return False
        gained = report.done_bytes - self._last_done_bytes
        return waited_s >= QUIET_LINE_INTERVAL_S or (report.total_bytes is not None and gained >= LINE_STEP * report.total_bytes)

    def note(self, message: str) -> None:
        self._stream.write_line(message)

    def close(self) -> None:
        pass


class BarProgress:
    """A bar on a terminal, drawn by rich; figures are the report's own."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = _Unfailing(stream)
        self._bar: rich.progress.Progress | None = None

    def show(self, report: TransferReport) -> None:
        if self._bar is None:
            self._start(report)
        assert self._bar is not None
        self._bar.update(
            self._bar.task_ids[0],
            completed=report.done_bytes,
            total=report.total_bytes,
            figures=figures(report),
            refresh=report.is_finished,
        )
        if report.is_finished:
            self.close()

    def _start(self, report: TransferReport) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(file=cast("IO[str]", self._stream)),
            expand=True,
        )
        self._bar.add_task(report.label, total=report.total_bytes, figures="")
        self._bar.start()

    def note(self, message: str) -> None:
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write_line(message)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def progress_on(stream: TextStream | None = None) -> Progress:
    """A bar when `stream` (standard error by default) is a terminal that can move its cursor, else plain lines."""
    stream = sys.stderr if stream is None else stream
    if stream is None:  # a daemon may have no standard error
        return SilentProgress()
    return BarProgress(stream) if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" else LineProgress(stream)


class Meter:
    """Turns byte counts into reports. Use as a context manager: leaving it without an error finishes the transfer."""

    def __init__(
        self, progress: Progress, label: str, total_bytes: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.done_bytes = 0
        self.total_bytes = total_bytes
        self._progress = progress
        self._label = label
        self._clock = clock
        self._start_s = clock()
        self._samples: deque[tuple[float, int]] = deque([(self._start_s, 0)])

    @classmethod
    def silent(cls) -> "Meter":
        """A meter that draws nothing."""
        return cls(SilentProgress(), "")

    def __enter__(self) -> "Meter":
        self.update(0)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._report(is_finished=True)
        else:
            self._progress.close()

    def update(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Set the bytes done so far, and the total when it became known."""
        self.done_bytes = done_bytes
        if total_bytes is not None:
            self.total_bytes = total_bytes
        now_s = self._clock()
        self._samples.append((now_s, done_bytes))
        while len(self._samples) > 2 and self._samples[0][0] < now_s - RATE_WINDOW_S:
            self._samples.popleft()
        self._report(is_finished=False)

    def advance(self, num_bytes: int) -> None:
        self.update(self.done_bytes + num_bytes)

    def _report(self, *, is_finished: bool) -> None:
        now_s = self._clock()
        elapsed_s = now_s - self._start_s
        first_s, first_bytes = (self._start_s, 0) if is_finished else self._samples[0]
        rate = (self.done_bytes - first_bytes) / (now_s - first_s) if now_s > first_s else None
        eta_s = None
        if rate and self.total_bytes is not None and not is_finished:
            eta_s = max(self.total_bytes - self.done_bytes, 0) / rate
        self._progress.show(
            TransferReport(
                label=self._label,
                done_bytes=self.done_bytes,
                total_bytes=self.total_bytes,
                rate_bytes_per_s=rate,
                eta_s=eta_s,
                elapsed_s=elapsed_s,
                is_finished=is_finished,
            )
        )


@contextmanager
def folder_growth(meter: Meter, folder: Path) -> Iterator[None]:
    """While inside, report the bytes that lie in `folder`, for programs that write there and tell nobody how far they are."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(FOLDER_POLL_S):
            done_bytes = folder_bytes(folder)
            meter.update(done_bytes if meter.total_bytes is None else min(done_bytes, meter.total_bytes))

    thread = threading.Thread(target=poll, name="jaxpaged-folder-growth", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below `folder`, hard links counted once; files that vanish meanwhile count nothing."""
    total, seen = 0, set()
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_size
    return total


def figures(report: TransferReport) -> str:
    """The report in words: bytes, percent, rate, time left (or taken, when finished)."""
    if report.is_finished:
        parts = [f"{format_bytes(report.done_bytes)} in {format_seconds(report.elapsed_s)}"]
    elif report.total_bytes:
        percent = 100 * report.done_bytes / report.total_bytes
        parts = [f"{format_bytes(report.done_bytes)} of {format_bytes(report.total_bytes)} ({percent:.0f} %)"]
    else:
        parts = [format_bytes(report.done_bytes)]
    if report.rate_bytes_per_s is not None:
        parts.append(f"{format_bytes(report.rate_bytes_per_s)}/s")
    if report.eta_s is not None:
        parts.append(f"{format_seconds(report.eta_s)} left")
    return ", ".join(parts)


def format_bytes(num_bytes: int | float) -> str:
    """Decimal units, as package indexes and disks count: `92.9 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_seconds(seconds: int | float) -> str:
    """`3 s`, `2:05`, `1:02:05`; under ten seconds with one decimal."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
