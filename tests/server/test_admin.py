"""Operators' calls: on a socket of their own, never on the public port."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config, ServerConfig
from server.admin import create_admin_app
from server.app import create_app
from server.front import behind_admin_front
from server.service import Service
from tests.event_log import EventLog
from tests.server.door_server import DoorServer, door_server
from tests.server.scripted_llm import scripted_llm

pytestmark = pytest.mark.jax


@contextmanager
def admin_server(config: Config | None = None, keys: tuple[str, ...] = (), log: EventLog | None = None) -> Iterator[DoorServer]:
    """The app for operators over an engine, behind its own front."""
    with door_server(
        config,
        engine=lambda service: scripted_llm(service.config, [service.emit]),
        create_app=create_admin_app,  # type: ignore[arg-type]
        keys=keys,
        log=log,
        front=behind_admin_front,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def admin() -> Iterator[DoorServer]:
    """Open to whoever reaches it."""
    with admin_server() as server:
        yield server


def test_pause_sleep_and_back(admin: DoorServer) -> None:
    engine: Any = admin.service.engine
    for call, is_paused in (
        ("/pause?mode=keep&clear_cache=false", True),
        ("/resume", False),
        ("/sleep?level=0", True),
        ("/wake_up?tags=scheduling&tags=weights", False),
        ("/pause", True),
        ("/reset_prefix_cache?reset_running_requests=true", True),
        ("/resume", False),
    ):
        answer = admin.ask("POST", call)
        assert (answer.status, answer.json) == (200, {"done": True}), call
        assert admin.ask("GET", "/is_paused").json == {"is_paused": is_paused}, call
    assert admin.ask("GET", "/is_sleeping").json == {"is_sleeping": False}
    assert engine._engine.control.is_paused is False


@pytest.mark.parametrize(
    ("call", "status", "param"),
    [
        ("/pause?mode=now", 400, "mode"),
        ("/pause?clear_cache=1", 400, "clear_cache"),
        ("/pause?cache=true", 400, "cache"),
        ("/sleep?level=7", 400, "level"),
        ("/sleep?level=-1", 400, "level"),
        ("/sleep?level=deep", 400, "level"),
        ("/wake_up?tags=all", 400, "tags"),
        ("/reset_prefix_cache?x=1", 400, "x"),
        ("/nothing", 404, None),
    ],
)
def test_what_is_not_understood_changes_nothing(admin: DoorServer, call: str, status: int, param: str | None) -> None:
    answer = admin.ask("POST", call)
    assert (answer.status, answer.json["error"]["param"]) == (status, param)
    assert admin.ask("GET", "/is_paused").json == {"is_paused": False}


@pytest.mark.parametrize("call", ["/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile"])
def test_get_does_not_change_anything(admin: DoorServer, call: str) -> None:
    answer = admin.ask("GET", call)
    assert (answer.status, answer.code, answer.headers["allow"]) == (405, "method_not_allowed", "OPTIONS, POST")


def test_every_error_is_of_our_shape(admin: DoorServer) -> None:
    """Also those of the framework, and those that no route has."""
    body = b"x" * (4 * 2**20 + 1)
    for answer, status, code in (
        (admin.ask("POST", "/nothing"), 404, "not_found"),
        (admin.ask("DELETE", "/is_paused"), 405, "method_not_allowed"),
        (admin.ask("POST", "/pause", body), 413, "body_too_large"),
        (admin.ask("POST", "/start_profile"), 400, "bad_request"),
    ):
        assert (answer.status, set(answer.json), answer.code) == (status, {"error"}, code)
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert "x-request-id" in answer.headers


PATHS = {route.path: route.methods for route in create_admin_app(Service(Config())).routes}  # type: ignore[attr-defined]


def test_with_keys_every_path_asks_for_one() -> None:
    log = EventLog()
    with admin_server(keys=("sk-1", "sk-2"), log=log) as server:
        for path in (*PATHS, "/nothing", "/health", "/metrics"):
            for method in ("GET", "POST", "OPTIONS"):
                for headers in ({}, {"authorization": "Bearer sk-3"}):
                    answer = server.ask(method, path, **headers)
                    assert (answer.status, answer.code) == (401, "invalid_api_key"), (method, path)
        assert server.ask("POST", "/pause", authorization="Bearer sk-2").status == 200
        assert server.ask("POST", "/resume", authorization="Bearer sk-1").status == 200
    assert [event.state for event in log.of(events.HealthChanged) if event.state == "paused"] == ["paused"]


@pytest.mark.parametrize("header", ["origin", "sec-fetch-site"])
@pytest.mark.parametrize("keys", [(), ("sk-1",)])
def test_a_web_page_may_call_nothing(header: str, keys: tuple[str, ...]) -> None:
    """Not even one that may call the public port, nor one that the browser takes for the server's own (DNS rebinding)."""
    config = Config(server=ServerConfig(allowed_origins=("https://app.example",)))
    with admin_server(config, keys) as server:
        for path, methods in PATHS.items():
            for method in methods:
                value = "https://app.example" if header == "origin" else "same-origin"
                answer = server.ask(method, path, **{header: value}, authorization="Bearer sk-1", access_control_request_method="POST")
                assert (answer.status, answer.code) == (403, "forbidden"), (method, path)
                assert "access-control-allow-origin" not in answer.headers
        assert server.ask("GET", "/is_paused", authorization="Bearer sk-1").json == {"is_paused": False}


def test_a_trace_goes_into_the_operators_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    with admin_server(Config(server=ServerConfig(profile_dir=str(folder)))) as server:
        for query, param in (("folder=/tmp/x", "folder"), ("profile_dir=..", "profile_dir")):
            answer = server.ask("POST", f"/start_profile?{query}")
            assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert server.ask("POST", "/start_profile", b'{"folder": "/tmp/x"}').status == 400
        answer = server.ask("POST", "/stop_profile")
        assert (answer.status, answer.json["error"]["message"]) == (400, "no trace is being made")
        assert not folder.exists()
        assert server.ask("POST", "/start_profile").json == {"done": True}
        answer = server.ask("POST", "/start_profile")
        assert (answer.status, answer.json["error"]["message"]) == (400, "a trace is being made already: stop it first")
        assert server.ask("POST", "/stop_profile").json == {"done": True}
        (trace,) = folder.rglob("*.xplane.pb")
        assert trace.stat().st_size > 0
        assert server.ask("POST", "/stop_profile").status == 400


def test_before_the_model_is_there() -> None:
    with door_server(create_app=create_admin_app) as server:  # type: ignore[arg-type]
        answer = server.ask("POST", "/pause")
        assert (answer.status, answer.code) == (503, "server_starting")


def test_none_of_them_is_on_the_public_app() -> None:
    service = Service(Config())
    paths = {route.path for route in create_admin_app(service).routes}
    assert len(paths) == 9
    assert paths & {route.path for route in create_app(service).routes} == set()


def test_the_public_port_does_not_know_them(tmp_path: Path) -> None:
    with door_server(create_app=create_app) as server:  # type: ignore[arg-type]
        for path in ("/pause", "/sleep", "/reset_prefix_cache"):
            assert server.ask("POST", path).status == 404
    assert not any(listener.family == socket.AF_UNIX for listener in server._sockets)
