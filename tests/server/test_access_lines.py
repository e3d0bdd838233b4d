"""Every request over HTTP has one line: its id, its status and why; also one that no route ever had."""

from typing import Final

import pytest

from jaxpaged import events
from jaxpaged.config import KIB, Config, ServerConfig
from jaxpaged.log_format import Level, LogFormatter
from server.app import create_app
from server.ledger import HEALTH_PATHS, METRICS_PATH
from tests.event_log import EventLog
from tests.server.door_server import door_server, request_bytes, wait_until
from tests.server.scripted_llm import scripted_llm

pytestmark = pytest.mark.jax

PATIENT = ServerConfig(max_body=16 * KIB)
IMPATIENT = ServerConfig(header_timeout_s=1.5, body_timeout_s=0.5)

HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nx-request-id: mine\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "method", "status", "code"),
    [
        (b"nonsense\r\n\r\n", "", 400, "bad_request"),
        (b"BREW / HTTP/1.1\r\n\r\n", "", 501, "method_not_implemented"),
        (HEAD + b"bad header\r\n\r\n", "POST", 400, "bad_request"),
        (HEAD, "POST", 408, "request_too_slow"),
        (HEAD + b"x: " + b"y" * 17_000, "POST", 431, "headers_too_large"),
        (HEAD + b"x: y\r\n" * 101, "POST", 431, "headers_too_large"),
        (HEAD + b"content-length: 9\r\n\r\nab", "POST", 408, "request_too_slow"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "POST", 400, "bad_request"),
        (HEAD + b"content-length: 999999\r\n\r\n", "POST", 413, "body_too_large"),
    ],
)
def test_what_is_refused_has_one_line_of_its_id_status_and_reason(sent: bytes, method: str, status: int, code: str) -> None:
    log = EventLog()
    with door_server(Config(server=IMPATIENT if status == 408 else PATIENT), log=log) as server:
        connection = server.connect()
        connection.send(sent)
        answer = connection.read()
        assert (answer.status, answer.code) == (status, code)
        wait_until(lambda: bool(log.of(events.HttpAnswered)))
    (event,) = log.of(events.HttpAnswered)
    assert (event.method, event.status, event.code) == (method, status, code)
    assert event.request_id == answer.headers["x-request-id"]
    assert (event.request_id == "mine") == (b"mine" in sent)
    (line,) = LogFormatter().lines(event)
    assert line.level is Level.INFO
    assert f"request {event.request_id} " in line.text
    assert f"{status} (" in line.text
    assert f"{code})" in line.text


def test_who_finds_no_room_has_a_line() -> None:
    """Also who is not even told, because too many were told already."""
    log = EventLog()
    with door_server(Config(server=ServerConfig(max_connections=1)), log=log) as small:
        held = small.connect()
        assert held.request("GET", "/livez").status == 200
        told = small.connect()
        assert told.read().code == "too_many_connections"
        small.connect()
        wait_until(lambda: len(log.of(events.HttpAnswered)) == 3)
    (routine, *refused) = log.of(events.HttpAnswered)
    assert (routine.path, routine.is_routine) == ("/livez", True)
    assert [(event.method, event.status, event.code) for event in refused] == [
        ("", 503, "too_many_connections"),
        ("", 0, "too_many_connections"),
    ]


def test_garbage_behind_a_request_has_a_line_too() -> None:
    log = EventLog()
    with door_server(log=log) as server:
        connection = server.connect()
        connection.send(request_bytes("GET", "/slow?seconds=0.1") + b"nonsense\r\n\r\n")
        assert connection.read().status == 200
        wait_until(lambda: len(log.of(events.HttpAnswered)) == 2)
    assert sorted((event.path, event.status, event.code) for event in log.of(events.HttpAnswered)) == [
        ("", 0, "bad_request"),
        ("/slow", 200, ""),
    ]


def test_options_tells_of_head_where_get_is() -> None:
    with door_server(create_app=create_app) as server:  # type: ignore[arg-type]
        methods = {
            "/v1/models": "GET, HEAD, OPTIONS",
            "/v1/models/a/b": "GET, HEAD, OPTIONS",
            "/livez": "GET, HEAD, OPTIONS",
            "/v1/completions": "OPTIONS, POST",
            "/v1/responses/resp_1": "DELETE, GET, HEAD, OPTIONS",
        }
        for path, allowed in methods.items():
            connection = server.connect()
            connection.send(request_bytes("OPTIONS", path))
            answer = connection.read(has_body=False)
            assert (answer.status, answer.headers["allow"]) == (204, allowed)
            assert server.ask("PUT", path).headers["allow"] == allowed
        assert server.ask("OPTIONS", "/nothing").status == 404


def test_every_route_has_a_line_and_those_of_machines_are_quiet() -> None:
    log = EventLog()
    with door_server(engine=lambda service: scripted_llm(service.config, [service.emit]), create_app=create_app, log=log) as server:  # type: ignore[arg-type]
        paths = sorted({route.path for route in create_app(server.service).routes if "{" not in route.path} | {"/nothing"})
        for path in paths:
            connection = server.connect()
            connection.send(request_bytes("GET", path))
            connection.read_until(b"\r\n\r\n")
            connection.close()  # some answers are streams without an end
        wait_until(lambda: len(log.of(events.HttpAnswered)) == len(paths))
    loud, quiet = set(), set()
    for event in log.of(events.HttpAnswered):
        (line,) = LogFormatter().lines(event)
        assert f"request {event.request_id} GET " in line.text
        assert f" {event.status}" in line.text
        (loud if line.level is Level.INFO else quiet).add(event.path)
    assert quiet == HEALTH_PATHS | {METRICS_PATH}
    assert {"/v1/models", "/version", "/load", "/openapi.json", ""} <= loud
