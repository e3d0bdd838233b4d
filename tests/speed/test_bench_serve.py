"""`jaxpaged bench serve` against servers that answer, that refuse, and that break off."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import pytest

from jaxpaged.bench.http_load import Target, run, server_sent_events
from jaxpaged.bench.workloads import Job
from tests.cli.scripted_engine import Result, run_cli
from tests.server.live import End, live_server
from tests.speed.openai_server import openai_server
from tests.speed.test_outcomes import KEYS, SETUP_KEYS
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax


def bench(*argv: str) -> Result:
    return run_cli("bench", "serve", *argv)


def figures_of(result: Result) -> dict[str, object]:
    """The JSON line, which is the last."""
    assert result.err == ""
    read = json.loads(result.out.splitlines()[-1])
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_workload_is_sent_and_counted(newline: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with openai_server(newline) as server:
        result = bench(server.url, "--workload", "batch3", "--metric-percentiles", "50,99", "--goodput", "e2el:60000")
        read = figures_of(result)
    assert result.status == 0
    assert (read["benchmark"], read["model_id"], read["completed"], read["failed"]) == ("serve", "a-model", 3, 0)
    assert (read["total_input_tokens"], read["total_output_tokens"]) == (3 * 64, 3 * 128)
    assert read["request_goodput"] == read["request_throughput"]
    assert set(SETUP_KEYS) | set(KEYS) | {"p50_ttft_ms", "benchmark", "share_of_floor"} <= set(read)
    assert (read["request_rate"], read["burstiness"], read["num_prompts"], read["backend"]) == ("inf", 1.0, 3, "openai")
    assert list(read)[:2] == ["benchmark", "date"]
    assert result.out.startswith("============ Serving Benchmark Result ============\nSuccessful requests:                     3\n")
    paths, keys, bodies = zip(*server.bodies, strict=True)
    # One more, to warm up, before the clock starts.
    assert (paths, keys) == (("/v1/completions",) * 4, (None,) * 4)
    assert all(body["stream_options"] == {"include_usage": True} and body["ignore_eos"] is True for body in bodies)
    assert all(body["model"] == "a-model" and len(body["prompt"]) == 64 and body["temperature"] == 0 for body in bodies)


def test_chat_sends_words_and_what_is_asked_for() -> None:
    with openai_server() as server:
        flags = ["--endpoint", "chat", "--model", "mine", "--api-key", "k", "--extra-body", '{"top_k": 3}', "--stop-at-eos"]
        read = figures_of(bench(f"{server.url}/v1/", "--workload", "batch1", "--num-warmups", "0", *flags))
    assert (read["total_input_tokens"], read["total_output_tokens"], read["model_id"]) == (64, 128, "mine")
    assert read["endpoint_type"] == "openai-chat"
    ((path, key, body),) = server.bodies
    assert (path, key, body["top_k"], "ignore_eos" in body) == ("/v1/chat/completions", "Bearer k", 3, False)


def test_no_more_are_open_than_asked_for() -> None:
    with openai_server() as server:
        server.hold = threading.Barrier(2)
        figures_of(bench(server.url, "--workload", "batch6", "--max-concurrency", "2", "--num-warmups", "0"))
        assert server.most_open == 2


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("status", 'status 429: {"error": {"message": "full"}}'),
        ("cut", "RemoteProtocolError: "),
        ("error", "error in the stream: {'message': 'lost'}"),
        ("no-usage", "without its token counts"),
        ("rubbish", "no JSON of OpenAI's"),
    ],
)
def test_a_request_that_fails_is_said_and_not_counted(failure: str, words: str) -> None:
    with openai_server() as server:
        server.failures = {7: failure}
        bad, good = run(Target(server.url, "m"), [Job("bad", [7, 8], 3), Job("good", [9], 2)])
    assert words in bad.error
    assert (good.error, good.num_prompt, good.num_output, len(good.times_s)) == ("", 1, 2, 2)


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with openai_server() as server:
        url = server.url
    result = bench(url)
    assert (result.status, result.out) == (2, "")
    assert result.sentence.startswith(f"{url} does not answer: ")


def test_too_many_failures_are_a_status() -> None:
    with openai_server() as server:
        server.failures = dict.fromkeys(range(60_000), "status")
        result = bench(server.url, "--workload", "batch2", "--num-warmups", "0")
    assert result.status == 1
    assert result.err == 'failed: status 429: {"error": {"message": "full"}}\n'
    assert json.loads(result.out.splitlines()[-1])["mean_ttft_ms"] is None


def test_our_own_server_counts_the_same() -> None:
    with live_server(byte_level()) as server:
        flags = ["--workload", "mixed5", "--random-input-len", "20"]
        result = bench(f"127.0.0.1:{server.port}", *flags)
        assert result.sentence == "lengths are given for a random workload, and mixed5 has its own"
        flags = ["--workload", "random5", "--random-input-len", "20", "--random-output-len", "9", "--vocab-size", "200"]
        read = figures_of(bench(f"127.0.0.1:{server.port}", *flags, "--num-warmups", "1", "--request-rate", "200"))
        assert (read["completed"], read["total_input_tokens"], read["total_output_tokens"]) == (5, 100, 45)
        server.counts[End.LENGTH] += 6
        server.num_prompts += 6


def test_events_are_found_however_they_are_cut() -> None:
    stream = b': ping\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\r\ndata: 2\n\ndata:3\n\ndata: [DONE]\n\n'

    async def events(size: int) -> list[bytes]:
        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(stream), size):
                yield stream[start : start + size]

        return [data async for data in server_sent_events(chunks())]

    for size in range(1, len(stream) + 1):
        assert asyncio.run(events(size)) == [b'{"a": 1}', b"2", b"3"], size
