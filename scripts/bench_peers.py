"""Runs jaxpaged and other engines on the same workloads, by turns, and tells medians, quartiles and ratios.

    scripts/peers/setup.sh FOLDER
    python scripts/bench_peers.py FOLDER --rounds-file rounds.jsonl --markdown table.md

Every engine is started once and stays; in each round each of them runs each workload, in another order. Requests are greedy, run to
their full lengths and are handed over all at once, as token ids; prompts change from round to round, so that no cache helps but within a
workload. A ratio is made of runs of the same round; a goal is met when the lower quartile of its ratios meets it. Each whole round is
added to the rounds file at once, and a later call with the same file goes on where it ends. An engine that fails is named and left out
from then on; the exit status is 1 then. Nothing else should run on the machine: what other processes took is told. Five rounds of all
engines take about 20 minutes on 2 cores.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from peers import engines as peers
from peers.engine_process import EngineFailed, EngineProcess

from jaxpaged.bench import workloads

MIN_ROUNDS = 5
WARM_UP_SEED = 1_000
Runs = dict[str, dict[str, dict[str, float]]]
"""Workload -> engine -> what it told."""


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


class Round(NamedTuple):
    """All engines, each on its workloads, once."""

    seed: int
    runs: Runs
    seconds: float
    other_cpu_s: float
    """CPU seconds of processes that are no part of this run."""
    idle_cpu_s: dict[str, float]
    """Engine -> CPU seconds it took while others had their turn."""


def one_round(started: dict[str, EngineProcess], plan: Mapping[str, Sequence[str]], seed: int, failed: dict[str, str]) -> Round:
    """Runs engine after engine on each workload; one that fails leaves `started` for `failed`.

    Args:
        plan: engine -> its workloads.
    """
    order = list(started)
    random.Random(seed).shuffle(order)
    before = {name: engine.cpu_s() - engine.working_cpu_s for name, engine in started.items()}
    num_started = len(started)
    began_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s(started)
    runs: Runs = {}
    for workload in dict.fromkeys(name for names in plan.values() for name in names):
        jobs = workloads.make(workload, seed=seed)
        for name in order:
            if name in started and workload in plan[name]:
                try:
                    told = started[name].run([{"prompt": job.prompt, "max_tokens": job.num_output} for job in jobs])
                except EngineFailed as error:
                    _leave_out(started, name, error, failed)
                    continue
                runs.setdefault(workload, {})[name] = told
                sys.stderr.write(f"  {workload} {name}: {told['tokens'] / told['seconds']:.1f} tokens/s\n")
    idle = {name: engine.cpu_s() - engine.working_cpu_s - before[name] for name, engine in started.items()}
    other_s = max(0.0, _busy_s() - busy_s - (_own_s(started) - own_s))
    if len(started) < num_started:
        other_s = 0.0  # Nobody knows any more what was that engine's.
    return Round(seed, runs, time.monotonic() - began_s, other_s, idle)


def _leave_out(started: dict[str, EngineProcess], name: str, error: EngineFailed, failed: dict[str, str]) -> None:
    failed[name] = str(error)
    sys.stderr.write(f"{name} is left out from now on: {error}\n")
    if name in started:
        started.pop(name).close()


def _busy_s() -> float:
    """CPU seconds of everything on this machine since it came up."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own_s(started: Mapping[str, EngineProcess]) -> float:
    return time.process_time() + sum(engine.cpu_s() for engine in started.values())


def read_rounds(file: Path) -> tuple[list[Round], dict[str, dict[str, Any]]]:
    """The whole rounds of a rounds file, and the facts of their engines: those of the last start."""
    rounds: list[Round] = []
    facts: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            read = json.loads(line)
        except json.JSONDecodeError:
            continue  # Cut off while it was written.
        rounds.append(Round(**{name: read[name] for name in Round._fields}))
        facts |= read["engines"]
    return rounds, facts


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def told(rounds: Sequence[Round], workload: str, engine: str) -> dict[int, dict[str, float]]:
    """Seed -> what the engine told of the workload, for the rounds in which it did."""
    return {number.seed: number.runs[workload][engine] for number in rounds if engine in number.runs.get(workload, {})}


def speeds(runs: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Seed -> output tokens per second."""
    return {seed: run["tokens"] / run["seconds"] for seed, run in runs.items()}


def judge(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The goals whose engines and workloads were measured in the same rounds, with the quartiles of the ratio."""
    judged = []
    for goal in GOALS:
        ours, peer = (speeds(told(rounds, goal.workload, name)) for name in (goal.ours, goal.peer))
        if both := ours.keys() & peer.keys():
            low, middle, high = quartiles([ours[seed] / peer[seed] for seed in sorted(both)])
            verdict = {"ratio": [low, middle, high], "rounds": len(both), "is_met": low >= goal.least, "is_aim_met": low >= goal.aim}
            judged.append({**goal._asdict(), **verdict})
    return judged


def report(rounds: Sequence[Round], facts: Mapping[str, Mapping[str, Any]], judged: Sequence[Mapping[str, Any]]) -> str:
    """Tables in Markdown."""
    names = list(dict.fromkeys(name for number in rounds for name in number.runs))
    head = "".join(f" `{name}`, output tokens/s | first token, s |" for name in names)
    lines = [f"| engine | precision |{head} ready after, s | peak memory, MB |", "|---|---|" + "---|" * (2 * len(names) + 2)]
    for engine, fact in facts.items():
        cells = []
        for name in names:
            runs = told(rounds, name, engine)
            if not runs:
                cells.append("- | -")
                continue
            low, middle, high = quartiles(list(speeds(runs).values()))
            first_s = statistics.median(run["ttft_s"] for run in runs.values())
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f}) | {first_s:.2f}")
        ends = f"{fact['ready_s']:.1f} | {fact['peak_rss_bytes'] / 1e6:.0f}"
        lines.append(f"| {engine} ({fact['version']}) | {fact['precision']} | {' | '.join(cells)} | {ends} |")
    lines += ["", "| workload | ours | against | ratio of the same rounds | at least | aim | |", "|---|---|---|---|---|---|---|"]
    for goal in judged:
        low, middle, high = goal["ratio"]
        missed = f"missed: the lower quartile is {1 - low / goal['least']:.0%} short"
        verdict = "aim met" if goal["is_aim_met"] else "met" if goal["is_met"] else missed
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| `{goal['workload']}` | {goal['ours']} | {goal['peer']} | {ratio} | {goal['least']} | {goal['aim']} | {verdict} |")
    return "\n".join(lines)


def conditions(rounds: Sequence[Round], cores: int, failed: Mapping[str, str]) -> str:
    """A sentence each on the day, the machine, how quiet it was, and what is missing."""
    info = Path("/proc/cpuinfo").read_text()
    line = next((line for line in info.splitlines() if line.startswith("model name")), ": a processor without a name")
    flags = [flag for flag in ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if f" {flag}" in info]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    seconds = sum(number.seconds for number in rounds)
    other = sum(number.other_cpu_s for number in rounds) / (seconds * cores)
    idle: dict[str, float] = {}
    for number in rounds:
        for name, took_s in number.idle_cpu_s.items():
            idle[name] = idle.get(name, 0.0) + took_s
    worst = max(idle, key=lambda name: idle[name])
    waiting = f"engines waiting for their turn at most {idle[worst] / (seconds * cores):.1%} ({worst})"
    parts = [
        f"{time.strftime('%Y-%m-%d')}, {cores} cores of {line.split(':', 1)[1].strip()} ({', '.join(flags)}), {memory_gib:.0f} GiB.",
        f"{len(rounds)} rounds by turns in {seconds / 60:.0f} minutes; medians, quartiles in brackets.",
        f"Other processes took {other:.1%} of the cores' time, {waiting}.",
        *(f"Left out: {error}." for error in failed.values()),
    ]
    return "\n".join(parts)


def _add_round(file: Path, number: Round, facts: Mapping[str, Mapping[str, Any]]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({**number._asdict(), "engines": facts}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what peers/setup.sh made")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="all in all, those of the rounds file included")
    parser.add_argument("--workloads", default=",".join(peers.WORKLOADS))
    parser.add_argument("--engines", help="names, with commas between them (default: those of the goals)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds-file", type=Path, help="JSON lines; whole rounds are added, and those that are there are kept")
    parser.add_argument("--markdown", type=Path, help="where the tables go too, to be pasted into docs/benchmarks.md")
    parser.add_argument("--output-json", type=Path, help="where the last line goes too")
    args = parser.parse_args()
    known = peers.known(args.folder.resolve(), args.threads)
    wanted = args.engines.split(",") if args.engines else [name for name, engine in known.items() if engine.is_default]
    if unknown := set(wanted) - set(known):
        parser.error(f"there is no engine {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    asked = args.workloads.split(",")
    plan = {name: [workload for workload in asked if workload in known[name].workloads or args.engines] for name in wanted}
    rounds, facts = read_rounds(args.rounds_file) if args.rounds_file else ([], {})
    if not set(facts) <= set(wanted):
        parser.error(f"{args.rounds_file} has rounds of other engines ({', '.join(facts)})")
    logs = args.folder / "logs"
    logs.mkdir(exist_ok=True)
    started: dict[str, EngineProcess] = {}
    failed: dict[str, str] = {}
    try:
        for name in wanted if len(rounds) < args.rounds else ():
            try:
                started[name] = EngineProcess(name, known[name].command, logs)
            except EngineFailed as error:
                _leave_out(started, name, error, failed)
                continue
            sys.stderr.write(f"{name} is ready after {started[name].facts['ready_s']:.1f} s: {started[name].facts['version']}\n")
        if started:
            sys.stderr.write("a round that does not count\n")
            one_round(started, {name: plan[name] if name not in peers.SLOW else [] for name in started}, WARM_UP_SEED, failed)
        for seed in range(len(rounds), args.rounds):
            sys.stderr.write(f"round {seed + 1} of {args.rounds}\n")
            number = one_round(started, plan, seed, failed)
            for name, engine in started.items():
                facts[name] = {**engine.facts, "precision": known[name].precision, "peak_rss_bytes": engine.peak_rss_bytes()}
            rounds.append(number)
            if args.rounds_file:
                _add_round(args.rounds_file, number, facts)
            sys.stderr.write(f"  {number.seconds:.0f} s; about {(args.rounds - seed - 1) * number.seconds / 60:.0f} minutes more\n")
    finally:
        for engine in started.values():
            engine.close()
    judged = judge(rounds)
    facts = {name: facts[name] for name in wanted if name in facts}
    text = f"{conditions(rounds, args.threads, failed)}\n\n{report(rounds, facts, judged)}"
    line = json.dumps({"benchmark": "peers", "engines": facts, "goals": judged, "rounds": [number._asdict() for number in rounds]})
    print(text)
    print(line)
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    if args.output_json:
        args.output_json.write_text(line + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
