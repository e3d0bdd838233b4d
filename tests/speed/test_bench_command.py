"""`jaxpaged bench`: kinds in this process over a scripted device, and flags that have no meaning to a kind."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged.bench import floor
from jaxpaged.commands import bench
from jaxpaged.config import Config
from jaxpaged.events import Sink
from jaxpaged.tokenizer import Tokenizer
from tests.cli.scripted_engine import Result, run_cli
from tests.server.scripted_llm import script_runner, start_scripted
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax


class ScriptedLlm:
    """An engine over a scripted device, as `LLM` holds it."""

    def __init__(self, config: Config, sinks: Sequence[Sink]) -> None:
        self.engine: Any = start_scripted(config, sinks, make_runner=script_runner).engine

    def get_tokenizer(self) -> Tokenizer:
        return byte_level()

    def close(self) -> None:
        self.engine.close()


def run_bench(*argv: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        real_run = bench.run
        patch.setattr(bench, "run", lambda args: real_run(args, ScriptedLlm))  # type: ignore[arg-type]
        patch.setattr(floor, "measure", lambda dtype, threads: floor.Machine(1e9, 1e9, dtype))
        return run_cli("bench", *argv)


def test_throughput_counts_what_it_asked_for() -> None:
    result = run_bench("throughput", "--workload", "random5", "--input-len", "30", "--output-len", "12")
    assert (result.status, result.err) == (0, "")
    read = json.loads(result.out.splitlines()[-1])
    assert (read["benchmark"], read["num_requests"], read["completed"]) == ("throughput", 5, 5)
    assert (read["total_input_tokens"], read["total_output_tokens"], read["total_num_tokens"]) == (150, 60, 210)
    assert (read["workload"], read["request_rate"]) == ("random5", "inf")
    assert read["tokens_per_second"] == pytest.approx(210 / read["elapsed_time"])
    assert read["requests_per_second"] == pytest.approx(5 / read["elapsed_time"])
    assert read["share_of_floor"] == pytest.approx(read["floor_s"] / read["elapsed_time"])
    assert "Memory bandwidth (GB/s):                 1.0" in result.out
    # One token a step for each of five that run side by side, all of them within one run.
    assert read["max_concurrent_requests"] == 5


def test_latency_tells_every_run() -> None:
    flags = ["--input-len", "8", "--output-len", "4", "--num-iters", "3", "--metric-percentiles", "10,90"]
    result = run_bench("latency", *flags)
    read = json.loads(result.out.splitlines()[-1])
    assert (result.status, len(read["latencies"]), set(read["percentiles"])) == (0, 3, {"10", "90"})
    assert read["avg_latency"] == pytest.approx(sum(read["latencies"]) / 3)


def test_the_line_is_also_written_to_a_file(tmp_path: Any) -> None:
    path = tmp_path / "out.json"
    result = run_bench("latency", "--input-len", "8", "--output-len", "2", "--num-iters", "1", "--output-json", str(path))
    assert path.read_text() == result.out.splitlines()[-1] + "\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["throughput", "http://x"], "a URL belongs to bench serve, not to bench throughput"),
        (["throughput", "--max-concurrency", "3"], "--max-concurrency belongs to bench serve, not to bench throughput"),
        (["static", "--workload", "b1"], "--workload belongs to bench throughput and latency and serve"),
        (["static", "--max-num-seqs", "4"], "bench static sets its engines up itself and takes no --max-num-seqs"),
        (["serve", "--max-num-seqs", "4"], "bench serve starts no engine: --max-num-seqs belongs to the command that does"),
        (["latency", "--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["startup", "--num-iters-cold", "-1"], "--num-iters-cold must be at least 0, got -1"),
        (["serve", "--extra-body", "[1]"], "--extra-body takes a JSON object, got '[1]'"),
        (["serve", "--vocab-size", "5"], "--vocab-size must be at least 16, got 5"),
        (["throughput", "--metric-percentiles", "101"], "--metric-percentiles takes numbers from 0 to 100"),
        (["throughput", "--goodput", "itl:3"], "--goodput takes ttft:MS"),
        (["throughput", "--random-range-ratio", "2"], "--random-range-ratio must be in 0 to 1"),
        (["throughput", "--workload", "random2", "--input-len", "600"], "the workload's longest request has 728 tokens"),
    ],
)
def test_what_means_nothing_is_refused(argv: list[str], words: str) -> None:
    result = run_bench(*argv)
    assert (result.status, result.out) == (2, "")
    assert words in result.sentence


def test_a_start_is_asked_for_as_typed() -> None:
    overrides = {"a": ("--no-x", False), "b": ("--dtype", "bfloat16"), "c": ("--api-key", ["k", "l"])}
    words = [word for flag, value in SimpleNamespace(overrides=overrides).overrides.values() for word in bench._as_words(flag, value)]
    assert words == ["--no-x", "--dtype=bfloat16", "--api-key", "k", "l"]
