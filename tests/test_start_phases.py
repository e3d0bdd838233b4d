"""Phases of a start: what is said of a download and of long work in many parts, by a clock that stands still unless it is turned."""

import pytest

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.loading.progress import Meter, TransferReport
from jaxpaged.log_format import Level, LogFormatter
from jaxpaged.start import DownloadPhase, StartReport
from tests.event_log import EventLog


class Turned:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now_s


class Drawn:
    """What was drawn."""

    def __init__(self) -> None:
        self.reports: list[TransferReport] = []
        self.notes: list[str] = []
        self.num_closed = 0

    def show(self, report: TransferReport) -> None:
        """See `Progress`."""
        self.reports.append(report)

    def note(self, message: str) -> None:
        """See `Progress`."""
        self.notes.append(message)

    def close(self) -> None:
        """See `Progress`."""
        self.num_closed += 1


@pytest.fixture
def clock() -> Turned:
    """Shows 1000 s."""
    return Turned()


@pytest.fixture
def log() -> EventLog:
    """What was said."""
    return EventLog()


@pytest.fixture
def report(clock: Turned, log: EventLog) -> StartReport:
    """Of a start that begins now."""
    return StartReport(log, Clocks(clock, clock), clock())


def test_a_download_is_a_phase_in_bytes_and_drawn_as_ever(report: StartReport, clock: Turned, log: EventLog) -> None:
    drawn = Drawn()
    progress = DownloadPhase(report, drawn)
    progress.note("waiting")
    with Meter(progress, "pulling tiny", 1000, clock=clock) as meter:
        for done in range(100, 1001, 100):
            clock.now_s += 0.25
            meter.update(done)
    progress.close()
    assert (len(drawn.reports), drawn.notes, drawn.num_closed) == (12, ["waiting"], 1)
    said = log.of(events.PhaseChanged)
    assert [(event.phase, event.done, event.total) for event in said] == [
        ("download", 0, 1000),
        ("download", 400, 1000),
        ("download", 800, 1000),
        ("download", 1000, 1000),
    ]
    assert said[1].message == "pulling tiny: 400 B of 1.0 kB (40 %), 400 B/s, 1.5 s left"
    formatter = LogFormatter()
    levels = [line.level for event in said for line in formatter.lines(event)]
    assert levels == [Level.INFO, Level.DEBUG, Level.DEBUG, Level.INFO], "the terminal has the bar already"


def test_a_download_of_unknown_size_ends_with_all_of_it(report: StartReport, clock: Turned, log: EventLog) -> None:
    with Meter(DownloadPhase(report, Drawn()), "pulling tiny", clock=clock) as meter:
        clock.now_s += 2
        meter.update(77)
    assert [(event.done, event.total) for event in log.of(events.PhaseChanged)] == [(0, 0), (77, 0), (77, 77)]


def test_what_is_here_already_is_no_download(report: StartReport, log: EventLog) -> None:
    DownloadPhase(report).close()
    assert not log


def test_lines_of_phases() -> None:
    formatter = LogFormatter()

    def line(second: float, phase: str, message: str, done: int = 0, total: int = 0) -> tuple[Level, str]:
        (only,) = formatter.lines(events.PhaseChanged(time_s=1000 + second, phase=phase, message=message, done=done, total=total))
        return only.level, only.text

    assert line(0, "find", "finding tiny") == (Level.INFO, "find: finding tiny")
    assert line(0.1, "load", "loading tiny") == (Level.INFO, "load: loading tiny")
    assert line(0.2, "load", "1 of 9 kB", 1000, 9000) == (Level.DEBUG, "load: 1 of 9 kB"), "too soon"
    assert line(1.3, "load", "2 of 9 kB", 2000, 9000) == (Level.INFO, "load: 2 of 9 kB")
    assert line(1.4, "compile", "", 0, 2) == (Level.INFO, "compiling 0/2")
    assert line(1.5, "compile", "", 2, 2) == (Level.INFO, "compiling 2/2")
    assert line(1.6, "warm_up", "first steps 0/1", 0, 1) == (Level.INFO, "warm up 0/1: first steps 0/1")
    assert line(1.7, "warm_up", "first steps 1/1", 1, 1) == (Level.INFO, "warm up 1/1: first steps 1/1")
