"""Times a start of `jaxpaged generate`, phase by phase, from the start of the process to its end; the phases add up to the wall time.

    python scripts/bench_startup.py [--runs 5] [--model NAME] [-- any option of `jaxpaged generate`]

Each run is a process of its own with the caches as they are, so that all but the first of a new cache folder (`JAXPAGED_HOME`) are
warm. Printed are medians of the seconds on the clock and of the CPU seconds (user and system, all threads) that each phase took; what
runs at the same time as a phase counts to it. `make`: what `make demo` does before that process starts, where there is a `.venv`.
The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PROMPT = "What is the capital of France? Answer in one sentence."
FIRST_TOKEN = "first token"

type Mark = tuple[str, float, float]
"""A phase that ends, seconds on the monotonic clock, CPU seconds of the process so far."""


def run_marked(marks_path: str, argv: list[str]) -> int:
    """The child: `jaxpaged generate` with one more sink. Writes the marks, and returns the exit status."""
    marks: list[Mark] = []

    def mark(name: str) -> None:
        marks.append((name, time.monotonic(), time.process_time()))

    mark("interpreter")
    from jaxpaged import events
    from jaxpaged.cli import build_parser
    from jaxpaged.commands import by_name, generate
    from jaxpaged.commands.engine_start import make_llm

    phase = "start"

    def sink(event: events.Event) -> None:
        nonlocal phase
        match event:
            case events.PhaseChanged() if event.phase != phase:
                mark(phase)
                phase = event.phase
            case events.EngineStarted():
                mark(phase)
            case events.RequestFirstToken():
                mark(FIRST_TOKEN)
            case events.RequestFinished():
                mark("more tokens")

    args = build_parser(by_name()["generate"]).parse(argv)
    mark("options")
    status = generate.run(args, lambda config, sinks: make_llm(config, (*sinks, sink)))
    mark("close")
    Path(marks_path).write_text(json.dumps(marks), encoding="utf-8")
    return status


def measure(argv: list[str]) -> dict[str, Any]:
    """One start: phase -> (seconds, CPU seconds), and the peak of the resident memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marks.json"
        begun_s = time.monotonic()
        child = subprocess.Popen([sys.executable, __file__, "--child", str(path), *argv], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        ended_s = time.monotonic()
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            raise SystemExit(f"the start failed with status {child.returncode}")
        marks: list[Mark] = [*json.loads(path.read_text(encoding="utf-8")), ("exit", ended_s, usage.ru_utime + usage.ru_stime)]
    phases: dict[str, tuple[float, float]] = {}
    before_s, before_cpu_s = begun_s, 0.0
    for name, at_s, cpu_s in marks:
        phases[name] = (at_s - before_s, cpu_s - before_cpu_s)
        before_s, before_cpu_s = at_s, cpu_s
    return {"phases": phases, "peak_mib": usage.ru_maxrss / 1024}


def make_overhead_s() -> float | None:
    """Seconds of `make` and its look at the environment; None where there is none that is ready."""
    if not (ROOT / ".venv" / ".jaxpaged-stamp").is_file():
        return None
    begun_s = time.monotonic()
    subprocess.run(["make", "--silent", "setup"], cwd=ROOT, check=True)
    return time.monotonic() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("options", nargs="*", help="options of `jaxpaged generate`, after --")
    args = parser.parse_args()
    argv = ["--chat", "--quiet", "--max-tokens", "16", "--temperature", "0", "--model", args.model, *args.options, "--", PROMPT]
    overhead_s = make_overhead_s()
    runs = [measure(argv) for _ in range(args.runs)]
    names = list(runs[0]["phases"])
    table = {name: [statistics.median(run["phases"][name][column] for run in runs) for column in (0, 1)] for name in names}
    till_token = names.index(FIRST_TOKEN) + 1
    totals = {
        "to first token": [[sum(run["phases"][name][column] for name in names[:till_token]) for run in runs] for column in (0, 1)],
        "whole process": [[sum(run["phases"][name][column] for name in names) for run in runs] for column in (0, 1)],
    }
    print("| phase | seconds | CPU seconds |\n|---|---|---|")
    for name, (seconds, cpu_s) in table.items():
        print(f"| {name} | {seconds:.2f} | {cpu_s:.2f} |")
    for name, (seconds_of, cpu_of) in totals.items():
        print(f"| {name} | {statistics.median(seconds_of):.2f} | {statistics.median(cpu_of):.2f} |")
    if overhead_s is not None:
        print(f"| make, before it | {overhead_s:.2f} | |")
    result = {"benchmark": "startup", **vars(args), "make_s": overhead_s, "phases": table, "rows": runs}
    print(json.dumps(result | {name.replace(" ", "_"): [statistics.median(values) for values in both] for name, both in totals.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(run_marked(sys.argv[2], sys.argv[3:]))
    main()
