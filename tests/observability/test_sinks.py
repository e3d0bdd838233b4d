"""Sinks: nothing holds the engine up, what is lost is counted, files stay whole, logs rotate."""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxpaged import events
from jaxpaged.config import LogConfig
from jaxpaged.errors import ConfigError
from jaxpaged.events import Event, SinkDropped, from_line, to_line
from jaxpaged.log_format import Level
from jaxpaged.log_targets import FileTarget, StreamTarget
from jaxpaged.sinks import FanOut, MemorySink, QueueSink, json_line, open_log, text_renderer
from jaxpaged.startup_progress import ERASE_LINE, startup_renderer
from tests.observability.samples import START_S, finished, scheduled, short_run, step


class ListTarget:
    """Keeps lines; can be told to hold still, or to fail as a full disk does."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.error: OSError | None = None
        self.num_closed = 0

    def write(self, lines: Sequence[bytes]) -> int:
        self.is_open.wait(10)
        if self.error is not None:
            raise self.error
        self.lines += lines
        return len(lines)

    def stop_waiting(self) -> None:
        self.is_open.set()

    def close(self) -> None:
        self.num_closed += 1


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    ends = [read_fd, write_fd]
    try:
        yield read_fd, write_fd
    finally:
        for fd in ends:
            try:
                os.close(fd)
            except OSError as e:
                assert e.errno == errno.EBADF


def num_log_threads() -> int:
    return sum(thread.name.startswith("jaxpaged-log") for thread in threading.enumerate())


def test_every_event_is_written_in_order() -> None:
    target = ListTarget()
    sink = QueueSink("test", target, json_line)
    run = short_run()
    for event in run:
        sink(event)
    sink.close()
    assert [from_line(line) for line in target.lines] == run
    assert (sink.num_dropped, target.num_closed) == (0, 1)


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    before = num_log_threads()
    sink = QueueSink("test", ListTarget(), json_line)
    assert num_log_threads() == before + 1
    sink.close()
    sink.close()
    assert num_log_threads() == before
    sink(step(0.0))
    assert sink.num_dropped == 1


def test_flush_waits_for_what_was_queued() -> None:
    target = ListTarget()
    sink = QueueSink("test", target, json_line)
    for i in range(100):
        sink(step(i / 10, i))
    assert sink.flush(10.0)
    assert len(target.lines) == 100
    target.is_open.clear()
    sink(step(0.0))
    assert not sink.flush(0.05)
    target.is_open.set()
    sink.close()


def test_a_full_queue_drops_and_counts_and_never_waits() -> None:
    target = ListTarget()
    sink = QueueSink("test", target, json_line, max_queued=50)
    target.is_open.clear()
    sink(step(0.0, 0))
    # The writer has taken the first batch when the queue is empty again.
    deadline = time.monotonic() + 10
    while sink._queue.qsize() and time.monotonic() < deadline:
        time.sleep(0.001)
    for i in range(1, 201):  # one that waited would wait for ever
        sink(step(i / 10, i))
    assert sink.num_dropped == 150
    target.is_open.set()
    sink.close()
    assert [from_line(line).step for line in target.lines] == list(range(51))


def test_losses_are_reported_in_the_stream_once_a_second() -> None:
    target, memory = ListTarget(), MemorySink()
    target.error = OSError(errno.ENOSPC, "No space left on device")
    sink = QueueSink("run.log", target, json_line)
    emit = FanOut([sink, memory])
    for i in range(31):
        emit(step(i / 10, i))
        assert sink.flush(10.0)
    emit.close()
    reports = [event for event in memory.events if isinstance(event, SinkDropped)]
    assert [(report.sink, report.message) for report in reports] == [("run.log", "No space left on device")] * len(reports)
    # At 1, 2 and 3 s; the event at which a report is made is not yet lost when the report is counted.
    assert len(reports) == 3
    assert sum(report.count for report in reports) <= 31 == sink.num_dropped


def test_the_report_of_a_loss_is_no_loss() -> None:
    target, memory = ListTarget(), MemorySink()
    target.error = OSError(errno.EPIPE, "Broken pipe")
    sink = QueueSink("terminal", target, json_line)
    emit = FanOut([sink, memory])
    emit(step(0.0))
    assert sink.flush(10.0)
    for i in range(5):
        emit(SinkDropped(time_s=START_S + 10 * i, sink="other", count=1, message=""))
        assert sink.flush(10.0)
    emit.close()
    assert sink.num_dropped == 1
    assert [event.count for event in memory.events if isinstance(event, SinkDropped) and event.sink == "terminal"] == [1]


def test_a_sink_that_recovers_goes_on_and_holds_the_report() -> None:
    target = ListTarget()
    sink = QueueSink("run.log", target, json_line)
    emit = FanOut([sink])
    target.error = OSError(errno.ENOSPC, "No space left on device")
    emit(step(0.0, 1))
    assert sink.flush(10.0)
    target.error = None
    emit(step(2.0, 2))
    emit.close()
    assert [type(from_line(line)).__name__ for line in target.lines] == ["StepFinished", "SinkDropped"]


def test_a_sink_that_raises_disturbs_nobody_and_is_counted() -> None:
    class Faulty:
        def __call__(self, event: Event, /) -> None:
            raise ZeroDivisionError("no")

        def close(self) -> None:
            raise ZeroDivisionError("no")

    memory = MemorySink()
    emit = FanOut([Faulty(), memory])
    for i in range(11):
        emit(step(i / 5, i))
    emit.close()
    reports = [event for event in memory.events if isinstance(event, SinkDropped)]
    assert [event for event in memory.events if not isinstance(event, SinkDropped)] == [step(i / 5, i) for i in range(11)]
    assert reports
    assert {(report.sink, report.message) for report in reports} == {("Faulty", "ZeroDivisionError: no")}


def test_an_event_that_cannot_be_shown_is_counted_and_the_others_are_written() -> None:
    target = ListTarget()
    sink = QueueSink("test", target, json_line)
    sink(scheduled("\ud800"))
    sink(scheduled("b"))
    sink.close()
    assert [from_line(line) for line in target.lines] == [scheduled("b")]
    assert sink.num_dropped == 1
    assert "surrogates" in sink.last_error


def test_a_reader_that_is_gone_ends_the_writing_and_nothing_else() -> None:
    with pipe() as (read_fd, write_fd):
        sink = QueueSink("terminal", StreamTarget(write_fd), json_line)
        sink(step(0.0, 1))
        assert sink.flush(10.0)
        assert from_line(os.read(read_fd, 65536).rstrip(b"\n")) == step(0.0, 1)
        os.close(read_fd)
        for i in range(10):
            sink(step(i / 10, i))
            assert sink.flush(10.0)
        assert sink.num_dropped == 10
        assert "pipe" in sink.last_error.lower()
        sink.close()


def test_a_reader_that_sleeps_holds_up_neither_the_engine_nor_the_end() -> None:
    with pipe() as (read_fd, write_fd):
        os.set_blocking(write_fd, False)
        sink = QueueSink("terminal", StreamTarget(write_fd), json_line, max_queued=1000)
        for i in range(2000):
            sink(step(i / 10, i))
        began = time.monotonic()
        sink.close(timeout_s=0.2)
        assert time.monotonic() - began < 20
        assert sink.num_dropped >= 500
        os.set_blocking(read_fd, False)
        lines = os.read(read_fd, 2**20).split(b"\n")
        assert [from_line(line).step for line in lines[:-1]] == list(range(len(lines) - 1))


def test_a_cut_line_is_finished_before_the_next() -> None:
    with pipe() as (read_fd, write_fd):
        os.set_blocking(write_fd, False)
        target = StreamTarget(write_fd)
        target.stop_waiting()
        capacity = 0
        with pytest.raises(BlockingIOError):
            while True:
                capacity += os.write(write_fd, b"x" * 1000)
        os.read(read_fd, 4096)
        line = b"a" * 5000 + b"\n"
        assert target.write([line, b"next\n"]) == 1
        with pytest.raises(BlockingIOError):
            target.write([b"lost\n"])
        rest = os.read(read_fd, 2**20)
        assert target.write([b"after\n"]) == 1
        text = rest + os.read(read_fd, 2**20)
        assert text.lstrip(b"x") == line + b"after\n"


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """The device that is always full: not a line is written, all are counted, close returns."""
    sink = open_log(LogConfig(format="json", file="/dev/full"))
    for i in range(5):
        sink(step(i / 10, i))
    sink.close()
    assert sink.num_dropped == 5
    assert "space" in sink.last_error.lower()


def test_a_write_that_stops_half_way_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of the second line, and has room again afterwards."""
    path = tmp_path / "run.log"
    target = FileTarget(path, 2**20)
    real_write, num_calls = os.write, 0

    def write(fd: int, data: bytes) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            return real_write(fd, data[:7])
        if num_calls == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert target.write([b"first line\n", b"second line\n", b"third line\n"]) == 1
    assert path.read_bytes() == b"first line\n"
    assert target.write([b"fourth line\n"]) == 1
    target.close()
    assert path.read_bytes() == b"first line\nfourth line\n"


def test_files_are_rotated_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    lines = [b"%04d %s\n" % (i, b"x" * 94) for i in range(1000)]
    for start in (0, 500):
        target = FileTarget(path, 4096)
        assert target.write(lines[start : start + 500]) == 500
        target.close()
    old = path.with_name("run.log.1")
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert path.stat().st_size <= 4096
    assert old.stat().st_size <= 4096
    kept = (old.read_bytes() + path.read_bytes()).splitlines(keepends=True)
    assert kept == lines[1000 - len(kept) :]
    assert len(kept) > 40


def test_a_file_that_somebody_moved_is_made_again_at_the_next_rotation(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    target = FileTarget(path, 4096)
    target.write([b"x" * 4000 + b"\n"])
    path.rename(tmp_path / "moved")
    assert target.write([b"y" * 200 + b"\n"]) == 1
    target.close()
    assert path.read_bytes() == b"y" * 200 + b"\n"


def test_a_line_larger_than_the_limit_is_still_written(tmp_path: Path) -> None:
    target = FileTarget(tmp_path / "run.log", 4096)
    assert target.write([b"x" * 10000 + b"\n", b"y\n"]) == 2
    target.close()
    assert (tmp_path / "run.log").read_bytes() == b"y\n"


def test_a_log_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    before = num_log_threads()
    for path in (tmp_path, tmp_path / "missing" / "run.log"):
        with pytest.raises(ConfigError, match="cannot write the log file"):
            open_log(LogConfig(file=str(path)))
    assert num_log_threads() == before


def test_the_json_log_holds_every_event_and_replays_to_the_text_log(tmp_path: Path) -> None:
    paths = {kind: tmp_path / kind for kind in ("json", "text")}
    sinks = [
        open_log(LogConfig(format="json", level="error", file=str(paths["json"]))),
        open_log(LogConfig(format="text", level="info", file=str(paths["text"]))),
    ]
    emit = FanOut(sinks)
    for event in short_run():
        emit(event)
    emit.close()
    replayed = [from_line(line) for line in paths["json"].read_bytes().splitlines()]
    assert replayed == short_run()
    render = text_renderer(Level.INFO, LogConfig().interval_s)
    text = b"".join(render(event) for event in replayed)
    assert text == paths["text"].read_bytes()
    assert len(text.splitlines()) >= 7


def test_hostile_ids_stay_on_one_line_in_both_logs() -> None:
    request_id = "a\r\n\x1b[31m" + "z" * 10**6
    line = json_line(finished(request_id))
    assert line.count(b"\n") == 1
    assert b"\x1b" not in line
    assert len(line) < 1000
    text = text_renderer(Level.INFO, 5.0)(finished(request_id))
    assert text.count(b"\n") == 1
    assert b"\x1b" not in text
    assert b"\r" not in text
    assert len(text) < 500
    short = scheduled("plain")
    assert json_line(short) == to_line(short) + b"\n"


def test_the_level_chooses_lines_for_people() -> None:
    run = [*short_run(), events.SinkDropped(time_s=START_S, sink="a", count=1, message="b"), finished("x", reason="error")]
    counts = {level: b"".join(map(text_renderer(level, 5.0), run)).count(b"\n") for level in Level}
    assert counts[Level.DEBUG] > counts[Level.INFO] > counts[Level.WARNING] == 2
    assert counts[Level.ERROR] == 1


def test_taking_an_event_costs_microseconds() -> None:
    """A coarse bound that a write or a formatted line per event on the engine's thread would break."""
    target = ListTarget()
    target.is_open.clear()
    sink = QueueSink("test", target, json_line, max_queued=10**6)
    run = [step(i / 10, i) for i in range(20000)]
    began = time.thread_time()
    for event in run:
        sink(event)
    spent_s = time.thread_time() - began
    sink.close(timeout_s=0.0)
    assert spent_s / len(run) < 100e-6


def test_the_start_up_line_is_drawn_over_and_then_gone() -> None:
    render = startup_renderer(40)
    drawn = b"".join(map(render, short_run())).decode()
    frames = drawn.split(ERASE_LINE)
    assert frames[1:4] == ["compiling 0/3", "compiling 1/3 (1 from cache)", "compiling 1/3 (1 from cache)"]
    assert "compiling 3/3 (2 from cache)" in frames
    assert frames[-1] == ""
    assert "\n" not in drawn
    long = render(events.PhaseChanged(time_s=START_S, phase="load", message="x" * 500)).decode()
    assert len(long) - len(ERASE_LINE) == 39


def test_a_program_compiled_after_ready_is_not_drawn() -> None:
    late = events.ProgramCompiled(time_s=START_S, bucket_tokens=2, seconds=1.0, from_cache=False, after_ready=True)
    assert startup_renderer(80)(late) == b""


def test_finding_the_model_is_not_drawn() -> None:
    """A pull draws its own bar there, and would find the cursor in the middle of a line."""
    for phase in ("find", "download"):
        assert startup_renderer(80)(events.PhaseChanged(time_s=START_S, phase=phase, message="finding a model")) == b""
