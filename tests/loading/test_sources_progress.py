"""The figures of a transfer, and the two ways to draw them."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.loading.progress import (
    BarProgress,
    LineProgress,
    Meter,
    SilentProgress,
    TransferReport,
    figures,
    folder_bytes,
    folder_growth,
    format_bytes,
    format_seconds,
    progress_on,
)

MB = 10**6


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept:
    """Keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[TransferReport] = []

    def show(self, report: TransferReport) -> None:
        self.reports.append(report)

    def note(self, message: str) -> None:
        pass

    def close(self) -> None:
        pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(Terminal):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_rate_and_time_left_follow_the_last_seconds() -> None:
    clock, kept = Clock(), Kept()
    with Meter(kept, "x", 1000, clock=clock) as meter:
        for second in range(1, 11):
            clock.now_s += 1.0
            meter.update(10 * second)
        for second in range(1, 11):  # ten times as fast from here
            clock.now_s += 1.0
            meter.update(100 + 80 * second)
    during, last = kept.reports[-2], kept.reports[-1]
    assert (during.rate_bytes_per_s, during.eta_s) == (80.0, 100 / 80)
    assert not during.is_finished
    assert last.is_finished
    assert (last.done_bytes, last.elapsed_s, last.rate_bytes_per_s, last.eta_s) == (900, 20.0, 45.0, None)


def test_unknown_figures_are_none() -> None:
    kept = Kept()
    with Meter(kept, "x", clock=Clock()) as meter:
        meter.update(5)
        assert (kept.reports[-1].total_bytes, kept.reports[-1].rate_bytes_per_s, kept.reports[-1].eta_s) == (None, None, None)
        meter.update(6, 10)
    assert kept.reports[-1].total_bytes == 10


def test_failed_transfer_is_not_reported_as_finished() -> None:
    kept = Kept()
    with pytest.raises(RuntimeError):
        with Meter(kept, "x", 10):
            raise RuntimeError
    assert not any(report.is_finished for report in kept.reports)


def test_lines_are_few() -> None:
    clock, stream = Clock(), io.StringIO()
    with Meter(LineProgress(stream, clock=clock), "pulling x", 100 * MB, clock=clock) as meter:
        for tenth in range(1, 1001):  # 100 s at 1 MB/s
            clock.now_s += 0.1
            meter.update(tenth * MB // 10)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "pulling x: 10.0 MB of 100.0 MB (10 %), 1.0 MB/s, 1:30 left"
    assert lines[-1] == "pulling x: 100.0 MB in 1:40, 1.0 MB/s"


def test_slow_transfer_still_shows_signs_of_life() -> None:
    clock, stream = Clock(), io.StringIO()
    with Meter(LineProgress(stream, clock=clock), "x", 1000 * MB, clock=clock) as meter:
        for second in range(60):
            clock.now_s += 1.0
            meter.update(second * 1000)
    assert len(stream.getvalue().splitlines()) == 5


def test_fast_transfer_is_one_line() -> None:
    stream = io.StringIO()
    with Meter(LineProgress(stream), "x", MB) as meter:
        for done in range(0, MB, 1000):
            meter.update(done)
        meter.update(MB)
    [line] = stream.getvalue().splitlines()
    assert line.startswith("x: 1.0 MB in 0.")


def test_bar_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    with Meter(BarProgress(stream), "pulling [x]", 100 * MB, clock=clock) as meter:
        clock.now_s += 2.0
        meter.update(50 * MB)
        clock.now_s += 2.0
        meter.update(100 * MB)
    drawn = stream.getvalue()
    assert "pulling [x]" in drawn
    assert "100.0 MB in 4.0 s, 25.0 MB/s" in drawn
    assert "━" in drawn
    BarProgress(stream).note("a note [not markup]")
    assert stream.getvalue().endswith("a note [not markup]\n")


@pytest.mark.parametrize("make", [LineProgress, BarProgress])
def test_closed_stream_does_not_end_a_transfer(make: type) -> None:
    progress = make(Closed())
    with Meter(progress, "x", 10) as meter:
        meter.update(10)
    progress.note("x")
    progress.close()


def test_which_one_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress_on(Terminal()), BarProgress)
    assert isinstance(progress_on(io.StringIO()), LineProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_on(Terminal()), LineProgress)
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(progress_on(), SilentProgress)


def test_rich_is_imported_only_by_the_bar() -> None:
    check = (
        "import io, sys; from jaxpaged.loading.sources import list_models; from jaxpaged.loading.progress import LineProgress, Meter\n"
        "with Meter(LineProgress(io.StringIO()), 'x') as meter: meter.update(1)\n"
        "heavy = {'rich', 'jax', 'numpy', 'huggingface_hub', 'transformers'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (ran.returncode, ran.stderr) == (0, "")


def test_growth_of_a_folder_is_progress(tmp_path: Path) -> None:
    kept = Kept()
    with Meter(kept, "x", 100) as meter, folder_growth(meter, tmp_path):
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "file").write_bytes(bytes(60))
        (tmp_path / "link").hardlink_to(tmp_path / "deep" / "file")
        for _ in range(100):
            if kept.reports[-1].done_bytes:
                break
            subprocess.run(["sleep", "0.05"], check=True)
    assert kept.reports[-1].done_bytes == 60
    assert folder_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (92_871_040, "92.9 MB"), (16e9, "16.0 GB"), (2e12, "2.0 TB")]
)
def test_bytes_in_words(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (60.0, "1:00"), (3599.6, "1:00:00"), (3725.0, "1:02:05")]
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_report_without_a_total() -> None:
    report = TransferReport(label="x", done_bytes=5, total_bytes=None, rate_bytes_per_s=2.0, eta_s=None, elapsed_s=1.0)
    assert figures(report) == "5 B, 2 B/s"
