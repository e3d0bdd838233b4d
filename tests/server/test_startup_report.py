"""What is said when the server is ready."""

import json
import shlex

import pytest

from jaxpaged import events
from server.phase import EngineProgress
from server.startup_report import lines_to_copy, memory_table, phase_times, ready_report

pytestmark = pytest.mark.jax

STARTED = events.EngineStarted(
    time_s=110.0,
    model="smollm2-135m",
    dtype="float32",
    num_pages=2844,
    page_size=16,
    pool_bytes=512 * 2**20,
    weight_bytes=269 * 2**20,
    max_model_len=8192,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    seconds=8.06,
    num_programs=9,
)


def test_the_memory_table() -> None:
    assert memory_table(STARTED) == [
        "  weights                  269.0 MiB (float32)",
        "  page pool                512.0 MiB",
        "  pages                    2,844 of 16 tokens",
        "  tokens that fit          45,504",
        "  requests at full length  5 of 8,192 tokens",
        "  requests at once         32",
    ]


def test_phases_and_their_times() -> None:
    progress = EngineProgress()
    for time_s, phase in (
        (100.0, "find"),
        (100.1, "download"),
        (100.4, "download"),
        (100.5, "load"),
        (103.0, "pool"),
        (103.2, "compile"),
        (108.0, "compile"),
        (109.0, "warm_up"),
    ):
        progress(events.PhaseChanged(time_s=time_s, phase=phase, message=phase))
    assert progress.phase_seconds() == {}
    progress(STARTED)
    assert phase_times(progress.phase_seconds(), STARTED.seconds) == (
        "ready in 8.1 s (find 0.1, download 0.4, load 2.5, pool 0.2, compile 5.8, warm up 1.0)"
    )


@pytest.mark.parametrize("has_key", [False, True])
def test_lines_to_copy(has_key: bool) -> None:
    model = "it's/a model"
    curl, _, python, _, export = lines_to_copy("http://127.0.0.1:8000", model, has_key=has_key)
    words = shlex.split(curl)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == model
    assert ("authorization: Bearer $OPENAI_API_KEY" in words) == has_key
    compile(python.strip(), "line", "exec")
    assert "OPENAI_BASE_URL=http://127.0.0.1:8000/v1" in export


def test_the_whole() -> None:
    text = ready_report(STARTED, {"load": 2.0}, url="https://127.0.0.1:1", model="m", has_key=False, admin="/run/a.sock")
    assert text.startswith("m: ready in 8.1 s (load 2.0)\n\n  weights ")
    assert "\nserving m at https://127.0.0.1:1/v1 (Ctrl-C stops it)\noperators' calls at /run/a.sock\n" in text
    assert "\nthe live page at https://127.0.0.1:1/dashboard\n" in text
