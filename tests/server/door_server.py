"""A server in a thread of this process, and raw connections to it."""

import asyncio
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import Config
from jaxpaged.engine_client import EngineClient
from server.asgi_types import App
from server.auth import ApiKeys
from server.front import behind_front
from server.http_server import HttpServer
from server.listeners import bind_port, close_all
from server.phase import Phase
from server.service import Service
from tests.event_log import EventLog
from tests.server.conformity import GENERATION, check_answer
from tests.server.small_app import small_app

TIMEOUT_S = 20.0
GENERATION_REQUEST = re.compile(rb"POST (?:/v1/(?:chat/completions|completions|responses|embeddings|score)|/score)(?:/|%2f)*[ ?]")


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """The error's."""
        return str(self.json["error"]["code"])


class ClientCounts:
    """What clients of one server have asked the model for.

    Attributes:
        num_begun: requests that were sent, whether their answers were read or not.
        ends: those whose whole answer was read, by how it says that they ended.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self.ends: Counter[str] = Counter()
        self._lock = threading.Lock()  # clients are threads, and `+=` is not one step

    def begin(self, number: int) -> None:
        """So many requests are being sent."""
        with self._lock:
            self.num_begun += number

    def take(self, method: str, path: str, answer: Answer) -> None:
        """An answer was read."""
        if method != "POST" or unquote(path.partition("?")[0]).rstrip("/") not in GENERATION:
            return
        status = answer.status
        if status >= 400:
            end = "refused" if status in (429, 503) else "rejected" if status < 500 else "failed"
        elif b'"finish_reason":"length"' in answer.body:
            end = "length"
        else:
            end = "failed" if b'data: {"error"' in answer.body else "stop"
        with self._lock:
            self.ends[end] += 1

    def check(self, told: Mapping[str, float]) -> None:
        """Fails unless the server's numbers of ends are those that clients saw; an answer that nobody read may have ended anyhow."""
        for end, number in self.ends.items():
            assert number <= told.get(end, 0), f"clients saw {dict(self.ends)}, and the server tells {dict(told)}"
        num_unseen = self.num_begun - sum(self.ends.values())
        assert 0 <= sum(told.values()) - sum(self.ends.values()) <= num_unseen, f"{num_unseen} answers were not read, and {dict(told)}"


class Connection:
    """A client's end of a connection."""

    def __init__(
        self, port: int, *, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None, count: "ClientCounts | None" = None
    ) -> None:
        self.count = count or ClientCounts()
        plain = socket.socket()
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.settimeout(TIMEOUT_S)
        try:
            plain.connect(("127.0.0.1", port))
            self.socket = plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise
        self._seen = b""

    def send(self, data: bytes | str) -> None:
        """Sends bytes as they are."""
        raw = data.encode() if isinstance(data, str) else data
        self.count.begin(len(GENERATION_REQUEST.findall(raw)))
        self.socket.sendall(raw)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> "Answer":
        """Sends a request and reads its answer."""
        self.send(request_bytes(method, path, body, **headers))
        answer = self.read(has_body=method != "HEAD")
        check_answer(method, path, answer.status, answer.headers, answer.body)
        self.count.take(method, path, answer)
        return answer

    def read(self, *, has_body: bool = True) -> Answer:
        """One answer: to its length, its last chunk, or the connection's end."""
        self._fill_until(lambda: b"\r\n\r\n" in self._seen)
        head, _, self._seen = self._seen.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if not has_body:
            body = b""
        elif "content-length" in headers:
            size = int(headers["content-length"])
            self._fill_until(lambda: len(self._seen) >= size)
            body, self._seen = self._seen[:size], self._seen[size:]
        else:
            self._fill_until(lambda: self._seen.endswith(b"0\r\n\r\n"))
            body, self._seen = b"", self._seen
            while self._seen:
                size_line, _, rest = self._seen.partition(b"\r\n")
                size = int(size_line, 16)
                body, self._seen = body + rest[:size], rest[size + 2 :]
        answer = Answer(int(first.split(" ")[1]), headers, body)
        if answer.status >= 400 and has_body and b'"error"' in body:
            check_answer("", "", *answer)
        return answer

    def read_some(self, count: int) -> None:
        """Reads so many bytes."""
        wanted = len(self._seen) + count
        self._fill_until(lambda: len(self._seen) >= wanted)

    def read_until(self, mark: bytes) -> bytes:
        """All that came up to a mark."""
        self._fill_until(lambda: mark in self._seen)
        return self._seen

    def seconds_to_end(self) -> float:
        """Reads until the server closes, and says how long that took."""
        began_s = time.monotonic()
        try:
            while piece := self.socket.recv(65536):
                self._seen += piece
        except ConnectionError:
            pass
        return time.monotonic() - began_s

    @property
    def seen(self) -> bytes:
        """What was read and not taken."""
        return self._seen

    def close(self) -> None:
        """Closes."""
        self.socket.close()

    def _fill_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            piece = self.socket.recv(65536)
            assert piece, f"the server closed after {self._seen[-300:]!r}"
            self._seen += piece


def request_bytes(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """A whole request."""
    given = {"host": "x", **({} if body is None else {"content-length": str(len(body)), "content-type": "application/json"})}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + (body or b"")


class DoorServer:
    """A live server.

    Args:
        service: whose options count.
        app: behind the front.
        keys: of clients.
        tls: None: plain.
        front: what stands before the app.
    """

    def __init__(
        self,
        service: Service,
        app: App,
        keys: ApiKeys,
        tls: ssl.SSLContext | None,
        front: Callable[[App, Service, ApiKeys], App] = behind_front,
    ) -> None:
        self.service = service
        self._sockets = bind_port("127.0.0.1", 0)
        self.port: int = self._sockets[0].getsockname()[1]
        self._clients: list[Connection] = []
        self.count = ClientCounts()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self.server = HttpServer(front(app, service, keys), service.config.server, self._sockets, tls, ledger=service.ledger)
        self._thread = threading.Thread(target=self._run, name="door-server")
        self._thread.start()
        wait_until(lambda: self.server.started)

    def connect(self, **options: Any) -> Connection:
        """A new connection, closed with the server at the latest."""
        self._clients.append(Connection(self.port, count=self.count, **options))
        return self._clients[-1]

    def hang_up(self) -> None:
        """Closes all connections that tests have made."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        connection = self.connect()
        try:
            return connection.request(method, path, body, **headers)
        finally:
            connection.close()

    @property
    def num_connections(self) -> int:
        """Open ones."""
        return len(self.server.server_state.connections)

    def call(self, work: Callable[[], None]) -> None:
        """Does something on the server's loop."""
        self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """Stops."""
        self.hang_up()
        self.server.should_exit = True
        self._thread.join(TIMEOUT_S)
        close_all(self._sockets)
        assert not self._thread.is_alive()
        self._loop.close()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self.server.serve())
        except BaseException as error:
            self._failure = error


@contextmanager
def door_server(
    config: Config | None = None,
    *,
    engine: Callable[[Service], EngineClient] | None = None,
    create_app: Callable[[Service], App] = small_app,
    keys: tuple[str, ...] = (),
    tls: ssl.SSLContext | None = None,
    log: EventLog | None = None,
    front: Callable[[App, Service, ApiKeys], App] = behind_front,
) -> Iterator[DoorServer]:
    """A server over the loopback; without an engine it starts for ever."""
    own_log = EventLog()
    service = Service(config or Config(), sinks=(own_log,) if log is None else (own_log, log))
    made = None if engine is None else engine(service)
    if made is not None:
        service.attach(made)
    server = DoorServer(service, create_app(service), ApiKeys(keys), tls, front)
    try:
        yield server
        after_check(server, made, own_log)
    finally:
        server.close()
        if made is not None:
            made.close()


def after_check(server: DoorServer, engine: EngineClient | None, log: EventLog) -> None:
    """Clients, books, events and figures agree on how everything ended, and nothing is left; an engine that serves goes on to do so."""
    service = server.service
    server.hang_up()
    wait_until(lambda: service.ledger.num_open == 0)
    ends = {end.value: number for end, number in service.ledger.ends().items()}
    server.count.check(ends)
    logged = Counter(event.end for event in log.of(events.HttpAnswered) if event.end)
    assert {end: logged[end] for end in ends} == ends, "events tell otherwise than the books"
    registry = service.metrics.registry
    assert {end: registry.get_sample_value("jaxpaged_http_ends_total", {"end": end}) or 0 for end in ends} == ends
    if isinstance(engine, AsyncLLM) and engine._thread.is_alive and not engine._engine.is_dead and service.phase is not Phase.DEAD:
        inner = engine._engine
        wait_until(lambda: not inner.has_work)
        wait_until(lambda: len(log.of(events.RequestFinished)) == len(log.of(events.RequestQueued)))
        queued, finished = (sorted(event.request_id for event in log.of(kind)) for kind in (events.RequestQueued, events.RequestFinished))
        assert queued == finished
        assert (inner.scheduler.num_running, inner.scheduler.num_waiting, inner.pages.num_in_use) == (0, 0, 0)
        inner.scheduler.check()


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Fails when it does not come to that."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.002)
