"""The lines for people: exact words, safe ids, figures of an interval, and the same lines from a replay."""

import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged import events
from jaxpaged.events import Event, from_line, to_line
from jaxpaged.log_format import MAX_ID_CHARS, Level, LogFormatter, clean, clean_id, decode_rate
from tests.observability.samples import START_S, finished, scheduled, short_run, step


def texts(*run: Event, level: Level = Level.INFO, interval_s: float = 5.0) -> list[str]:
    formatter = LogFormatter(interval_s)
    return [line.text for event in run for line in formatter.lines(event) if line.level >= level]


def only(event: Event) -> tuple[Level, str]:
    (line,) = LogFormatter().lines(event)
    return line.level, line.text


def test_a_request_is_added_and_finished() -> None:
    assert texts(scheduled("req-7"), finished("req-7")) == [
        "request req-7 added: 120 prompt tokens, 96 cached, 8 pages allocated",
        # 40 tokens after the first, in 1.0 s - 0.2 s
        "request req-7 finished (stop): 41 tokens, first token after 0.200 s, 50.0 tokens/s, 11 pages freed",
    ]


def test_several_answers_are_counted() -> None:
    event = finished("x", num_samples=3)
    assert texts(event)[0].startswith("request x finished (stop): 3 answers, 41 tokens, ")


def test_the_load_apart_from_steps() -> None:
    load = events.LoadChanged(time_s=START_S, num_running=2, num_waiting=1, num_pages_total=8, num_pages_in_use=2, num_pages_cached=3)
    assert only(load) == (Level.DEBUG, "running 2, waiting 1; pages 25.0 % of 8 in use")
    assert from_line(to_line(load)) == load


def answered(**changes: Any) -> events.HttpAnswered:
    values: dict[str, Any] = {
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "end": "length",
        "code": "",
        "num_prompt_tokens": 12,
        "num_output_tokens": 1,
        "first_token_s": 0.25,
        "seconds": 1.5,
    }
    return events.HttpAnswered(time_s=START_S, **{**values, **changes})


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (
            answered(),
            Level.INFO,
            "request req-1 POST /v1/completions 200 (length): 1.500 s, 12 prompt tokens + 1 token, first token after 0.250 s",
        ),
        (
            answered(status=429, end="refused", code="queue_full", num_prompt_tokens=0, num_output_tokens=0, first_token_s=None),
            Level.INFO,
            "request req-1 POST /v1/completions 429 (refused, queue_full): 1.500 s, 0 prompt tokens + 0 tokens",
        ),
        (
            answered(status=0, end="aborted", path=""),
            Level.INFO,
            "request req-1 POST (not looked up) left (aborted): 1.500 s, 12 prompt tokens + 1 token, first token after 0.250 s",
        ),
        (
            answered(answer_id="cmpl-5", num_merged=3),
            Level.INFO,
            "request req-1 POST /v1/completions 200 (length): 1.500 s, 12 prompt tokens + 1 token, first token after 0.250 s, "
            "3 tokens merged, answer cmpl-5",
        ),
        (answered(path="/livez", end="", first_token_s=None, is_routine=True), Level.DEBUG, "request req-1 POST /livez 200: 1.500 s"),
        (
            answered(path="/readyz", end="", first_token_s=None, status=503, is_routine=True),
            Level.DEBUG,
            "request req-1 POST /readyz 503: 1.500 s",
        ),
        (answered(path="/v1/models", end="", first_token_s=None), Level.INFO, "request req-1 POST /v1/models 200: 1.500 s"),
        (
            answered(path="", end="", first_token_s=None, status=404, code="not_found"),
            Level.INFO,
            "request req-1 POST (no such path) 404 (not_found): 1.500 s",
        ),
        (
            answered(path="", end="", first_token_s=None, status=413, code="body_too_large"),
            Level.INFO,
            "request req-1 POST (not looked up) 413 (body_too_large): 1.500 s",
        ),
        (
            answered(path="", end="", first_token_s=None, status=400, code="bad_request", method=""),
            Level.INFO,
            "request req-1 (no request) 400 (bad_request): 1.500 s",
        ),
        (answered(end="", first_token_s=None, body="a\n\x1b[31mb"), Level.INFO, None),
    ],
)
def test_the_line_of_an_answer_over_http(event: events.HttpAnswered, level: Level, text: str | None) -> None:
    (line,) = LogFormatter().lines(event)
    assert line.level is level
    if text is None:
        assert line.text.endswith(r"body a\n\x1b[31mb")
    else:
        assert line.text == text


def test_waiting_preemption_and_errors_are_told() -> None:
    assert texts(
        scheduled("a", queue_s=0.25),
        events.RequestPreempted(time_s=START_S, request_id="a", num_pages_freed=9, num_computed_tokens=140),
        scheduled("a", num_preemptions=1, num_pages=10),
        finished("a", reason="error", num_preemptions=1, message="NaN\nrow 3"),
        finished("b", reason="abort", num_output_tokens=0, ttft_s=None),
    ) == [
        "request a added: 120 prompt tokens, 96 cached, 8 pages allocated, waited 0.250 s",
        "request a preempted: 9 pages freed, 140 tokens to compute again",
        "request a resumed after preemption 1: 96 tokens cached, 10 pages allocated",
        "request a finished (error): 41 tokens, first token after 0.200 s, 50.0 tokens/s, 11 pages freed, preempted 1 times: NaN\\nrow 3",
        "request b finished (abort): 0 tokens, 11 pages freed",
    ]


def test_the_line_of_an_interval() -> None:
    """50 steps 0.1 s apart: 12 tokens and 4 padding each, one of them with 120 prompt tokens of which 30 of 60 were found."""
    first = step(0.0, num_prefill_tokens=120, num_tokens=132, bucket_tokens=256, prefix_queries_tokens=60, prefix_hits_tokens=30)
    run = [first, *(step(i / 10, i) for i in range(1, 51))]
    assert texts(*run) == [
        # 51 steps: (132 + 50 * 12) tokens and (124 + 50 * 4) padding; 5.01 s busy (10 ms of the first step, 50 gaps of 0.1 s)
        "running 12, waiting 3; batch 14.4 tokens + 6.4 padding (mean of 51 steps); pages 45.2 % of 1000 in use; "
        "prompt 24.0 tokens/s, generation 122.2 tokens/s; prefix hits 50.0 %"
    ]


def test_one_line_per_interval_with_the_steps_of_that_interval() -> None:
    """Steps 0.1 s apart, the first of them at the start of the first interval."""
    lines = texts(*(step(i / 10, i) for i in range(201)), interval_s=5.0)
    assert [line.partition("mean of ")[2].partition(" ")[0] for line in lines] == ["51", "50", "50", "50"]
    assert len(texts(*(step(i / 10, i) for i in range(201)), interval_s=1.0)) == 20


def test_idle_time_is_no_part_of_a_rate() -> None:
    """1 s of steps, an hour of nothing, 1 s of steps: rates are those of the 2 s."""
    run = [step(i / 10, i) for i in range(11)]
    run += [step(3600 + i / 10, i) for i in range(60)]
    (line,) = texts(*run, interval_s=5.0)
    # 11 steps before the pause; 51 until 5 s after it began again; busy 0.01 + 1.0 + 0.01 + 5.0 s
    assert "mean of 62 steps" in line
    assert f"generation {62 * 12 / 6.02:.1f} tokens/s" in line


def test_an_engine_that_falls_idle_after_a_second_of_work_says_so_at_once() -> None:
    run = [*(step(i / 10, i) for i in range(15)), step(1.5, 15, num_running=0, num_waiting=0)]
    (line,) = texts(*run, interval_s=60.0)
    assert line.startswith("running 0, waiting 0; batch 12.0 tokens + 4.0 padding (mean of 16 steps)")


def test_the_rest_of_an_interval_is_told_at_the_end() -> None:
    lines = texts(step(0.0), step(0.1), events.EngineStopped(time_s=START_S + 0.2))
    assert lines[0].startswith("running 12, waiting 3;")
    assert lines[1] == "stopped"


def test_a_clock_that_is_set_back_does_not_silence_the_log() -> None:
    run = [step(1000 + i / 10, i) for i in range(10)] + [step(i / 10, i) for i in range(100)]
    assert len(texts(*run, interval_s=5.0)) >= 1


def test_preemptions_of_an_interval_are_counted() -> None:
    run = [*(step(i / 10, i, num_preempted=1) for i in range(51))]
    assert texts(*run)[0].endswith("; preempted 51")
    run = [*(step(i / 10, i, num_preempted=1, prefill_recompute_tokens=10) for i in range(51))]
    assert texts(*run)[0].endswith("; preempted 51; 510 tokens computed again")


def test_start_up_lines_count_programs_and_those_from_the_cache() -> None:
    assert texts(*short_run())[:2] == ["compiling 0/3", "compiling 3/3 (2 from cache)"]
    seen = [line for line in texts(*short_run(), level=Level.DEBUG) if line.startswith("compiling")]
    assert "compiling 2/3 (2 from cache)" in seen
    assert seen[-1] == "compiling 3/3 (2 from cache)"


def test_slow_compilation_is_told_while_it_goes_on() -> None:
    run = [events.PhaseChanged(time_s=START_S + 2 * i, phase="compile", message="", done=i, total=5) for i in range(6)]
    assert texts(*run) == [f"compiling {i}/5" for i in range(6)]


def test_ready_says_what_runs() -> None:
    event = events.EngineStarted(
        time_s=START_S,
        model="org/na\nme",
        dtype="float32",
        num_pages=728,
        page_size=16,
        pool_bytes=2**29,
        weight_bytes=513 * 2**20,
        max_model_len=8192,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        seconds=4.26,
        num_programs=9,
    )
    assert only(event) == (
        Level.INFO,
        "ready in 4.3 s: org/na\\nme in float32, weights 513 MiB, 728 pages of 16 tokens (512 MiB), 9 programs; "
        "per step at most 32 sequences and 512 tokens; context 8192 tokens",
    )
    assert "org/na\\nme in float32 with weights in int8, weights 513 MiB, " in only(msgspec.structs.replace(event, quantization="int8"))[1]
    kernels = {"kernels": ("paged_attention xla", "kv_write xla"), "kernels_refused": ("paged_attention mosaic_gpu: it needs\na GPU",)}
    on_cpu = msgspec.structs.replace(event, platform="cpu", **kernels)
    assert only(on_cpu)[1].endswith("context 8192 tokens; kernels: paged_attention xla, kv_write xla")
    on_gpu = msgspec.structs.replace(event, platform="gpu", **kernels)
    assert only(on_gpu)[1].endswith("kv_write xla; not taken: paged_attention mosaic_gpu: it needs\\na GPU")


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (events.ProgramCompiled(time_s=0.0, bucket_tokens=64, seconds=2.0, from_cache=False, after_ready=True), Level.WARNING),
        (events.ProgramCompiled(time_s=0.0, bucket_tokens=64, seconds=2.0, from_cache=False), Level.DEBUG),
        (events.SinkDropped(time_s=0.0, sink="run.log", count=3, message="No space left on device"), Level.WARNING),
        (events.HealthChanged(time_s=0.0, state="dead", message="ValueError: x"), Level.ERROR),
        (events.HealthChanged(time_s=0.0, state="ready"), Level.DEBUG),
        (events.HealthChanged(time_s=0.0, state="ready", message="resumed"), Level.INFO),
        (events.HealthChanged(time_s=0.0, state="paused"), Level.INFO),
        (events.HealthChanged(time_s=0.0, state="sleeping", message="level 1"), Level.INFO),
        (events.EngineStopped(time_s=0.0), Level.INFO),
        (events.EngineStopped(time_s=0.0, message="the step failed"), Level.ERROR),
        (events.RequestRejected(time_s=0.0, request_id="a", code="invalid_value", message="no"), Level.INFO),
        (events.RequestFirstToken(time_s=0.0, request_id="a", ttft_s=0.1), Level.DEBUG),
        (finished("a", reason="error"), Level.ERROR),
        (finished("a", reason="length"), Level.INFO),
    ],
)
def test_levels(event: Event, level: Level) -> None:
    assert only(event)[0] is level


def test_times_are_the_events_own() -> None:
    (line,) = LogFormatter().lines(scheduled("a", 0.5))
    assert str(line) == "2025-11-30T03:13:12.500Z INFO    request a added: 120 prompt tokens, 96 cached, 8 pages allocated"
    (line,) = LogFormatter().lines(events.EngineStopped(time_s=1e30))
    assert str(line) == "1e+30 INFO    stopped"


def test_replaying_the_json_log_gives_the_same_lines() -> None:
    live = texts(*short_run(), level=Level.DEBUG)
    replayed = texts(*(from_line(to_line(event)) for event in short_run()), level=Level.DEBUG)
    assert replayed == live
    assert len(live) > 130


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        ("req-1", "req-1"),
        ("org/name:v1.0@x", "org/name:v1.0@x"),
        ("", '""'),
        ("a b", '"a b"'),
        ('a" finished', '"a\' finished"'),
        ("a\r\nb", '"a\\r\\nb"'),
        ("\x1b[31mred", '"\\x1b[31mred"'),
        ("back\\slash", '"back\\\\slash"'),
        ("\u202egnp.exe", '"\\u202egnp.exe"'),
        ("\x00", '"\\x00"'),
        ("größe", "größe"),
        ("\ud800", '"\\ud800"'),
    ],
)
def test_ids_are_escaped(request_id: str, shown: str) -> None:
    assert clean_id(request_id) == shown


def test_a_long_id_is_cut() -> None:
    assert len(clean_id("x" * 10**6)) == MAX_ID_CHARS
    assert len(clean_id("x" * 128)) == 128
    assert len(clean_id("\n" * 10**6)) <= MAX_ID_CHARS + 2
    assert len(only(finished("\x1b" * 10**6, message="y" * 10**6))[1]) < 1500


@given(st.text(), st.integers(8, 200))
def test_clean_text_is_one_printable_line(text: str, limit: int) -> None:
    shown = clean(text, limit)
    assert len(shown) <= limit
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for c in shown)


@given(st.text())
def test_no_id_forges_a_second_line(request_id: str) -> None:
    for event in (scheduled(request_id), finished(request_id, message=request_id)):
        (line,) = LogFormatter().lines(event)
        assert str(line).isprintable()


@pytest.mark.parametrize(
    ("num_tokens", "ttft_s", "e2e_s", "rate"), [(11, 0.5, 1.5, 10.0), (1, 0.5, 0.5, 2.0), (0, 0.0, 0.0, 0.0), (5, 1.0, 1.0, 5.0)]
)
def test_decode_rate(num_tokens: int, ttft_s: float, e2e_s: float, rate: float) -> None:
    assert decode_rate(num_tokens, ttft_s, e2e_s) == rate
