"""Figures of a benchmark against values worked out by hand, and the names that other tools read."""

import pytest

from jaxpaged.bench.outcomes import Outcome, figures, has_failed, read_goals, table
from jaxpaged.errors import ConfigError

FIRST = Outcome(sent_s=10.0, times_s=[10.5, 11.0, 12.0], num_prompt=7, num_output=5, ended_s=12.5)
SECOND = Outcome(sent_s=11.0, times_s=[11.25], num_prompt=3, num_output=1, ended_s=11.25)
FAILED = Outcome(sent_s=10.0, times_s=[], num_prompt=0, num_output=0, ended_s=10.1, error="status 429: full")

KEYS = [
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "median_e2el_ms",
    "std_e2el_ms",
    "p99_e2el_ms",
]
"""Of `vllm bench serve`'s result file: the figures."""

SETUP_KEYS = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
]
"""Of its set-up, which come before them."""


def test_the_keys_are_vllms() -> None:
    assert list(figures([FIRST], 1.0)) == KEYS


def test_figures_by_hand() -> None:
    made = figures([FIRST, SECOND, FAILED], 4.0, percentiles=[50, 99.9], goals={"ttft": 300.0})
    assert (made["completed"], made["failed"], made["total_input_tokens"], made["total_output_tokens"]) == (2, 1, 10, 6)
    assert (made["request_throughput"], made["output_throughput"], made["total_token_throughput"]) == (0.5, 1.5, 4.0)
    assert (made["mean_ttft_ms"], made["median_ttft_ms"], made["std_ttft_ms"]) == (375.0, 375.0, 125.0)
    # (2.5 s - 0.5 s) over the four tokens after the first; an answer of one token has none.
    assert (made["mean_tpot_ms"], made["p50_tpot_ms"]) == (500.0, 500.0)
    assert (made["mean_itl_ms"], made["std_itl_ms"]) == (750.0, 250.0)
    assert (made["mean_e2el_ms"], made["max_concurrent_requests"]) == (1375.0, 2)
    # Of 10 s to 11 s and so on: 5/3 tokens at 0.5, at 1.0 with 1 more at 1.25, at 2.0.
    assert made["max_output_tokens_per_s"] == pytest.approx(5 / 3 + 1)
    assert made["request_goodput"] == 0.25
    assert "p99.9_e2el_ms" in made
    assert "p99_e2el_ms" not in made


def test_a_run_without_answers_has_no_latencies() -> None:
    made = figures([FAILED], 1.0)
    assert (made["completed"], made["output_throughput"], made["mean_ttft_ms"], made["p99_itl_ms"]) == (0, 0.0, None, None)
    assert "Mean TTFT" not in table(made)


def test_the_table_is_vllms() -> None:
    lines = table(figures([FIRST, SECOND], 4.0), rate=2.0, max_concurrency=3).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     2"
    assert lines[3] == "Maximum request concurrency:             3"
    assert lines[4] == "Request rate configured (RPS):           2.00"
    assert "---------------Time to First Token----------------" in lines
    assert "Mean TPOT (ms):                          500.00" in lines
    assert "P99 E2EL (ms):                           2477.50" in lines
    assert not any("goodput" in line for line in lines)
    assert lines[-1] == "=" * 50


@pytest.mark.parametrize(("num_failed", "num_done", "fails"), [(0, 100, False), (1, 100, False), (1, 99, True), (1, 0, True)])
def test_one_in_a_hundred_is_too_many(num_failed: int, num_done: int, fails: bool) -> None:
    assert has_failed([FAILED] * num_failed + [FIRST] * num_done) is fails


def test_goals_are_read() -> None:
    assert read_goals(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}
    for word in ("itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:nan", ":5"):
        with pytest.raises(ConfigError, match="--goodput takes"):
            read_goals([word])
