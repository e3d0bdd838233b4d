"""Times `make`'s look at the environment and then starts of `jaxpaged generate`, phase by phase: see `jaxpaged.bench.startup`.

    python scripts/bench_startup.py [--runs 5] [--model NAME] [-- any option of `jaxpaged generate`]

Each run is a process of its own with the caches as they are, so that all but the first of a new cache folder (`JAXPAGED_HOME`) are
warm. Printed are medians of the seconds on the clock and of the CPU seconds (user and system, all threads) that each phase took; what
runs at the same time as a phase counts to it. `make`: what `make demo` does before that process starts, where there is a `.venv`.
`--help` is timed as often: it should answer within 0.2 s. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.bench import startup

ROOT = Path(__file__).parent.parent


def make_overhead_s() -> float | None:
    """Seconds of `make` and its look at the environment; None where there is none that is ready."""
    if not (ROOT / ".venv" / ".jaxpaged-stamp").is_file():
        return None
    begun_s = time.monotonic()
    subprocess.run(["make", "--silent", "setup"], cwd=ROOT, check=True)
    return time.monotonic() - begun_s


def help_seconds(num_runs: int) -> dict[str, float]:
    """Medians of what `jaxpaged --help` takes: on the clock, and of the processor."""
    wall, cpu = [], []
    for _ in range(num_runs):
        begun_s, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-m", "jaxpaged", "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        wall.append(time.monotonic() - begun_s)
        cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu)}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("options", nargs="*", help="options of `jaxpaged generate`, after --")
    args = parser.parse_args()
    overhead_s = make_overhead_s()
    runs = [startup.measure([*startup.OPTIONS, "--model", args.model, *args.options, "--", startup.PROMPT]) for _ in range(args.runs)]
    print(startup.table(runs))
    if overhead_s is not None:
        print(f"| make, before it | {overhead_s:.2f} | |")
    help_s = help_seconds(max(args.runs, 1))
    print("| --help | {wall_s:.2f} | {cpu_s:.2f} |".format(**help_s))
    print(json.dumps({"benchmark": "startup", **vars(args), "make_s": overhead_s, "help": help_s, **startup.figures(runs)}))


if __name__ == "__main__":
    main()
