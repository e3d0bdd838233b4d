"""Times a start of `jaxpaged generate`, phase by phase, from the start of the process to its end; the phases add up to the wall time."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxpaged.errors import ConfigError

PROMPT = "What is the capital of France? Answer in one sentence."
FIRST_TOKEN = "first token"
OPTIONS = ("--chat", "--quiet", "--max-tokens", "16", "--temperature", "0")

type Mark = tuple[str, float, float]
"""A phase that ends, seconds on the monotonic clock, CPU seconds of the process so far."""


class Run(NamedTuple):
    """One start: phase -> (seconds, CPU seconds), in order, and the peak of the resident memory in MiB."""

    phases: dict[str, tuple[float, float]]
    peak_mib: float

    def total(self, column: int, *, till_token: bool) -> float:
        """Seconds (column 0) or CPU seconds (1) to the first token, or of the whole process."""
        names = list(self.phases)
        names = names[: names.index(FIRST_TOKEN) + 1] if till_token else names
        return sum(self.phases[name][column] for name in names)


def measure(argv: Sequence[str]) -> Run:
    """One start of `jaxpaged generate` with these words behind it, in a process of its own.

    Raises:
        ConfigError: it did not end well; what it said stands on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marks.json"
        begun_s = time.monotonic()
        child = subprocess.Popen([sys.executable, "-m", "jaxpaged.bench.startup", str(path), *argv], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        ended_s = time.monotonic()
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            raise ConfigError(f"the start failed with status {child.returncode}")
        marks: list[Mark] = [*json.loads(path.read_text(encoding="utf-8")), ("exit", ended_s, usage.ru_utime + usage.ru_stime)]
    return Run(ledger(begun_s, marks), usage.ru_maxrss / 1024)


def ledger(begun_s: float, marks: Sequence[Mark]) -> dict[str, tuple[float, float]]:
    """Phase -> (seconds, CPU seconds), which add up to the time from `begun_s` to the last mark; a phase that comes again is one entry."""
    phases: dict[str, tuple[float, float]] = {}
    before_s, before_cpu_s = begun_s, 0.0
    for name, at_s, cpu_s in marks:
        so_far_s, so_far_cpu_s = phases.get(name, (0.0, 0.0))
        phases[name] = (so_far_s + at_s - before_s, so_far_cpu_s + cpu_s - before_cpu_s)
        before_s, before_cpu_s = at_s, cpu_s
    return phases


def table(runs: Sequence[Run]) -> str:
    """Medians by phase, as Markdown."""
    lines = ["| phase | seconds | CPU seconds |", "|---|---|---|"]
    for name in runs[0].phases:
        seconds, cpu_s = (statistics.median(run.phases[name][column] for run in runs) for column in (0, 1))
        lines.append(f"| {name} | {seconds:.2f} | {cpu_s:.2f} |")
    for title, till_token in (("to first token", True), ("whole process", False)):
        seconds, cpu_s = (statistics.median(run.total(column, till_token=till_token) for run in runs) for column in (0, 1))
        lines.append(f"| {title} | {seconds:.2f} | {cpu_s:.2f} |")
    return "\n".join(lines)


def figures(runs: Sequence[Run]) -> dict[str, object]:
    """For JSON."""
    return {
        "startup_times": [run.total(0, till_token=True) for run in runs],
        "median_to_first_token_s": statistics.median(run.total(0, till_token=True) for run in runs),
        "median_process_s": statistics.median(run.total(0, till_token=False) for run in runs),
        "phases": {name: statistics.median(run.phases[name][0] for run in runs) for name in runs[0].phases},
        "peak_mib": max(run.peak_mib for run in runs),
    }


def _run_marked(marks_path: str, argv: list[str]) -> int:
    """The child: `jaxpaged generate` with one more sink. Writes the marks, and returns the exit status."""
    marks: list[Mark] = []

    def mark(name: str) -> None:
        marks.append((name, time.monotonic(), time.process_time()))

    mark("interpreter")
    from jaxpaged import events
    from jaxpaged.cli import build_parser
    from jaxpaged.commands import by_name, generate
    from jaxpaged.commands.engine_start import make_llm

    class PhaseMarks:
        """A sink: a mark wherever something ends."""

        phase = "start"

        def __call__(self, event: events.Event) -> None:
            match event:
                case events.PhaseChanged() if event.phase != self.phase:
                    mark(self.phase)
                    self.phase = event.phase
                case events.EngineStarted():
                    mark(self.phase)
                case events.RequestFirstToken():
                    mark(FIRST_TOKEN)
                case events.RequestFinished():
                    mark("more tokens")

        def close(self) -> None:
            pass

    args = build_parser(by_name()["generate"]).parse(argv)
    mark("options")
    status = generate.run(args, lambda config, sinks: make_llm(config, (*sinks, PhaseMarks())))
    mark("close")
    Path(marks_path).write_text(json.dumps(marks), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(_run_marked(sys.argv[1], sys.argv[2:]))
