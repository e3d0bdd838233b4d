"""What is told of failures: one body, the right status, and whether to come again."""

import json
import logging
import threading
from typing import Any

import pytest

from jaxpaged.config import Config, LogConfig, SchedulerConfig
from jaxpaged.tokenizer import Tokenizer
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, Reply, live_server, slowed, talker
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.jax

CHAT = "/v1/chat/completions"
LOG = LogConfig(level="error")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 400, "invalid_value"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_paths_and_methods(server: LiveServer, method: str, path: str, status: int, code: str) -> None:
    reply = server.request(method, path, b"{}" if method in ("POST", "PUT") else None)
    if path.endswith("completions/"):
        server.counts["rejected"] += 1
    assert (reply.status, reply.error["code"]) == (status, code)
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (CHAT, "OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/a/b/", "GET, HEAD, OPTIONS"),
        ("/v1/responses/x", "DELETE, GET, HEAD, OPTIONS"),
        ("/v1/responses/x/cancel", "OPTIONS, POST"),
        ("/health", "GET, HEAD, OPTIONS"),
    ],
)
def test_methods_that_a_path_takes_are_told(server: LiveServer, path: str, allowed: str) -> None:
    reply = server.request("PATCH", path)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("media_type", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "", "json"])
def test_other_types_of_bodies(server: LiveServer, media_type: str) -> None:
    reply = server.request("POST", CHAT, b'{"messages":[]}', {"content-type": media_type})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON", 'application/json;charset="UTF-8"'])
def test_spellings_of_json(server: LiveServer, media_type: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "é"}], "max_tokens": 1}).encode()
    assert server.request("POST", CHAT, body, {"content-type": media_type}).status == 200
    assert server.request("POST", CHAT, body, {"content-type": "application/json; charset=utf-16"}).status == 415


GOOD = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1%s}'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "valid JSON"),
        (b"{", "valid JSON"),
        (b"{}", "messages is missing"),
        (b"null", "expected object"),
        (b"[]", "expected object"),
        (b'"x"', "expected object"),
        (GOOD % b",", "valid JSON"),
        (GOOD % b"" + b"x", "valid JSON"),
        (b"\xef\xbb\xbf" + GOOD % b"", "valid JSON"),
        ((GOOD % b"").decode().encode("utf-16"), "valid JSON"),
        (GOOD.replace(b'"x"', b'"\xff"') % b"", "valid JSON"),
        (GOOD.replace(b'"x"', b'"\\ud83d"') % b"", "surrogate"),
        (GOOD.replace(b'"x"', b'"a\\udc00b"') % b"", "surrogate"),
        (GOOD.replace(b'"user"', b'"\\ud83d"') % b"", "surrogate"),
        (GOOD % b',"model":"\\ud83d"', "surrogate"),
        (GOOD % b',"stop":["\\ud83d"]', "surrogate"),
        (GOOD % b',"temperature":NaN', "valid JSON"),
        (GOOD % b',"temperature":Infinity', "valid JSON"),
        (GOOD % b',"temperature":1e400', "temperature: number out of range"),
        (GOOD % (b',"metadata":' + b"[" * 10_000 + b"]" * 10_000), "nested too deeply"),
        (GOOD % (b',"nobody":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000), "nested too deeply"),
        (GOOD % (b',"chat_template_kwargs":{"a":' + b"[" * 900 + b"]" * 900 + b"}"), "nested"),
        (b"[" * 60_000, "expected object"),
        (b"[" * 100_000, "limits.max_body_parts"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_no_body(server: LiveServer, body: bytes, says: str, is_streamed: bool) -> None:
    """O-31, O-34."""
    if is_streamed:
        body = body.replace(b'"max_tokens":1', b'"max_tokens":1,"stream":true')
    watch = Stopwatch()
    reply = server.post(CHAT, body)
    assert watch.is_within(1.0)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert says in reply.error["message"]


def test_unknown_fields_are_named_once(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    fields = {f"field_{index:02d}": index for index in range(14)} | {
        "with space": 1,
        "x" * 65: 1,
        "line\nbreak": 1,
        "stream_options": {"odd": 1},
    }
    with caplog.at_level(logging.WARNING, "jaxpaged.server"):
        replies = [server.chat("x", **fields) for _ in range(2)]
    for reply in replies:
        assert reply.status == 200
        names = reply.headers["x-jaxpaged-ignored"].split(",")
        assert names == [f"field_{index:02d}" for index in range(10)]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 10
    assert all("\n" not in line for line in told)
    assert "x-jaxpaged-ignored" not in server.chat("x").headers
    assert server.chat("x", stream=True, stream_options={"odd": 1}).headers["x-jaxpaged-ignored"] == "stream_options.odd"


def test_nulls_are_the_same_as_nothing(server: LiveServer) -> None:
    from server.protocol.fields import CHAT as table

    nulls = {field.name: None for field in table if field.name not in ("messages", "max_tokens", "temperature")}
    assert server.chat("null", **nulls).text == server.chat("null").text


def in_background(ask: Any) -> tuple[threading.Thread, list[Reply]]:
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(ask()))
    thread.start()
    return thread, replies


def test_a_full_queue_a_long_wait_and_a_long_answer(chat_tokenizer: Tokenizer) -> None:
    policy = SchedulerConfig(max_num_queued_requests=1, queue_timeout_s=1.0, request_timeout_s=2.0)
    runner = slowed(talker(chat_tokenizer, max_num_seqs=1), 0.01)
    with live_server(chat_tokenizer, runner, Config(log=LOG, scheduler=policy)) as server:
        first, long_replies = in_background(lambda: server.chat("long", max_tokens=400))
        wait_until(lambda: server.engine._engine.scheduler.num_running == 1)
        second, waited = in_background(lambda: server.chat("waits", max_tokens=1))
        wait_until(lambda: server.engine._engine.scheduler.num_waiting == 1)
        for is_streamed in (False, True):
            full = server.chat("full", stream=is_streamed)
            assert (full.status, full.error["code"], full.error["type"]) == (429, "queue_full", "rate_limit_error")
        second.join()
        assert (waited[0].status, waited[0].error["code"]) == (503, "queue_timeout")
        first.join()
        assert (long_replies[0].status, long_replies[0].error["code"]) == (504, "request_timeout")
        streamed = server.chat("long", max_tokens=400, stream=True)
        assert (streamed.status, streamed.json[-1]["error"]["code"]) == (200, "request_timeout")
        assert b"[DONE]" not in streamed.content
        assert sum(len(chunk["choices"]) for chunk in streamed.json[:-1]) > 5


def test_requests_that_an_operator_ends(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.01)) as server:
        thread, replies = in_background(lambda: server.chat("ends", max_tokens=400))
        wait_until(lambda: server.engine._engine.scheduler.num_running == 1)
        for request_id in list(server.engine._engine.unfinished_ids):
            server.engine.abort(request_id)
        thread.join()
        assert (replies[0].status, replies[0].error["code"]) == (503, "request_aborted")


def test_a_server_that_drains(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer) as server:
        server.service.drain()
        for reply in (server.chat("x"), server.chat("x", stream=True), server.get("/v1/models"), server.post("/tokenize", {"prompt": "x"})):
            assert (reply.status, reply.error["code"]) == (503, "server_draining")
        assert server.get("/docs").status == 200


def test_a_fault_of_ours_says_nothing_of_the_inside(chat_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with live_server(chat_tokenizer) as server:
        server.engine.get_tokenizer = lambda: 1 / 0  # type: ignore[method-assign]
        reply = server.chat("secret text")
        assert (reply.status, reply.error["type"], reply.error["code"]) == (500, "server_error", "request_failed")
        assert "ZeroDivision" not in reply.content.decode()
        (record,) = [record for record in caplog.records if record.name == "jaxpaged.server"]
        assert reply.headers["x-request-id"] in record.getMessage()
        assert record.exc_info is not None
        assert "secret text" not in record.getMessage()
        server.num_unsure += 1
        assert server.chat("x", stream=True).status == 500
        assert len(server.tracebacks) == 2
        server.tracebacks.clear()
