"""Tests of scripts/bench_peers.py with engines that answer by a script; real ones are never started here."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

ENGINE = """
import os, sys
sys.path.insert(0, {drivers!r})
from protocol import claim_output, serve

pipe = claim_output()
os.write(1, b"noise of a library in C\\n")
print("noise of a library")
workloads = 0

def run(requests):
    global workloads
    workloads += 1
    if workloads > {lives}:
        raise SystemExit("no more")
    tokens = sum(request["max_tokens"] for request in requests)
    return {{"tokens": tokens - {missing}, "seconds": tokens / {speed}, "ttft_s": 0.5}}

serve(pipe, "scripted 1", run)
"""
REQUESTS = [{"prompt": [5, 6, 7], "max_tokens": 128}]


@pytest.fixture
def bench_peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_peers")


def engine(folder: Path, name: str, *, speed: float, missing: int = 0, lives: int = 1_000) -> list[str]:
    """A command for an engine of this many tokens per second, which may forget some or end after so many workloads (one at its start)."""
    program = folder / f"{name}.py"
    program.write_text(ENGINE.format(drivers=str(SCRIPTS / "peers"), speed=speed, missing=missing, lives=lives))
    return [sys.executable, str(program)]


def rounds_of(bench_peers: ModuleType, *ratios: float) -> list[Any]:
    """Rounds in which int8 makes so many times the tokens of llama.cpp on b1."""
    return [
        bench_peers.Round(
            seed,
            {
                "b1": {
                    "int8": {"tokens": 100 * ratio, "seconds": 1.0, "ttft_s": 0.1, "cpu_s": 1.0},
                    "llama.cpp-q8_0": {"tokens": 100, "seconds": 1.0, "ttft_s": 0.1, "cpu_s": 1.0},
                }
            },
            seconds=2.0,
            other_cpu_s=0.4,
            idle_cpu_s={"int8": 0.0, "llama.cpp-q8_0": 0.08},
        )
        for seed, ratio in enumerate(ratios)
    ]


def run_main(bench_peers: ModuleType, monkeypatch: pytest.MonkeyPatch, commands: dict[str, list[str]], *arguments: str) -> int:
    """Exit status of the script with these engines instead of the real ones."""
    known = {
        name: bench_peers.peers.Engine(command, "of a script", ("mixed16",) if name in bench_peers.peers.SLOW else ("b1", "mixed16"), True)
        for name, command in commands.items()
    }
    monkeypatch.setattr(bench_peers.peers, "known", lambda folder, threads: known)
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_peers.main()
    return int(ended.value.code or 0) if not isinstance(ended.value.code, str) else 1


def test_engines_take_turns_and_what_was_measured_is_kept(bench_peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"int8": 250.0, "vllm-bfloat16": 100.0, "transformers-static": 20.0}
    commands = {name: engine(tmp_path, name, speed=speed) for name, speed in speeds.items()}
    file, table, summary = tmp_path / "rounds.jsonl", tmp_path / "table.md", tmp_path / "summary.json"
    arguments = [
        str(tmp_path),
        "--rounds-file",
        str(file),
        "--markdown",
        str(table),
        "--output-json",
        str(summary),
        "--workloads",
        "b1,mixed16",
    ]
    assert run_main(bench_peers, monkeypatch, commands, *arguments, "--rounds", "2") == 0
    first = file.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in first] == [0, 1]
    # A third round goes on where a cut line is; then nothing is left to do, and no engine is started.
    file.write_text("\n".join([*first, first[0][:50]]) + "\n")
    assert run_main(bench_peers, monkeypatch, commands, *arguments, "--rounds", "3") == 0
    assert [json.loads(line)["seed"] for line in file.read_text().splitlines() if line.endswith("}")] == [0, 1, 2]
    dead = {name: ["false"] for name in commands}
    assert run_main(bench_peers, monkeypatch, dead, *arguments, "--rounds", "3") == 0
    text = table.read_text()
    assert "| int8 (scripted 1) | of a script | 250.0 (250.0 to 250.0) | 0.50 | 250.0 (250.0 to 250.0) | 0.50 |" in text
    assert "| transformers-static (scripted 1) | of a script | - | - | 20.0 (20.0 to 20.0) | 0.50 |" in text
    assert "| `b1` | int8 | vllm-bfloat16 | 2.50 (2.50 to 2.50) | 2.2 | 2.8 | met |" in text
    assert "| `mixed16` | int8 | transformers-static | 12.50 (12.50 to 12.50) | 10.0 | 14.0 | met |" in text
    assert "3 rounds by turns" in text
    told = json.loads(summary.read_text())
    assert all(fact["ready_s"] > 0 and fact["peak_rss_bytes"] > 1e6 for fact in told["engines"].values())
    assert all(number["other_cpu_s"] >= 0 and number["seconds"] > 0 for number in told["rounds"])
    # Rounds of other engines are no part of this run.
    assert run_main(bench_peers, monkeypatch, {"int8": commands["int8"]}, *arguments) == 2


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    bench_peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {
        "int8": engine(tmp_path, "int8", speed=250.0),
        "vllm-bfloat16": engine(tmp_path, "vllm-bfloat16", speed=100.0, lives=3),  # its start, the round that does not count, one round
        "llama.cpp-q8_0": [sys.executable, "-c", "raise SystemExit('no model')"],
    }
    assert run_main(bench_peers, monkeypatch, commands, str(tmp_path), "--rounds", "2", "--workloads", "b1") == 1
    printed = capsys.readouterr().out
    assert "Left out: llama.cpp-q8_0 ended; its last words are in" in printed
    assert "Left out: vllm-bfloat16 ended" in printed
    last = json.loads(printed.splitlines()[-1])
    assert [sorted(number["runs"]["b1"]) for number in last["rounds"]] == [["int8", "vllm-bfloat16"], ["int8"]]
    assert [(goal["peer"], goal["rounds"]) for goal in last["goals"]] == [("vllm-bfloat16", 1)]
    assert "no model" in (tmp_path / "logs" / "llama.cpp-q8_0.log").read_text()


def test_one_bad_round_of_five_does_not_fail_a_goal_but_two_do(bench_peers: ModuleType) -> None:
    assert bench_peers.judge(rounds_of(bench_peers, 0.5, 1.2, 1.2, 1.2, 1.2))[0]["is_met"]
    assert not bench_peers.judge(rounds_of(bench_peers, 0.5, 0.5, 1.2, 1.2, 1.2))[0]["is_met"]


def test_conditions_tell_what_others_took(bench_peers: ModuleType) -> None:
    text = bench_peers.conditions(rounds_of(bench_peers, 1.0, 1.0), 2, {})
    assert "Other processes took 10.0% of the cores' time, engines waiting for their turn at most 2.0% (llama.cpp-q8_0)." in text


def test_an_engine_that_forgets_tokens_fails(bench_peers: ModuleType, tmp_path: Path) -> None:
    forgetful = bench_peers.EngineProcess("forgetful", engine(tmp_path, "forgetful", speed=1.0, missing=1), tmp_path)
    with pytest.raises(bench_peers.EngineFailed, match="made 127 tokens of 128"):
        forgetful.run(REQUESTS)
    forgetful.close()


def test_cpu_time_of_a_turn_and_of_waiting_are_told_apart(bench_peers: ModuleType, tmp_path: Path) -> None:
    process = bench_peers.EngineProcess("int8", engine(tmp_path, "int8", speed=1.0), tmp_path)
    started_s = process.cpu_s()
    told = process.run(REQUESTS)
    assert started_s > 0
    assert told["cpu_s"] == process.working_cpu_s >= 0
    assert process.peak_rss_bytes() > 1e6
    process.close()
    assert process.cpu_s() == 0


def test_each_engine_of_a_goal_can_be_started(bench_peers: ModuleType, tmp_path: Path) -> None:
    known = bench_peers.peers.known(tmp_path, 2)
    for goal in bench_peers.GOALS:
        for name in (goal.ours, goal.peer):
            assert known[name].is_default
            assert goal.workload in known[name].workloads
    for each in known.values():
        assert Path(each.command[1]).is_file()
        assert each.precision
