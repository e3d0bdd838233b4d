"""Operators' calls: on a socket of their own, never on the public port."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import Config
from server.admin import create_admin_app
from server.app import create_app
from server.service import Service
from tests.server.door_server import DoorServer, door_server
from tests.server.scripted_llm import scripted_llm

pytestmark = pytest.mark.jax


@pytest.fixture(scope="module")
def admin() -> Iterator[DoorServer]:
    """The app for operators over an engine."""
    with door_server(engine=lambda service: scripted_llm(service.config, [service.emit]), create_app=create_admin_app) as server:  # type: ignore[arg-type,return-value]
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


def test_get_does_not_change_anything(admin: DoorServer) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"):
        assert admin.ask("GET", path).status == 405


def test_before_the_model_is_there() -> None:
    with door_server(create_app=create_admin_app) as server:  # type: ignore[arg-type]
        answer = server.ask("POST", "/pause")
        assert (answer.status, answer.code) == (503, "server_starting")


def test_none_of_them_is_on_the_public_app() -> None:
    service = Service(Config())
    paths = {route.path for route in create_admin_app(service).routes}
    assert len(paths) == 7
    assert paths & {route.path for route in create_app(service).routes} == set()


def test_the_public_port_does_not_know_them(tmp_path: Path) -> None:
    with door_server(create_app=create_app) as server:  # type: ignore[arg-type]
        for path in ("/pause", "/sleep", "/reset_prefix_cache"):
            assert server.ask("POST", path).status == 404
    assert not any(listener.family == socket.AF_UNIX for listener in server._sockets)
