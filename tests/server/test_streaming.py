"""Streams over real sockets: framing, silence, errors on the way, clients that leave and clients that do not read."""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged import events
from jaxpaged.config import KIB, Config, LogConfig, ServerConfig
from jaxpaged.tokenizer import Tokenizer
from server.http_protocol import ChunkWriter
from server.ledger import End
from server.protocol.chat import ChatChunk, ChatChunkChoice, Delta
from server.streaming import TextEvent, event
from tests.fakes import FailingRunner
from tests.script import follow
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker
from tests.server.workers import with_many_clients
from tests.stopwatch import Stopwatch
from tests.text.vocabularies import id_of

pytestmark = pytest.mark.jax

LONG = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 400, "temperature": 0}


def read_all(connection: socket.socket) -> bytes:
    content = b""
    with connection:
        while piece := connection.recv(65536):
            content += piece
    return content


def chunks(content: bytes) -> bytes:
    """The body of an answer in chunks."""
    _, _, rest = content.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def test_events_are_separated_by_two_line_feeds_and_nothing_else(server: LiveServer) -> None:
    reply = server.chat("frames", stream=True)
    assert b"\r" not in reply.content
    parts = reply.content.split(b"\n\n")
    assert parts[-1] == b""
    assert parts[-2] == b"data: [DONE]"
    assert all(part.startswith(b"data: {") and b"\n" not in part for part in parts[:-2])


def test_one_event_per_step_of_the_engine(server: LiveServer) -> None:
    before = len(server.log.of(events.StepFinished))
    reply = server.chat("steps", stream=True, n=4, max_tokens=12)
    server.after_check()
    num_steps = len(server.log.of(events.StepFinished)) - before
    assert len(reply.json) <= num_steps <= 20
    assert all(len({choice["index"] for choice in chunk["choices"]}) == len(chunk["choices"]) for chunk in reply.json)
    assert {choice["index"] for chunk in reply.json for choice in chunk["choices"]} == {0, 1, 2, 3}


def test_the_role_comes_once_for_each_answer_and_the_reason_last(server: LiveServer) -> None:
    reply = server.chat("roles", stream=True, n=2, max_tokens=5)
    for index in (0, 1):
        own = [choice for chunk in reply.json for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_the_answer_ends_at_once_and_the_connection_goes_on(server: LiveServer) -> None:
    connection = server.open("/v1/chat/completions", {**LONG, "max_tokens": 3, "stream": True})
    with connection:
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        assert chunks(content).endswith(b"data: [DONE]\n\n")
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    server.counts[End.LENGTH] += 1
    server.num_prompts += 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_http_1_0_knows_no_chunks(server: LiveServer, is_streamed: bool) -> None:
    """What nginx speaks to a server unless it is told otherwise. An answer without a length ends with its connection."""
    fields = {"model": "smollm2-135m", "max_tokens": 5, "temperature": 0, "stream": is_streamed}
    body = json.dumps({"messages": [{"role": "user", "content": "old"}], **fields}).encode()
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        connection.sendall(head + b"connection: keep-alive\r\nexpect: 100-continue\r\n\r\n" + body)
        head, _, content = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    if is_streamed:
        parts = content.split(b"\n\n")
        assert parts[-2:] == [b"data: [DONE]", b""]
        told = [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told)
    else:
        text = json.loads(content)["choices"][0]["message"]["content"]
    assert text == server.chat("old", max_tokens=5, temperature=0).text
    server.counts[End.LENGTH] += 1
    server.num_prompts += 1


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_leaves_frees_its_pages_within_a_second(slow_server: LiveServer, is_streamed: bool, is_reset: bool, n: int) -> None:
    body = {**LONG, "stream": is_streamed, "n": n}
    if is_streamed:
        connection = slow_server.stream_until("/v1/chat/completions", body, lambda seen: seen.count(b"data: ") >= 2)
    else:
        connection = slow_server.open("/v1/chat/completions", body)
        wait_until(lambda: slow_server.engine._engine.pages.num_in_use > 0)
    if is_reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    slow_server.left()
    watch = Stopwatch()
    wait_until(lambda: not slow_server.engine._engine.has_work and slow_server.engine._engine.pages.num_in_use == 0)
    assert watch.is_within(1.0)


def test_clients_that_leave_while_they_wait(slow_server: LiveServer) -> None:
    """Some run, the others are in the queue; all of them leave, and the next one is served."""
    connections = [slow_server.open("/v1/completions", {"prompt": f"{i}", "max_tokens": 300, "stream": i % 2 == 0}) for i in range(20)]
    wait_until(lambda: slow_server.engine._engine.num_unfinished == 20)
    for connection in connections:
        connection.close()
    slow_server.left(20)
    assert slow_server.chat("next").status == 200


def test_two_hundred_clients_that_leave_in_a_row(server: LiveServer) -> None:
    for index in range(200):
        server.open("/v1/completions", {"prompt": [5, 6, 7, 3 + index], "max_tokens": 400, "stream": index % 3 > 0}).close()
    server.left(200)
    assert server.chat("next").status == 200


@pytest.fixture(scope="module")
def slow_module_server(chat_tokenizer: Tokenizer) -> Any:
    config = Config(log=LogConfig(level="error"), server=ServerConfig(ping_interval_s=0.2))
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.01), config) as server:
        yield server


@pytest.fixture
def slow_server(slow_module_server: LiveServer) -> Any:
    yield slow_module_server
    slow_module_server.after_check()


def test_silence_is_filled_with_comments(chat_tokenizer: Tokenizer) -> None:
    """A step that takes long, at the beginning and in the middle of an answer."""
    config = Config(log=LogConfig(level="error"), server=ServerConfig(ping_interval_s=0.1))
    runner = FailingRunner(talker(chat_tokenizer), before=lambda step: time.sleep(0.5 if step in (1, 4) else 0))
    with live_server(chat_tokenizer, runner, config) as server:
        reply = server.chat("quiet", stream=True)
        assert reply.content.startswith(b": ping\n\n")
        assert reply.content.count(b": ping\n\n") >= 4
        assert b": ping\n\ndata" in reply.content.partition(b"data: {")[2]
        assert len(reply.text) == 8


def test_an_error_on_the_way_is_an_event_and_the_end(chat_tokenizer: Tokenizer) -> None:
    """A row without an id: its stream ends with the error object and without [DONE]; whoever waits for a whole answer gets a 500."""
    is_bad = False
    runner = FailingRunner(talker(chat_tokenizer), without_id=lambda step, row: is_bad and row == 0)
    with live_server(chat_tokenizer, slowed(runner, 0.01)) as server:
        connection = server.stream_until("/v1/chat/completions", {**LONG, "stream": True}, lambda seen: seen.count(b"data: ") >= 3)
        is_bad = True
        content = b""
        watch = Stopwatch()
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        assert watch.is_within(1.0)
        connection.close()
        server.counts[End.FAILED] += 1
        server.num_unsure += 1
        *_, last = chunks(b"\r\n\r\n" + content).strip().split(b"\n\n")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        whole = server.chat("and whole")
        assert (whole.status, whole.error["code"], whole.headers["x-should-retry"]) == (500, "request_failed", "false")
        is_bad = False
        assert server.chat("others go on").status == 200


def test_an_engine_that_dies_tells_everybody(chat_tokenizer: Tokenizer) -> None:
    is_dead = False

    def before(_: int) -> None:
        time.sleep(0.01)
        if is_dead:
            raise ZeroDivisionError("secret/path.py")

    with live_server(chat_tokenizer, FailingRunner(talker(chat_tokenizer), before=before)) as server:
        connection = server.stream_until("/v1/chat/completions", {**LONG, "stream": True}, lambda seen: seen.count(b"data: ") >= 3)
        is_dead = True
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        connection.close()
        server.counts[End.FAILED] += 1
        server.num_unsure += 1
        assert b'"code":"engine_dead"' in content
        assert b"secret" not in content
        later = server.chat("too late")
        assert (later.status, later.error["code"]) == (503, "engine_dead")


def test_bad_parameters_of_a_stream_are_an_answer_of_their_own(server: LiveServer) -> None:
    for fields in ({"n": 0}, {"max_tokens": 10_000}, {"temperature": -1}, {"logit_bias": {"99999": 1}}, {"stop_token_ids": [-1]}):
        reply = server.chat("x", stream=True, **fields)
        assert (reply.status, reply.headers["content-type"]) == (400, "application/json")


def test_a_client_that_does_not_read_is_bounded_and_dropped(chat_tokenizer: Tokenizer) -> None:
    """Its events are not even made while it does not read; the engine goes on for others, and its time runs out."""
    config = Config(log=LogConfig(level="error"), server=ServerConfig(slow_client_timeout_s=0.5))
    runner = slowed(talker(chat_tokenizer, max_model_len=8192, num_pages=600), 0.0005)
    with live_server(chat_tokenizer, runner, config) as server:
        body = {**LONG, "max_tokens": 7000, "stream": True, "logprobs": True, "top_logprobs": 20}
        connection = server.open("/v1/chat/completions", body, receive_buffer=4096)
        wait_until(lambda: server.engine._engine.num_unfinished == 1)
        assert server.chat("neighbour").status == 200
        watch = Stopwatch()
        wait_until(lambda: server.service.ledger.num_open == 0)
        assert watch.is_within(2.0), "its time runs out long before that of the default"
        server.left()
        connection.close()


def test_a_slow_reader_gets_everything_in_fewer_events(chat_tokenizer: Tokenizer) -> None:
    runner = slowed(talker(chat_tokenizer, max_model_len=8192, num_pages=600), 0.0005)
    config = Config(log=LogConfig(level="error"), server=ServerConfig(max_unsent=64 * KIB))
    with live_server(chat_tokenizer, runner, config) as server:
        body = {**LONG, "max_tokens": 250, "logprobs": True, "top_logprobs": 20}
        whole = server.post("/v1/chat/completions", body)
        connection = server.open("/v1/chat/completions", {**body, "stream": True}, receive_buffer=4096)
        wait_until(lambda: server.engine._engine.num_unfinished == 1)
        wait_until(lambda: server.engine._engine.num_unfinished == 0)
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        connection.close()
        server.counts[End.LENGTH] += 1
        server.num_prompts += 1
        made = [json.loads(part.removeprefix(b"data: ")) for part in chunks(content).split(b"\n\n") if part.startswith(b"data: {")]
        assert len(made) < 200
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in made) == whole.text
        logprobs = [entry for chunk in made for entry in chunk["choices"][0]["logprobs"]["content"]]
        assert logprobs == whole.json["choices"][0]["logprobs"]["content"]
        wait_until(lambda: server.service.ledger.num_open == 0)
        tokens = [len(chunk["choices"][0]["logprobs"]["content"]) for chunk in made]
        assert sum(tokens) == 250
        (answered,) = [event for event in server.log.of(events.HttpAnswered) if event.num_merged]
        assert answered.num_merged == sum(number - 1 for number in tokens if number)
        assert server.figures()["jaxpaged_http_merged_tokens_total"] == answered.num_merged


def test_a_step_wakes_the_event_loop_once_and_an_event_is_one_write(chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the HTTP layer costs hangs on these two numbers; scripts/bench_http.py has the seconds."""
    calls: Counter[str] = Counter()
    real_call, real_write = asyncio.BaseEventLoop.call_soon_threadsafe, ChunkWriter.write

    def call(loop: Any, callback: Any, *rest: Any, **options: Any) -> Any:
        if threading.current_thread().name == "jaxpaged-engine":
            calls["wake-up"] += 1
        return real_call(loop, callback, *rest, **options)

    def write(writer: ChunkWriter, data: bytes) -> None:
        calls["write"] += 1
        calls["event"] += data.count(b"\n\n")
        real_write(writer, data)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", call)
    monkeypatch.setattr(ChunkWriter, "write", write)
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.002)) as server:
        with_many_clients(8, lambda index: server.chat(f"{index}", stream=True, max_tokens=40), 8)
        with_many_clients(8, lambda index: server.complete(f"{index}", stream=True, max_tokens=40), 8)
        # Nobody is woken by a step that gave no token.
        wait_until(lambda: not server.engine._engine.has_work)
        assert 40 <= calls["wake-up"] <= len(server.log.of(events.StepFinished))
    assert 200 <= calls["write"] == calls["event"] <= 16 * 40


@given(st.text(max_size=50))
def test_an_event_of_a_text_is_what_the_whole_would_be(text: str) -> None:
    def chunk(content: str) -> bytes:
        choice = ChatChunkChoice(index=0, delta=Delta(content=content))
        return event(ChatChunk(id="x", created=1, model='"a"', choices=[choice], system_fingerprint="y", usage=None))

    made = TextEvent(chunk).with_text(text)
    assert made == chunk(text)
    assert json.loads(made.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("more", [{"stream_options": {"include_usage": True}}, {"timings": True}, {"echo": True}, {}])
def test_events_around_a_text_are_those_that_are_made_one_by_one(slow_server: LiveServer, path: str, more: dict[str, Any]) -> None:
    """Asked for ids of tokens, nothing is made once for all events of a stream."""
    if "chat" in path:
        body = {**LONG, "max_tokens": 30, "stream": True, **{key: value for key, value in more.items() if key != "echo"}}
    else:
        body = {"prompt": "go on", "max_tokens": 30, "temperature": 0, "stream": True, **more}

    def forms(**fields: bool) -> list[Any]:
        """Of the events, in order: all but what differs between two answers, and texts."""
        found: list[Any] = []
        for chunk in slow_server.post(path, {**body, **fields}).json:
            del chunk["id"], chunk["created"]
            chunk.pop("prompt_token_ids", None)
            for name in ("timings", "usage"):
                if chunk.get(name):
                    chunk[name] = sorted(chunk[name])
            for choice in chunk["choices"]:
                for name in ("token_ids", "prompt_token_ids"):
                    choice.pop(name, None)
                part = choice.get("delta", choice)
                part["text" if part is choice else "content"] = "..."
            if chunk not in found:
                found.append(chunk)
        return found

    plain = forms()
    assert len(plain) >= 2
    assert plain == forms(return_token_ids=True)


def test_characters_of_several_tokens_arrive_whole(chat_tokenizer: Tokenizer) -> None:
    text = "naïve – 東京タワー 🧑🏽‍🚀 नमस्ते ď"
    ids = [id_of(chat_tokenizer, bytes([byte])) for byte in text.encode()]
    runner = talker(chat_tokenizer)
    runner.next_id = follow({(): [*ids, 2]})
    prompt = [5, 6, 7]
    runner.next_id = follow({tuple(prompt): [*ids, 2]})
    with live_server(chat_tokenizer, runner) as server:
        whole = server.complete(prompt, max_tokens=200)
        assert (whole.text, whole.json["choices"][0]["finish_reason"]) == (text, "stop")
        streamed = server.complete(prompt, max_tokens=200, stream=True)
        assert streamed.text == text
        assert all("\ufffd" not in choice["text"] for chunk in streamed.json for choice in chunk["choices"])
        told = server.complete(prompt, max_tokens=200, logprobs=3)
        assert told.text == text
