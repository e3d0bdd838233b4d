"""B7: what attacks on servers of this kind ask of this one, each as a test (`tests/server/test_connections.py` has header bombs)."""

import builtins
import gzip
import io
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import MIB, Config, LogConfig, ServerConfig
from jaxpaged.sinks import open_log
from jaxpaged.tokenizer import Tokenizer
from server.app import create_app
from server.auth import HEALTH_PATHS
from server.dashboard.files import FILE_PATHS
from server.service import Service
from tests.server.door_server import Connection, DoorServer, door_server, wait_until
from tests.server.live import LiveServer, live_server, slowed, talker
from tests.server.scripted_llm import scripted_llm
from tests.server.traffic import vitals
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    "name", ["tokenize", "messages", "add_generation_prompt", "self", "continue_final_message", "bos_token", "variables"]
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_template_variables_replace_nothing_of_ours(server: LiveServer, name: str, path: str) -> None:
    """A variable of the template is no argument of a function of ours: it is refused, or seen by the template alone."""
    body = (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        if path == CHAT
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    plain = server.post("/tokenize", {"messages": body["messages"]}).json["tokens"]
    for value in (False, True, [], "x", None):
        reply = server.post(path, {**body, "chat_template_kwargs": {name: value}})
        assert reply.status in (200, 400)
        if reply.status == 400:
            assert reply.error["param"] in ("messages", "chat_template_kwargs", f"chat_template_kwargs.{name}", name)
        elif path == "/tokenize":
            assert reply.json["tokens"] == plain


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_templates_of_requests_are_not_run(server: LiveServer, path: str) -> None:
    for template in ("{{ 1 }}", "{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}{% endfor %}"):
        reply = server.post(path, {"messages": [{"role": "user", "content": "x"}], "chat_template": template})
        assert (reply.status, reply.error["param"]) == (400, "chat_template")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
    ids=["never ends", "a gigabyte", "gigabytes in parts", "reaches for Python"],
)
def test_a_servers_own_template_that_runs_away(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, told as 400, and neither health nor a neighbour's stream waits for it."""
    tokenizer = byte_level(source)
    assert tokenizer.chat_template is not None
    with live_server(tokenizer, slowed(talker(tokenizer), 0.005)) as server:
        waits: list[float] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.wait(0.02):
                begun_s = time.monotonic()
                assert server.get("/livez").status == 200
                waits.append(time.monotonic() - begun_s)

        asking = threading.Thread(target=ask)
        asking.start()
        before = vitals().resident_bytes
        begun_s = time.monotonic()
        reply = server.chat("x")
        assert time.monotonic() - begun_s < 15
        is_over.set()
        asking.join()
        assert reply.status == 400
        assert vitals().resident_bytes - before < 200 * MIB
        assert not waits or sorted(waits)[len(waits) // 2] < 0.2
        assert server.complete("neighbour").status == 200


@pytest.fixture
def trap() -> Iterator[tuple[int, list[socket.socket]]]:
    """A port that somebody listens on, and who has called."""
    callers: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)

        yield listener.getsockname()[1], callers
        try:
            callers.append(listener.accept()[0])
        except BlockingIOError:
            pass
        assert callers == [], "somebody called"


def test_no_url_of_a_request_is_ever_opened(
    server: LiveServer, trap: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSRF: URL parts are refused, and serving opens no connection."""
    ours, opened = threading.get_ident(), []
    real_connect, real_lookup = socket.socket.connect, socket.getaddrinfo

    def connect(self: socket.socket, address: Any) -> None:
        if threading.get_ident() != ours:
            opened.append(address)
        real_connect(self, address)

    def lookup(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != ours:
            opened.append(args)
        return real_lookup(*args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    port = trap[0]
    for url in (
        f"http://127.0.0.1:{port}/x.png",
        "http://169.254.169.254/latest/meta-data/",
        f"http://user@127.0.0.1:{port}\\@elsewhere/",
        "file:///etc/passwd",
        f"ftp://localhost:{port}/",
        "data:image/png;base64,AAAA",
        f"//localhost:{port}",
    ):
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "file", "file": {"file_data": url, "file_id": url}},
        ):
            reply = server.chat([{"type": "text", "text": "see"}, part])
            assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
            assert reply.error["param"].startswith("messages[0].content[1]")
    assert server.chat(f"see http://127.0.0.1:{port}/ and [x](http://localhost:{port}/)").status == 200
    assert opened == []


def bomb(layers: int) -> bytes:
    """Zeros, compressed again and again: 10 kB that become 10 MB and more."""
    data = b"0" * (10 * MIB)
    for _ in range(layers):
        data = gzip.compress(data)
    return data


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", bomb(1)),
        ("gzip, gzip", bomb(2)),
        ("deflate", zlib.compress(b"0" * (10 * MIB))),
        ("identity, gzip", bomb(1)),
        ("GZIP", bomb(1)),
    ],
    ids=["gzip", "twice", "deflate", "behind identity", "upper case"],
)
def test_nothing_is_inflated(server: LiveServer, encoding: str, body: bytes) -> None:
    before = vitals().resident_bytes
    reply = server.request("POST", TEXT, body, {"content-encoding": encoding})
    assert (reply.status, reply.error["param"]) == (415, "content-encoding")
    assert vitals().resident_bytes - before < 5 * MIB
    assert server.request("POST", TEXT, body).status == 400, "as JSON it is none"


HOSTILE_NAMES = (
    "a\nb",
    "a\r\nINFO forged line",
    "\x1b[31mred\x1b[0m",
    "nul\x00",
    "\u202egnp.exe",
    '"quoted" and \\',
    "{curly} %s %(x)s",
    "x" * 10_000,
    "é日本🧑",
    "</script>",
)


def test_what_clients_name_cannot_forge_lines(chat_tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names of models, unknown fields, paths and request ids, with all that a log shows of them: one line each, printable."""
    path = tmp_path / "log.txt"
    log = open_log(LogConfig(file=str(path), level="debug"))
    with live_server(chat_tokenizer) as server, caplog.at_level(logging.DEBUG, "jaxpaged"):
        server.service.emit = _both(server.service.emit, log)  # type: ignore[assignment]
        server.service.ledger._emit = server.service.emit
        for name in HOSTILE_NAMES:
            assert server.complete("x", model=name).status == 404
            assert server.complete("x", **{name: 1}).status == 200
            assert server.complete("x", user=name, metadata={name: name}, cache_salt=name[:100]).status == 200
            quoted = "".join(f"%{byte:02x}" for byte in name[:500].encode())
            assert server.get(f"/v1/models/{quoted}").status == 404
            assert server.get(f"/{quoted}").status == 404
            assert (
                server.request("POST", TEXT, {"prompt": "x", "max_tokens": 1}, {"x-request-id": name[:1000].encode().hex()}).status == 200
            )
        wait_until(lambda: server.service.ledger.num_open == 0)
    log.close()
    text = path.read_text()
    lines = text.split("\n")[:-1]
    assert len(lines) >= 5 * len(HOSTILE_NAMES)
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO|WARNING|ERROR) ", line) for line in lines)
    assert all(line.isprintable() and len(line) < 2000 for line in lines)
    assert not re.search(r"forged|gnp|quoted|curly|script", text)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("jaxpaged")]
    assert all(message.isprintable() and len(message) < 2000 for message in messages)


def _both(first: Any, second: Any) -> Any:
    class Both:
        def __call__(self, event: Any, /) -> None:
            first(event)
            second(event)

        def close(self) -> None:
            first.close()

    return Both()


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.tier("long", area="server"))])
def test_names_that_nobody_knows_make_no_series(server: LiveServer, number: int) -> None:
    """Models, paths, methods, fields and codes: what clients choose is in no label."""

    def ask(index: int) -> None:
        assert server.complete("x", model=f"model-{index}").status == 404
        if index % 10 == 0:
            assert server.get(f"/path-{index}").status == 404
            assert server.get(f"/v1/models/model-{index}").status == 404
            server.request("POST", TEXT, {"prompt": "x", "max_tokens": 1, f"field_{index}": 1}, {"user-agent": f"agent-{index}"})
            assert server.request(("PROPFIND", "LOCK", "MKCOL", "TRACE", "PURGE")[index // 10 % 5], "/v1/models").status == 405

    for index in range(20):
        ask(index)
    before = set(server.figures())
    for index in range(20, number):
        ask(index)
    assert set(server.figures()) == before
    assert not [name for name in before if re.search(r"model-|path-|field_|agent-|METHOD", name)]


KEY = "sk-right"


@pytest.fixture(scope="module")
def keyed() -> Iterator[DoorServer]:
    """The whole app behind a key."""
    config = Config(server=ServerConfig(api_key=(KEY,)))
    with door_server(config, engine=lambda service: scripted_llm(service.config, [service.emit]), create_app=_whole, keys=(KEY,)) as server:
        yield server


def _whole(service: Service) -> Any:
    return create_app(service)


def all_routes() -> list[tuple[str, str]]:
    """Every (method, path) of the router, which the OpenAPI document is made from, too."""
    app = create_app(Service(Config()))
    found = [(method, re.sub(r"\{[^}]*\}", "x", route.path_format)) for route in app.routes for method in route.methods]  # type: ignore[union-attr]
    return sorted(set(found))


def test_no_route_answers_without_the_key(keyed: DoorServer) -> None:
    """O-35: every route and method of the router, and every spelling of a path that could be taken for an open one."""
    routes = all_routes()
    assert len(routes) > 20
    variants = ("{}", "/{}", "{}/", "/v1/..{}", "{}?x=1", "{}%20", "/livez/..{}", "{};x", "{}%2f")
    for method, path in routes:
        for variant in variants:
            spelled = variant.format(path)
            is_open = path in HEALTH_PATHS | FILE_PATHS and variant in ("{}", "{}?x=1")
            for verb in dict.fromkeys((method, "GET", "HEAD", "OPTIONS", "PUT")):
                for given in ({}, {"authorization": f"Bearer {KEY.upper()}"}, {"authorization": f"Bearer {KEY}x"})[
                    : 3 if variant == "{}" else 1
                ]:
                    answer = keyed.ask(verb, spelled, b"{}" if verb in ("POST", "PUT") else None, **given)
                    if is_open and verb in ("GET", "HEAD"):
                        assert answer.status == 200
                    else:
                        assert answer.status == 401, (verb, spelled, given)
    assert keyed.ask("GET", "/v1/models", authorization=f"Bearer {KEY}").status == 200


PATHS = (
    "../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd",
    "C:\\windows\\win.ini",
    "\\\\host\\share",
    "file:///etc/passwd",
    "model\x00.gguf",
    "~root/.ssh/id_rsa",
    "x" * 4096,
    ".",
    "",
)


def test_no_name_of_a_request_reaches_the_file_system(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[str] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            touched.append(str(path))
            return real(path, *args, **kwargs)

        return call

    server.complete("warm")
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "lstat"), (os, "listdir"), (os, "scandir")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    for name in PATHS:
        for body in ({"model": name}, {"user": name}, {"cache_salt": name[:100] or "x"}, {"metadata": {"file": name}}, {"lora_path": name}):
            assert server.complete("x", **body).status in (200, 404)
        quoted = "".join(f"%{byte:02x}" for byte in name.encode())
        for path in (f"/v1/models/{quoted}", f"/docs/{quoted}", f"/{quoted}"):
            assert server.get(path).status in ((200, 404) if not name or name == "." else (404,))
    raw = b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    connection = Connection(server.port)
    connection.send(raw)
    assert connection.read().status == 404
    connection.close()
    assert [path for path in touched if re.search(r"passwd|win\.ini|share|id_rsa|gguf|xxxx", path)] == []
