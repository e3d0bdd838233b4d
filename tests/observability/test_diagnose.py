"""`jaxpaged diagnose`: engines that were driven into each state are told apart, near misses and healthy ones are left alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxpaged import events
from jaxpaged.config import Config, DiagnoseConfig
from jaxpaged.diagnose.read_events import MAX_WINDOWS, observe_events
from jaxpaged.diagnose.read_logs import read_our_log, read_vllm_log
from jaxpaged.diagnose.read_prometheus import metrics_url, observe_dump, observe_url, parse, split_dump
from jaxpaged.diagnose.report import as_json, as_text, flow_chart, rule_table
from jaxpaged.diagnose.rules import RULES, diagnose
from jaxpaged.diagnose.scrapes import Scrape, window_between
from jaxpaged.diagnose.sources import observe_lines
from jaxpaged.diagnose.windows import Observation, Window
from jaxpaged.errors import ConfigError
from jaxpaged.options import option_table
from jaxpaged.sinks import json_line
from jaxpaged.tokenizer import Tokenizer
from tests.observability.samples import START_S, step
from tests.observability.sources import as_our_log, as_scrapes, as_vllm_log, of_vllm
from tests.observability.states import STATES, Trace, healthy
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax

LIMITS = DiagnoseConfig()
IDS = [rule.id for rule in RULES]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def driven(tokenizer: Tokenizer) -> Callable[[str], Trace]:
    """The trace of a state, made once; "healthy" is one, too."""
    return cache(lambda name: (healthy if name == "healthy" else STATES[name][0])(tokenizer, 1))


def found(seen: Observation) -> list[str]:
    return [finding.id for finding in diagnose(seen, LIMITS)]


def ids_of(trace: Trace) -> list[str]:
    return found(observe_events(trace, LIMITS.window_s))


def test_every_rule_has_a_state_that_is_driven() -> None:
    assert list(STATES) == [name for name in STATES if name in IDS]
    assert set(STATES) == set(IDS)
    assert len(set(IDS)) == len(IDS)


def test_loads_of_several_copies_are_compared_with_the_limits_of_all(driven: Callable[[str], Trace]) -> None:
    """What runs is told of all together, `max_num_seqs` of one; vLLM tells a pool of each engine."""

    def trace(num_engines: int, max_num_seqs: int) -> Trace:
        def changed(event: events.Event) -> events.Event:
            if isinstance(event, events.EngineStarted):
                return msgspec.structs.replace(event, num_engines=num_engines, max_num_seqs=max_num_seqs)
            return event

        return [changed(event) for event in driven("row_limit")]

    (started,) = (event for event in driven("row_limit") if isinstance(event, events.EngineStarted))
    assert "row_limit" in ids_of(trace(1, started.max_num_seqs))
    assert "row_limit" not in ids_of(trace(2, started.max_num_seqs))
    (first, *_) = diagnose(observe_events(trace(2, started.max_num_seqs // 2), LIMITS.window_s), LIMITS)
    assert (first.id, first.change.from_value) == ("row_limit", started.max_num_seqs // 2)
    values = {("vllm:kv_cache_usage_perc", (("engine", str(number)),)): share for number, share in enumerate((0.5, 0.9))}
    assert window_between(Scrape(0.0, values, {}), Scrape(1.0, values, {})).pool == pytest.approx(0.7)


@pytest.mark.parametrize("name", list(STATES))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_state_is_the_verdict(tokenizer: Tokenizer, driven: Callable[[str], Trace], name: str, seed: int) -> None:
    assert ids_of(driven(name) if seed == 1 else STATES[name][0](tokenizer, seed))[:1] == [name]


@pytest.mark.parametrize("name", list(STATES))
def test_a_near_miss_is_none(tokenizer: Tokenizer, name: str) -> None:
    assert ids_of(STATES[name][1](tokenizer, 4)) == []


@pytest.mark.parametrize("seed", range(8))
def test_healthy_engines_are_left_alone(tokenizer: Tokenizer, seed: int) -> None:
    assert ids_of(healthy(tokenizer, 100 + seed)) == []


@pytest.mark.tier("long", area="diagnose")
def test_200_mixed_traces(tokenizer: Tokenizer) -> None:
    wrong = []
    for number in range(200):
        name = IDS[number % len(IDS)]
        verdict = ids_of(STATES[name][0](tokenizer, 10_000 + number))
        if verdict[:1] != [name]:
            wrong.append((name, 10_000 + number, verdict))
    print(f"\n{200 - len(wrong)} of 200 right at the first verdict; wrong: {wrong}")
    assert len(wrong) <= 10


@pytest.mark.tier("long", area="diagnose")
def test_50_healthy_ones_and_50_near_misses(tokenizer: Tokenizer) -> None:
    flagged = [(seed, ids) for seed in range(50) if (ids := ids_of(healthy(tokenizer, 20_000 + seed)))]
    assert flagged == []
    near = [(name, ids) for number in range(50) if (ids := ids_of(STATES[name := IDS[number % len(IDS)]][1](tokenizer, 30_000 + number)))]
    assert len(near) <= 2, near


TOLD_BY_LOGS = ("compiling", "pool_full", "row_limit", "overloaded", "too_few_requests", "batch_jitter")
"""States that lines for people tell; padding_waste, too, in ours."""
TOLD_BY_VLLM = ("pool_full", "overloaded", "too_few_requests")


SECOND_LOOKS = ("stuck", "slow_path", "slow_clients", "pool_full", "batch_too_small", "giant_prompt", "host_bound", "device_bound")
"""States that scrapes of our figures tell; the others are counted by the same code."""


@pytest.mark.parametrize("name", SECOND_LOOKS)
def test_scrapes_say_what_the_event_log_says(driven: Callable[[str], Trace], name: str) -> None:
    trace = driven(name)
    assert found(observe_dump("".join(as_scrapes(trace)), 1.0))[:1] == [name]


@pytest.mark.parametrize("name", [*TOLD_BY_LOGS, "padding_waste"])
def test_our_log_for_people_tells(tokenizer: Tokenizer, driven: Callable[[str], Trace], name: str) -> None:
    text = as_our_log(driven(name), 1.0 if name == "batch_jitter" else 2.0)
    assert found(read_our_log(text.splitlines()))[:1] == [name]
    near = as_our_log(STATES[name][1](tokenizer, 1), 2.0)
    assert found(read_our_log(near.splitlines())) == []


@pytest.mark.parametrize("name", TOLD_BY_LOGS)
def test_vllms_log_tells(driven: Callable[[str], Trace], name: str) -> None:
    text = as_vllm_log(observe_events(driven(name), 1.0))
    seen = read_vllm_log(text.splitlines(), 2025)
    assert found(seen)[:1] == [name]
    assert seen.limits["max_num_seqs"] > 1


@pytest.mark.parametrize("name", TOLD_BY_VLLM)
def test_vllms_figures_tell(driven: Callable[[str], Trace], name: str) -> None:
    texts = of_vllm(as_scrapes(driven(name), 4.0 if name == "overloaded" else 1.0, model_name="m"))
    assert found(observe_dump("".join(texts), 1.0))[:1] == [name]
    old = "".join(texts).replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert found(observe_dump(old, 1.0))[:1] == [name], "older versions of vLLM have another name"


def test_healthy_ones_are_left_alone_in_every_source(driven: Callable[[str], Trace]) -> None:
    trace = driven("healthy")
    texts = as_scrapes(trace, model_name="m")
    for seen in (
        observe_dump("".join(texts), 1.0),
        observe_dump("".join(of_vllm(texts)), 1.0),
        read_our_log(as_our_log(trace).splitlines()),
        read_vllm_log(as_vllm_log(observe_events(trace, 1.0)).splitlines(), 2025),
    ):
        assert len(seen.windows) >= 3, seen.source
        assert found(seen) == [], seen.source


def test_scrapes_and_events_give_the_same_windows(driven: Callable[[str], Trace]) -> None:
    """Log replay = live figures, as windows."""
    trace = driven("pool_full")
    live, replayed = observe_dump("".join(as_scrapes(trace)), 1.0), observe_events(trace, 1.0)
    for one, two in zip(live.windows[:8], replayed.windows[:8], strict=True):
        for field in ("running", "waiting", "pool", "steps", "computed", "padding", "preempted", "generated", "busy_s", "held"):
            assert getattr(one, field) == pytest.approx(getattr(two, field), abs=1e-9), field


def test_the_window_of_a_stuck_engine_is_where_it_stood_still(driven: Callable[[str], Trace]) -> None:
    (finding, *_) = diagnose(observe_events(driven("stuck"), 1.0), LIMITS)
    evidence = finding.evidence[0]
    assert evidence.value == pytest.approx(evidence.to_time - evidence.from_time)
    assert START_S + 1 <= finding.since <= START_S + 5


def test_options_that_are_named_exist(driven: Callable[[str], Trace]) -> None:
    options, named = option_table(), set[str]()
    for rule in RULES:
        for text in (rule.question, rule.remedy):
            named |= set(text.split("`")[1::2])
    for name in STATES:
        for finding in diagnose(observe_events(driven(name), 1.0), LIMITS):
            assert finding.change.option or finding.change.advice
            named |= {finding.change.option} - {""}
    assert {name for name in named if name not in options} == set()
    used = {name for name in named if name.startswith("diagnose.")}
    unused = {path for path in options if path.startswith("diagnose.")} - used
    assert unused == {
        "diagnose.few_requests",
        "diagnose.window_s",
        "diagnose.lasting_share",
        "diagnose.rows_full",
        "diagnose.busy_share",
    } | {"diagnose.first_token_s"}, "said in the text of the document, not in the table"


def test_the_value_of_a_change_is_one_that_the_option_takes(driven: Callable[[str], Trace]) -> None:
    (finding, *_) = diagnose(observe_events(driven("row_limit"), 1.0), LIMITS)
    assert finding.change.option == "scheduler.max_num_seqs"
    assert isinstance(finding.change.from_value, int)
    assert isinstance(finding.change.to_value, int)
    assert finding.change.from_value < finding.change.to_value <= 2 * finding.change.from_value


def test_thresholds_are_options(driven: Callable[[str], Trace]) -> None:
    trace = driven("host_bound")
    lenient = msgspec.structs.replace(LIMITS, host_share=0.95)
    assert "host_bound" not in [finding.id for finding in diagnose(observe_events(trace, 1.0), lenient)]
    assert Config().diagnose == LIMITS


def test_json_has_the_promised_shape(driven: Callable[[str], Trace]) -> None:
    seen = observe_events(driven("row_limit"), 1.0)
    told = msgspec.json.decode(msgspec.json.encode(as_json(diagnose(seen, LIMITS), seen)))
    assert set(told) == {"healthy", "findings"}
    assert told["healthy"] is False
    for finding in told["findings"]:
        assert set(finding) == {"id", "severity", "since", "evidence", "change", "expect"}
        assert finding["since"].startswith("2025-11-30T03:")
        for item in finding["evidence"]:
            assert set(item) == {"metric", "value", "unit", "threshold", "from", "to"}
            assert item["from"] <= item["to"]
        assert set(finding["change"]) >= {"option", "from", "to"} or set(finding["change"]) == {"advice"}
    assert as_json([], seen) == {"healthy": True, "findings": []}


def test_text_says_what_why_and_what_to_do(driven: Callable[[str], Trace]) -> None:
    seen = observe_events(driven("row_limit"), 1.0)
    text = as_text(diagnose(seen, LIMITS), seen)
    for words in (
        "an event log of jaxpaged: ",
        "warning: requests wait although",
        "since ",
        "because ",
        "change  scheduler.max_num_seqs: ",
        "expect ",
    ):
        assert words in text
    well = observe_events(driven("healthy"), 1.0)
    assert "healthy: nothing found" in as_text([], well)
    assert "first token: median" in as_text([], well)


def test_the_kind_of_a_source_is_found_in_its_lines(driven: Callable[[str], Trace]) -> None:
    trace = driven("healthy")
    seen = observe_events(trace, 1.0)
    for text, source in (
        (b"".join(map(json_line, trace)), "an event log of jaxpaged"),
        (as_our_log(trace).encode(), "a log of jaxpaged"),
        (as_vllm_log(seen).encode(), "a log of vLLM"),
        ("".join(as_scrapes(trace)).encode(), "a dump of"),
    ):
        lines = [line + b"\n" for line in text.split(b"\n")]
        assert observe_lines(lines, "x", LIMITS).source.startswith(source)
        if "dump" not in source:
            assert observe_lines([b"\xff\xfe\n", b"hello\n", *lines], "x", LIMITS).source.startswith(source)
    with pytest.raises(ConfigError, match="no source that can be read"):
        observe_lines([b"hello\n"], "x", LIMITS)


def test_lines_that_are_damaged_are_left_out(driven: Callable[[str], Trace]) -> None:
    trace = driven("row_limit")
    lines = list(map(json_line, trace))
    damaged = [piece for line in lines for piece in (line, line[: len(line) // 2] + b"\n", b"\n", b"\xff\n")]
    assert found(observe_lines(damaged, "x", LIMITS)) == found(observe_lines(lines, "x", LIMITS))


def test_a_long_log_is_looked_at_in_longer_windows() -> None:
    seen = observe_events([step(float(second), second) for second in range(0, 9 * MAX_WINDOWS, 3)], 1.0)
    assert MAX_WINDOWS / 4 <= len(seen.windows) <= MAX_WINDOWS + 1
    assert seen.total("steps") == pytest.approx(3 * MAX_WINDOWS, abs=1)
    asleep = observe_events([step(0.0, 1), step(1.0, 2), step(10_000_000.0, 3)], 1.0)
    assert len(asleep.windows) <= MAX_WINDOWS + 2
    back = observe_events([step(float(second), second) for second in (1, 2, 3, 0, 4, 5)], 1.0)
    assert sum(window.steps or 0 for window in back.windows) >= 4


def test_counters_that_fell_count_from_nothing() -> None:
    texts = [f"jaxpaged_scrape_time_seconds {at}\njaxpaged_steps_total {value}\n" for at, value in enumerate((10, 20, 5, 9))]
    assert [window.steps for window in observe_dump("".join(texts), 1.0).windows] == [10, 5, 4]


def test_a_dump_is_split_where_its_first_figure_comes_again() -> None:
    one = "# HELP a b\n# TYPE a counter\na 1\n# TYPE c gauge\nc 2\n"
    assert len(split_dump(one)) == 1
    assert len(split_dump(one * 3)) == 3
    seen = observe_dump(one * 4, 5.0)
    assert (len(seen.windows), seen.is_dated, seen.windows[0].seconds) == (3, False, 5.0)
    with pytest.raises(ConfigError, match="no text of Prometheus"):
        parse("jaxpaged_steps_total {{{\n", 0.0)


def test_a_server_is_watched(driven: Callable[[str], Trace]) -> None:
    texts = [text.replace("jaxpaged_scrape_time_seconds", "other") for text in as_scrapes(driven("row_limit"))]
    now = 1000.0
    asked: list[tuple[str, str | None]] = []

    def load(url: str, key: str | None) -> str:
        asked.append((url, key))
        return texts[min(int(now - 1000), len(texts) - 1)]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    seen = observe_url("http://x/metrics", seconds=8.0, interval_s=1.0, api_key="k", load=load, clock=lambda: now, sleep=sleep)
    assert found(seen)[:1] == ["row_limit"]
    assert asked == [("http://x/metrics", "k")] * 9


def test_the_figures_of_a_server_are_found_by_its_address() -> None:
    assert metrics_url("http://127.0.0.1:8000") == metrics_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000/metrics"
    assert metrics_url("http://h/x/metrics") == "http://h/x/metrics"
    with pytest.raises(ConfigError, match="cannot be read"):
        observe_url("http://127.0.0.1:1/metrics", seconds=0.1, interval_s=0.1)


def test_nothing_is_found_in_what_is_not_told() -> None:
    blank = Observation(source="x", windows=tuple(Window(from_s=at, to_s=at + 1.0) for at in range(100)))
    assert found(blank) == []
    assert found(Observation(source="x", windows=())) == []


def test_a_paused_engine_is_not_stuck() -> None:
    windows = [Window(from_s=at, to_s=at + 1.0, running=3.0, steps=0.0, is_paused=True) for at in range(100)]
    assert "stuck" not in found(Observation(source="x", windows=tuple(windows)))
    windows = [msgspec.structs.replace(window, is_paused=False) for window in windows]
    assert "stuck" in found(Observation(source="x", windows=tuple(windows)))


def test_the_time_of_the_start_is_not_that_of_an_idle_engine(driven: Callable[[str], Trace]) -> None:
    trace = driven("too_few_requests")
    start = [events.PhaseChanged(time_s=START_S - 100 + second, phase="load", message="") for second in range(100)]
    assert ids_of([*start, *trace])[:1] == ["too_few_requests"]


def test_vllms_lines_as_written() -> None:
    """With the parts that appear only sometimes, of one engine and of several."""
    text = (
        "(APIServer pid=1) INFO 11-30 12:00:10 [loggers.py:259] Engine 000: Avg prompt throughput: 120.5 tokens/s, "
        "Avg generation throughput: 55.0 tokens/s, Running: 7 reqs, Waiting: 3 reqs, "
        "Deferred: 2 reqs, Preemptions: 4, GPU KV cache usage: 97.5%, "
        "Prefix cache hit rate: 12.0%, MM cache hit rate: 1.0%\n"
        "INFO 11-30 12:00:20 [loggers.py:116] 2 Engines Aggregated: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
        "54.0 tokens/s, Running: 6 reqs, Waiting: 0 reqs, GPU KV cache usage: 50.0%\n"
        "INFO 11-30 12:00:30 [metrics.py:455] Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, "
        "Running: 1 reqs, Swapped: 0 reqs, Pending: 5 reqs, GPU KV cache usage: 3.0%, CPU KV cache usage: 0.0%.\n"
    )
    seen = read_vllm_log(text.splitlines(), 2026)
    assert [(w.running, w.waiting, w.preempted, w.pool) for w in seen.windows] == [(7, 3, 4, 0.975), (6, 0, 0, 0.5), (1, 5, 0, 0.03)]
    assert [w.seconds for w in seen.windows] == [10, 10, 10]
    assert seen.windows[0].generated == 550


def section(name: str) -> str:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0].strip("\n") + "\n"


@pytest.mark.parametrize(("name", "made"), [("findings", rule_table), ("flow chart", flow_chart)])
def test_the_document_is_made_from_the_table(name: str, made: Any) -> None:
    assert section(name) == made(), "python scripts/make_operations.py writes it anew"
