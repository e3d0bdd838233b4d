"""API keys and other origins: nothing but health is open to who has no key, and no page may call unless it is named."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.cli import build_parser
from jaxpaged.cli_parser import load_options
from jaxpaged.commands import by_name
from jaxpaged.config import Config, LogConfig, MetricsConfig, ServerConfig
from jaxpaged.errors import ConfigError
from server.app import create_app
from server.auth import HEALTH_PATHS, ApiKeys, read_keys
from server.dashboard.files import FILE_PATHS
from tests.event_log import EventLog
from tests.server.door_server import DoorServer, door_server, request_bytes, wait_until

pytestmark = pytest.mark.jax

KEYS = ("sk-first", "sk-second")


@pytest.fixture(scope="module")
def server() -> Iterator[DoorServer]:
    """Two keys; pages of one origin may call."""
    with door_server(Config(server=ServerConfig(allowed_origins=("https://app.example/",))), keys=KEYS) as server:
        yield server


@pytest.mark.parametrize("path", sorted(HEALTH_PATHS))
def test_health_needs_no_key(server: DoorServer, path: str) -> None:
    assert server.ask("GET", path).status in (200, 503)
    assert server.ask("HEAD", path).status in (200, 503)
    assert server.ask("POST", path, b"{}").status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/version",
        "/load",
        "/v1/models",
        "/echo",
        "/big?size=1",
        "/",
        "/none",
        "//livez",
        "/health/",
        "/livez/../metrics",
        "/v1/../metrics",
        "/livez%2f",
        "/LIVEZ",
        "/livez;x",
        "/schema/openapi.json",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE"])
def test_everything_else_does(server: DoorServer, path: str, method: str) -> None:
    answer = server.ask(method, path)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        assert answer.json["error"]["type"] == "authentication_error"
        assert answer.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer sk-first", 200),
        ("bearer sk-second", 200),
        ("Bearer  sk-first ", 200),
        ("Bearer SK-FIRST", 401),
        ("Bearer sk-firs", 401),
        ("Bearer sk-first2", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("sk-first", 401),
        ("Basic sk-first", 401),
        ("Bearer \xff", 401),
    ],
)
def test_keys(server: DoorServer, header: str, status: int) -> None:
    connection = server.connect()
    connection.send(f"GET /version HTTP/1.1\r\nhost: x\r\nauthorization: {header}\r\n\r\n".encode("latin-1"))
    answer = connection.read()
    assert answer.status == status
    assert b"sk-" not in answer.body


def test_every_route_of_the_whole_app_asks_for_a_key() -> None:
    with door_server(create_app=create_app, keys=KEYS) as whole:  # type: ignore[arg-type]
        routes = {re.sub(r"\{[^}]*\}", "x", route.path) for route in create_app(whole.service).routes}
        assert len(routes) > 15
        connection = whole.connect()
        for path in sorted(routes):
            statuses = {connection.request(method, path, key).status for method in ("GET", "POST") for key in (None, b"{}")}
            assert statuses <= ({401, 503, 200} if path in HEALTH_PATHS | FILE_PATHS else {401}), path


def test_a_body_is_not_read_before_the_key(server: DoorServer) -> None:
    connection = server.connect()
    connection.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n")
    assert connection.read().status == 401


def test_keys_of_the_environment_and_of_a_file_count_together(tmp_path: Path) -> None:
    """Several of each, as the command line of `serve` reads them; a flag's take the place of the environment's."""
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-3\n\n sk-4 \n", encoding="utf-8")
    file.chmod(0o600)
    env = {"JAXPAGED_API_KEY": "sk-1,sk-2", "JAXPAGED_SERVER__API_KEY_FILE": str(file)}

    def keys_of(*arguments: str) -> set[str]:
        config = load_options(build_parser(by_name()["serve"]).parse(list(arguments)), env).config
        keys = read_keys(config)
        with door_server(config, keys=(*config.server.api_key, "sk-3", "sk-4")) as live:
            answered = {f"sk-{n}": live.ask("GET", "/version", authorization=f"Bearer sk-{n}").status for n in range(1, 7)}
        known = {f"sk-{n}" for n in range(1, 7) if keys.has(f"sk-{n}".encode())}
        assert known == {key for key, status in answered.items() if status == 200}
        assert not any(key in repr(config) for key in ("sk-1", "sk-2"))
        return known

    assert keys_of() == {"sk-1", "sk-2", "sk-3", "sk-4"}
    assert keys_of("--api-key", "sk-5", "sk-6") == {"sk-5", "sk-6", "sk-3", "sk-4"}


def test_every_key_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether and where a key is found must not show in the time it takes."""
    compared: list[bytes] = []
    keys = ApiKeys(["a", "b", "c"])
    monkeypatch.setattr("server.auth.hmac.compare_digest", lambda one, other: compared.append(one) or one == other)
    assert [keys.has(b"a"), keys.has(b"c"), keys.has(b"d")] == [True, True, False]
    assert len(compared) == 9
    assert {len(digest) for digest in compared} == {32}
    assert not ApiKeys([])


def test_metrics_may_be_public() -> None:
    with door_server(Config(metrics=MetricsConfig(public=True)), keys=KEYS) as server:
        assert server.ask("GET", "/metrics").status == 200
        assert server.ask("GET", "/version").status == 401


def test_without_keys_everything_is_open() -> None:
    log = EventLog()
    with door_server(Config(log=LogConfig(prompts=False)), log=log) as server:
        assert server.ask("POST", "/v1/completions", b'{"prompt": "my secret"}').status == 503
        wait_until(lambda: len(log) == 1)
        assert "my secret" not in repr(log)
    with door_server(Config(log=LogConfig(prompts=True)), log=log) as server:
        server.ask("POST", "/v1/completions", b'{"prompt": "my secret"}')
        wait_until(lambda: len(log) == 2)
        assert "my secret" in repr(log)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Config:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return Config(server=ServerConfig(api_key=("sk-0",), api_key_file=str(path)))


def test_keys_of_a_file_and_of_an_option(tmp_path: Path) -> None:
    keys = read_keys(key_file(tmp_path, "# ours\nsk-1\n\n  sk-2  \r\n"))
    assert [keys.has(key) for key in (b"sk-0", b"sk-1", b"sk-2", b"# ours", b"")] == [True, True, True, False, False]
    assert not read_keys(Config())


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601, 0o620, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"is open to others \(mode {mode:03o}\); run chmod 600"):
        read_keys(key_file(tmp_path, "sk-1", mode))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no key"),
        ("# none\n\n", "holds no key"),
        ("sk 1 \x07", "printable ASCII"),
        ("sk-é", "printable ASCII"),
        ("x" * 2**21, "is over"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_keys(key_file(tmp_path, text))
    assert "sk" not in caught.value.message


def test_other_faults_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the key file"):
        read_keys(Config(server=ServerConfig(api_key_file=str(tmp_path / "none"))))
    with pytest.raises(ConfigError, match="not empty"):
        read_keys(Config(server=ServerConfig(api_key=("",))))
    os.mkdir(tmp_path / "folder")
    with pytest.raises(ConfigError, match="cannot read the key file"):
        read_keys(Config(server=ServerConfig(api_key_file=str(tmp_path / "folder"))))


def test_a_named_page_may_ask_and_call(server: DoorServer) -> None:
    asked = server.ask(
        "OPTIONS",
        "/v1/chat/completions",
        origin="https://app.example",
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )
    assert asked.status == 204
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in asked.headers["access-control-allow-methods"]
    answer = server.ask("GET", "/version", origin="https://app.example", authorization="Bearer sk-first")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = server.ask("GET", "/version", origin="https://app.example")
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://app.example"), "a page can read its refusal"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://app.example.evil", "http://app.example"])
def test_no_other_page_may(server: DoorServer, origin: str) -> None:
    asked = server.ask("OPTIONS", "/version", origin=origin, access_control_request_method="POST")
    assert asked.status == 401
    assert not any(name.startswith("access-control") for name in asked.headers)


def test_cors_is_off_unless_asked_for() -> None:
    with door_server() as server:
        answer = server.ask("GET", "/livez", origin="https://app.example")
        assert not any(name.startswith("access-control") for name in answer.headers)
    with door_server(Config(server=ServerConfig(allowed_origins=("*",)))) as server:
        assert server.ask("GET", "/livez", origin="https://any.example").headers["access-control-allow-origin"] == "*"
        connection = server.connect()
        connection.send(
            request_bytes(
                "OPTIONS", "/x", origin="https://any", access_control_request_method="POST", access_control_request_headers="a\tb"
            )
        )
        assert connection.read(has_body=False).headers["access-control-allow-headers"] == "authorization, content-type"
