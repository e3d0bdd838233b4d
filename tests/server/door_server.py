"""A server in a thread of this process, and raw connections to it."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from jaxpaged.config import Config
from jaxpaged.engine_client import EngineClient
from server.asgi_types import App
from server.auth import ApiKeys
from server.front import behind_front
from server.http_server import HttpServer
from server.listeners import bind_port, close_all
from server.service import Service
from tests.fakes import EventLog
from tests.server.small_app import small_app

TIMEOUT_S = 20.0


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


class Connection:
    """A client's end of a connection."""

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None, receive_buffer: int | None = None) -> None:
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
        self.socket.sendall(data.encode() if isinstance(data, str) else data)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> "Answer":
        """Sends a request and reads its answer."""
        self.send(request_bytes(method, path, body, **headers))
        return self.read(has_body=method != "HEAD")

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
        return Answer(int(first.split(" ")[1]), headers, body)

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
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self.server = HttpServer(front(app, service, keys), service.config.server, self._sockets, tls, ledger=service.ledger)
        self._thread = threading.Thread(target=self._run, name="door-server")
        self._thread.start()
        wait_until(lambda: self.server.started)

    def connect(self, **options: Any) -> Connection:
        """A new connection, closed with the server at the latest."""
        self._clients.append(Connection(self.port, **options))
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
    service = Service(config or Config(), sinks=() if log is None else (log,))
    made = None if engine is None else engine(service)
    if made is not None:
        service.attach(made)
    server = DoorServer(service, create_app(service), ApiKeys(keys), tls, front)
    try:
        yield server
    finally:
        server.close()
        if made is not None:
            made.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Fails when it does not come to that."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came to that"
        time.sleep(0.002)
