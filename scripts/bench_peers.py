"""Runs jaxpaged and other engines on the same workloads, by turns, and tells medians, quartiles and ratios.

    scripts/peers/setup.sh FOLDER
    python scripts/bench_peers.py FOLDER [--rounds 5] [--workloads b1,mixed16,prefix16] [--engines int8,vllm-bfloat16] [--output-json FILE]

Every engine is started once and stays; in each round each of them runs each workload, in another order. Requests are greedy, run to
their full lengths and are handed over all at once; prompts change from round to round, so that no cache helps but within a workload. A
ratio is made of runs of the same round; a goal is met when the lower quartile of its ratios meets it. A table of the goals and one JSON
line come last. Nothing else should run on the machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.bench import workloads

MIN_ROUNDS = 5
WARM_UP_SEED = 1_000
END_LIMIT_S = 30
OURS = {
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8-xla": {"quantization": "int8", "kernels": {"quantized_matmul": "xla"}},
}
"""Name -> arguments of `LLM`."""


class Goal(NamedTuple):
    """`ours` makes at least `least` (and hopefully `aim`) times the output tokens per second of `peer` on `workload`."""

    workload: str
    ours: str
    peer: str
    least: float
    aim: float


GOALS = (
    Goal("b1", "int8", "vllm-bfloat16", 2.2, 2.8),
    Goal("b1", "int8", "llama.cpp-q8_0", 1.0, 1.3),
    Goal("b1", "int8", "llama.cpp-q4_0", 0.8, 1.0),
    Goal("mixed16", "int8", "vllm-bfloat16", 1.15, 1.6),
    Goal("mixed16", "int8", "llama.cpp-q8_0", 2.3, 3.0),
    Goal("mixed16", "int8", "transformers-static", 10.0, 14.0),
    Goal("mixed16", "int8", "transformers-continuous", 4.0, 6.0),
    Goal("prefix16", "int8", "vllm-bfloat16", 1.15, 1.5),
    Goal("mixed16", "bfloat16", "vllm-bfloat16", 0.8, 1.0),
    Goal("mixed16", "int8-xla", "vllm-bfloat16", 0.45, 0.6),
)


def commands(folder: Path, threads: int) -> dict[str, list[str]]:
    """Engine -> how its process is started."""
    drivers = Path(__file__).parent / "peers"
    server, models, count = str(folder / "llama.cpp/build/bin/llama-server"), folder / "models", str(threads)
    made = {
        name: [sys.executable, str(drivers / "ours.py"), json.dumps({"cpu": {"threads": threads}, **options})]
        for name, options in OURS.items()
    }
    for kind in ("q8_0", "q4_0", "q4_1"):
        made[f"llama.cpp-{kind}"] = [sys.executable, str(drivers / "llama_server.py"), server, str(models / f"{kind}.gguf"), count]
    vllm = [str(folder / "vllm/bin/python"), str(drivers / "vllm_cpu.py"), str(models / "bfloat16"), "bfloat16", count]
    made["vllm-bfloat16"], made["vllm-bfloat16-eager"] = vllm, [*vllm, "--eager"]
    for kind in ("static", "continuous"):
        python = str(folder / "transformers/bin/python")
        made[f"transformers-{kind}"] = [python, str(drivers / "hf_transformers.py"), str(models / "bfloat16"), "bfloat16", count, kind]
    return made


class EngineProcess:
    """An engine in a process of its own, which speaks as peers/protocol.py says."""

    def __init__(self, name: str, command: Sequence[str], log_folder: Path) -> None:
        self.log = log_folder / f"{name}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.facts = self._next()

    def run(self, jobs: Sequence[workloads.Job]) -> dict[str, float]:
        """Seconds, tokens and mean seconds to the first token of one workload."""
        assert self._process.stdin is not None
        requests = [{"prompt": job.prompt, "max_tokens": job.num_output} for job in jobs]
        self._process.stdin.write(json.dumps({"requests": requests}) + "\n")
        self._process.stdin.flush()
        told = self._next()
        wanted = sum(job.num_output for job in jobs)
        if told["tokens"] != wanted:
            raise SystemExit(f"{self.log.stem} made {told['tokens']} tokens of {wanted}")
        return told

    def peak_rss_bytes(self) -> int:
        """Highest resident memory of the process and its children, each by itself, added up."""
        return sum(_peak(pid) for pid in _family(self._process.pid))

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"{self.log.stem} ended; its last words are in {self.log}")
        return dict(json.loads(line))


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in _family(int(child)))]


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def measure(engines: dict[str, EngineProcess], names: Sequence[str], rounds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Workload -> engine -> a run of each round."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {engine: [] for engine in engines} for name in names}
    for number in range(-1, rounds):
        order = list(engines)
        random.Random(number).shuffle(order)
        for name in names:
            jobs = workloads.make(name, seed=WARM_UP_SEED if number < 0 else number)
            for engine in order:
                made = engines[engine].run(jobs)
                if number >= 0:
                    runs[name][engine].append(made)
                    speed = made["tokens"] / made["seconds"]
                    sys.stderr.write(f"round {number + 1} of {rounds}, {name}, {engine}: {speed:.1f} tokens/s\n")
    return runs


def speeds(runs: Sequence[dict[str, float]]) -> list[float]:
    """Output tokens per second of each run."""
    return [run["tokens"] / run["seconds"] for run in runs]


def judge(runs: dict[str, dict[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """The goals whose engines and workloads were measured, with the quartiles of the ratio."""
    judged = []
    for goal in GOALS:
        measured = runs.get(goal.workload, {})
        if goal.ours in measured and goal.peer in measured:
            pairs = zip(speeds(measured[goal.ours]), speeds(measured[goal.peer]), strict=True)
            low, middle, high = quartiles([ours / peer for ours, peer in pairs])
            judged.append({**goal._asdict(), "ratio": [low, middle, high], "is_met": low >= goal.least, "is_aim_met": low >= goal.aim})
    return judged


def report(runs: dict[str, dict[str, list[dict[str, float]]]], facts: dict[str, dict[str, Any]], judged: Sequence[dict[str, Any]]) -> str:
    """Tables in Markdown."""
    names = list(runs)
    head = "".join(f" {name}: tokens/s (quartiles) | first token, s |" for name in names)
    lines = [f"| engine |{head} ready after, s | peak memory, MB |", "|---|" + "---|" * (2 * len(names) + 2)]
    for engine, fact in facts.items():
        cells = []
        for name in names:
            low, middle, high = quartiles(speeds(runs[name][engine]))
            first_s = statistics.median(run["ttft_s"] for run in runs[name][engine])
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f}) | {first_s:.2f}")
        lines.append(f"| {engine} | {' | '.join(cells)} | {fact['ready_s']:.1f} | {fact['peak_rss_bytes'] / 1e6:.0f} |")
    lines += ["", "| workload | ours | against | ratio (quartiles) | at least | aim | |", "|---|---|---|---|---|---|---|"]
    for goal in judged:
        low, middle, high = goal["ratio"]
        verdict = "aim met" if goal["is_aim_met"] else "met" if goal["is_met"] else "missed"
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {goal['workload']} | {goal['ours']} | {goal['peer']} | {ratio} | {goal['least']} | {goal['aim']} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what peers/setup.sh made")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--workloads", default="b1,mixed16,prefix16")
    parser.add_argument("--engines", help="names, with commas between them (default: all)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    known = commands(args.folder.resolve(), args.threads)
    wanted = args.engines.split(",") if args.engines else list(known)
    if unknown := set(wanted) - set(known):
        parser.error(f"there is no engine {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    logs = args.folder / "logs"
    logs.mkdir(exist_ok=True)
    engines: dict[str, EngineProcess] = {}
    try:
        for name in wanted:
            engines[name] = EngineProcess(name, known[name], logs)
            sys.stderr.write(f"{name} is ready after {engines[name].facts['ready_s']:.1f} s: {engines[name].facts['version']}\n")
        runs = measure(engines, args.workloads.split(","), args.rounds)
        facts = {name: {**engine.facts, "peak_rss_bytes": engine.peak_rss_bytes()} for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()
    judged = judge(runs)
    line = json.dumps({"benchmark": "peers", "rounds": args.rounds, "engines": facts, "goals": judged, "runs": runs})
    print(report(runs, facts, judged))
    print(line)
    if args.output_json:
        args.output_json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
