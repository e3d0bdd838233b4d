"""Tests of scripts/bench_peers.py with engines that answer by a script; real ones are never started here."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxpaged.bench import workloads

SCRIPTS = Path(__file__).parents[2] / "scripts"

ENGINE = """
import os, sys
sys.path.insert(0, {drivers!r})
from protocol import claim_output, serve

pipe = claim_output()
os.write(1, b"noise of a library in C\\n")
print("noise of a library")

def run(requests):
    tokens = sum(request["max_tokens"] for request in requests)
    return {{"tokens": tokens - {missing}, "seconds": tokens / {speed}, "ttft_s": 0.5}}

serve(pipe, "scripted 1", run)
"""


@pytest.fixture
def bench_peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_peers")


def engine(folder: Path, name: str, *, speed: float, missing: int = 0) -> list[str]:
    """A command for an engine of this many tokens per second, which may forget some."""
    program = folder / f"{name}.py"
    program.write_text(ENGINE.format(drivers=str(SCRIPTS / "peers"), speed=speed, missing=missing))
    return [sys.executable, str(program)]


def test_engines_take_turns_and_goals_are_judged_by_the_lower_quartile(bench_peers: ModuleType, tmp_path: Path) -> None:
    speeds = {"int8": 250.0, "vllm-bfloat16": 100.0, "llama.cpp-q8_0": 300.0}
    engines = {name: bench_peers.EngineProcess(name, engine(tmp_path, name, speed=speed), tmp_path) for name, speed in speeds.items()}
    runs = bench_peers.measure(engines, ["b1"], rounds=3)
    facts = {name: {**process.facts, "peak_rss_bytes": process.peak_rss_bytes()} for name, process in engines.items()}
    for process in engines.values():
        process.close()
    judged = {goal["peer"]: goal for goal in bench_peers.judge(runs)}
    assert judged["vllm-bfloat16"]["ratio"] == pytest.approx([2.5] * 3)
    assert (judged["vllm-bfloat16"]["is_met"], judged["vllm-bfloat16"]["is_aim_met"]) == (True, False)
    assert judged["llama.cpp-q8_0"]["is_met"] is False
    assert all(fact["ready_s"] > 0 and fact["peak_rss_bytes"] > 1e6 and fact["version"] == "scripted 1" for fact in facts.values())
    table = bench_peers.report(runs, facts, list(judged.values()))
    assert "| int8 | 250.0 (250.0 to 250.0) | 0.50 |" in table
    assert "2.50 (2.50 to 2.50) | 2.2 | 2.8 | met |" in table
    assert "| missed |" in table


def test_one_bad_round_of_four_does_not_fail_a_goal_but_two_do(bench_peers: ModuleType) -> None:
    def runs(*ratios: float) -> dict[str, dict[str, list[dict[str, float]]]]:
        ours = [{"tokens": 100 * ratio, "seconds": 1.0, "ttft_s": 0.1} for ratio in ratios]
        return {"b1": {"int8": ours, "llama.cpp-q8_0": [{"tokens": 100, "seconds": 1.0, "ttft_s": 0.1}] * len(ours)}}

    assert bench_peers.judge(runs(0.5, 1.2, 1.2, 1.2, 1.2))[0]["is_met"]
    assert not bench_peers.judge(runs(0.5, 0.5, 1.2, 1.2, 1.2))[0]["is_met"]


def test_an_engine_that_forgets_tokens_or_dies_ends_the_run(bench_peers: ModuleType, tmp_path: Path) -> None:
    jobs = workloads.make("b1")
    forgetful = bench_peers.EngineProcess("forgetful", engine(tmp_path, "forgetful", speed=1.0, missing=1), tmp_path)
    with pytest.raises(SystemExit, match="made 127 tokens of 128"):
        forgetful.run(jobs)
    forgetful.close()
    with pytest.raises(SystemExit, match="dead ended; its last words are in"):
        bench_peers.EngineProcess("dead", [sys.executable, "-c", "raise SystemExit('no model')"], tmp_path)
    assert "no model" in (tmp_path / "dead.log").read_text()


def test_each_engine_of_a_goal_can_be_started(bench_peers: ModuleType, tmp_path: Path) -> None:
    known = bench_peers.commands(tmp_path, 2)
    assert {name for goal in bench_peers.GOALS for name in (goal.ours, goal.peer)} <= set(known)
    for command in known.values():
        assert Path(command[1]).is_file()
