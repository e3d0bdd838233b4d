"""Limits of a connection: what is too much or takes too long is refused and closed, and its neighbours never notice."""

import socket
import time
from collections.abc import Iterator

import pytest

from jaxpaged.config import KIB, Config, ServerConfig
from tests.server.door_server import Connection, DoorServer, door_server, request_bytes, wait_until

pytestmark = pytest.mark.jax

QUICK = ServerConfig(
    header_timeout_s=0.4, body_timeout_s=0.5, keep_alive_s=0.6, slow_client_timeout_s=0.7, max_body=16 * KIB, max_connections=40
)
PATIENT_S = 60.0
"""More than a test waits for anything: what ends earlier does not end by a timeout."""
PATIENT = ServerConfig(
    header_timeout_s=PATIENT_S,
    body_timeout_s=PATIENT_S,
    keep_alive_s=PATIENT_S,
    slow_client_timeout_s=PATIENT_S,
    max_body=16 * KIB,
    max_connections=40,
)
SOON_S = 8.0
"""A client's time for what a timeout of QUICK ends: the defaults are 10 s and more."""


@pytest.fixture(scope="module")
def shared() -> Iterator[DoorServer]:
    """Long timeouts, 16 kB bodies, 40 connections."""
    with door_server(Config(server=PATIENT)) as server:
        yield server


@pytest.fixture(scope="module")
def shared_quick() -> Iterator[DoorServer]:
    """The same with short timeouts."""
    with door_server(Config(server=QUICK)) as server:
        yield server


def at_rest_afterwards(server: DoorServer) -> Iterator[DoorServer]:
    """A shared server, with nothing left open afterwards."""
    yield server
    server.hang_up()
    wait_until(lambda: server.num_connections == 0)
    wait_until(lambda: server.service.ledger.num_open == 0)
    assert server.ask("GET", "/livez").status == 200


@pytest.fixture
def server(shared: DoorServer) -> Iterator[DoorServer]:
    """The patient one: for everything that is not about its timeouts."""
    yield from at_rest_afterwards(shared)


@pytest.fixture
def quick(shared_quick: DoorServer) -> Iterator[DoorServer]:
    """The quick one: for the timeouts alone, which a client that a busy machine holds up may meet at any time."""
    yield from at_rest_afterwards(shared_quick)


def head(size: int) -> bytes:
    """A request of GET /livez whose first line and headers have so many bytes."""
    begun = b"GET /livez HTTP/1.1\r\nhost: x\r\nfill: "
    return begun + b"x" * (size - len(begun) - 4) + b"\r\n\r\n"


def test_a_keep_alive_connection_takes_many_requests(server: DoorServer) -> None:
    connection = server.connect()
    for _ in range(3):
        assert connection.request("GET", "/livez").json == {"status": "starting"}


def test_an_idle_connection_is_closed_after_its_time(quick: DoorServer) -> None:
    began_s = time.monotonic()
    connection = quick.connect()
    assert connection.request("GET", "/livez").status == 200
    connection.seconds_to_end()
    assert 0.6 <= time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize(
    ("sent", "limit_s"),
    [
        (b"", 0.4),
        (b"GET /liv", 0.4),
        (b"\r\n", 0.4),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\n", 0.4),
        (b"POST /echo HTTP/1.1\r\ncontent-length: 9\r\n\r\nab", 0.5),
    ],
    ids=["silent", "first line", "empty line", "headers", "body"],
)
def test_who_sends_no_more_is_closed_in_time(quick: DoorServer, sent: bytes, limit_s: float) -> None:
    began_s = time.monotonic()
    connection = quick.connect()
    connection.send(sent)
    connection.seconds_to_end()
    assert limit_s <= time.monotonic() - began_s < SOON_S
    if len(sent) > 2:
        assert b" 408 Request Timeout\r\n" in connection.seen
        assert b'"code":"request_too_slow"' in connection.seen


@pytest.mark.parametrize("what", ["headers", "body"])
def test_one_byte_at_a_time_does_not_help(quick: DoorServer, what: str) -> None:
    connection = quick.connect()
    connection.send(b"POST /echo HTTP/1.1\r\nhost: x\r\n" + (b"" if what == "headers" else b"content-length: 1000\r\n\r\n"))
    began_s = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() < began_s + SOON_S:
            connection.send(b"a")
            time.sleep(0.05)


def test_headers_up_to_the_limit(server: DoorServer) -> None:
    for size, status in ((16 * KIB, 200), (16 * KIB + 1, 431)):
        connection = server.connect()
        connection.send(head(size))
        answer = connection.read()
        assert answer.status == status
        if status == 431:
            assert answer.code == "headers_too_large"
            assert f"{16 * KIB} bytes (server.max_header_size), got {size} bytes" in answer.json["error"]["message"]
            assert connection.seconds_to_end() < SOON_S


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"BREW /livez HTTP/1.1\r\nhost: x\r\n\r\n", 501, "method_not_implemented"),
        (b"get /livez HTTP/1.1\r\nhost: x\r\n\r\n", 501, "method_not_implemented"),
        (b"BREW\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
        (b"GET /livez HTTP/1.1\r\nx-request-id: mine\r\nhost: x\r\nbad header\r\n\r\n", 400, "bad_request"),
    ],
)
def test_what_is_refused_before_the_app_has_it(server: DoorServer, sent: bytes, status: int, code: str) -> None:
    connection = server.connect()
    connection.send(sent)
    answer = connection.read()
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers["x-request-id"] == "mine" if b"mine" in sent else answer.headers["x-request-id"].startswith("req-")
    assert answer.headers.get("x-should-retry") == ("false" if status == 501 else None)
    assert connection.seconds_to_end() < SOON_S


def test_a_body_that_is_refused_is_not_welcomed_afterwards(server: DoorServer, caplog: pytest.LogCaptureFixture) -> None:
    """What came is refused before the app has begun to read it."""
    connection = server.connect()
    connection.send(b"POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n")
    assert connection.read().status == 400
    assert connection.seconds_to_end() < SOON_S
    assert connection.seen == b""
    assert server.ask("GET", "/livez").status == 200, "by then the app has looked at the first one"
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_header_without_an_end_is_not_kept(server: DoorServer) -> None:
    connection = server.connect()
    connection.send(b"GET /livez HTTP/1.1\r\nfill: " + b"x" * 16 * KIB)
    assert connection.read().status == 431


@pytest.mark.parametrize(("count", "status"), [(100, 200), (101, 431)])
def test_so_many_headers(server: DoorServer, count: int, status: int) -> None:
    lines = "".join(f"x-{number}: 1\r\n" for number in range(count - 1))
    connection = server.connect()
    connection.send(f"GET /livez HTTP/1.1\r\nhost: x\r\n{lines}\r\n")
    assert connection.read().status == status


@pytest.mark.parametrize(("size", "status"), [(0, 200), (16 * KIB, 200), (16 * KIB + 1, 413), (10**9, 413)])
def test_bodies_up_to_the_limit(server: DoorServer, size: int, status: int) -> None:
    """What is too much is refused before it is there: here it never comes."""
    connection = server.connect()
    connection.send(f"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n")
    if status == 200:
        connection.send(b"x" * size)
    answer = connection.read()
    assert (answer.status, len(answer.body) if status == 200 else answer.code) == (status, size if status == 200 else "body_too_large")


def test_a_chunked_body_is_counted(quick: DoorServer) -> None:
    """All of it is sent at once, and its end never."""
    connection = quick.connect()
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    connection.send(head + 16 * (b"400\r\n" + b"x" * 1024 + b"\r\n") + b"1\r\nx\r\n")
    answer = connection.read()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert connection.seconds_to_end() < SOON_S, "a body without an end is not listened to for ever"


def test_what_is_left_of_a_refused_body_does_not_become_a_request(server: DoorServer) -> None:
    connection = server.connect()
    body = b"x" * (16 * KIB + 1)
    connection.send(request_bytes("POST", "/echo", body))
    assert connection.read().status == 413
    assert connection.request("GET", "/livez").status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip"])
def test_compressed_bodies_are_refused(server: DoorServer, encoding: str) -> None:
    answer = server.ask("POST", "/echo", b"\x1f\x8b", content_encoding=encoding)
    assert (answer.status, answer.json["error"]["param"]) == (415, "content-encoding")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /livez HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    ],
)
def test_what_is_no_request_is_400_and_closed(server: DoorServer, sent: bytes) -> None:
    connection = server.connect()
    connection.send(sent)
    answer = connection.read()
    assert (answer.status, answer.code) == (400, "bad_request")
    assert connection.seconds_to_end() < SOON_S


def test_garbage_behind_a_request_waits_for_the_answer(server: DoorServer) -> None:
    connection = server.connect()
    connection.send(request_bytes("GET", "/drip?size=5000") + b"nonsense\r\n\r\n")
    answer = connection.read()
    assert (answer.status, len(answer.body)) == (200, 5000)
    assert connection.seconds_to_end() < SOON_S
    assert connection.seen == b""


def test_pipelined_requests_are_answered_in_order_and_not_without_end(server: DoorServer) -> None:
    connection = server.connect()
    connection.send(b"".join(request_bytes("GET", f"/big?size={size}") for size in range(1, 6)))
    assert [len(connection.read().body) for _ in range(5)] == [1, 2, 3, 4, 5]
    connection.send(request_bytes("GET", "/big?size=1") * 200)
    sizes = []
    while connection.socket and len(sizes) < 200:
        try:
            sizes.append(len(connection.read().body))
        except AssertionError:
            break
    assert 16 <= len(sizes) < 200


def test_head_answers_as_get_without_a_body(server: DoorServer) -> None:
    connection = server.connect()
    for path in ("/livez", "/readyz", "/metrics", "/version", "/load", "/health", "/v2/health/live", "/v2/health/ready"):
        whole, bare = connection.request("GET", path), connection.request("HEAD", path)
        assert bare.status == whole.status
        assert bare.headers["content-type"] == whole.headers["content-type"]
        assert "x-request-id" in bare.headers


def test_upgrades_are_answered_as_plain_requests(server: DoorServer) -> None:
    for protocol in ("h2c", "websocket"):
        answer = server.ask("GET", "/livez", connection="upgrade", upgrade=protocol)
        assert (answer.status, answer.json) == (200, {"status": "starting"})


@pytest.mark.parametrize(
    ("given", "is_kept"), [("a.b_c:d-9", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("\x1b[31m", False), ("é", False)]
)
def test_request_ids(server: DoorServer, given: str, is_kept: bool) -> None:
    connection = server.connect()
    connection.send(f"GET /livez HTTP/1.1\r\nx-request-id: {given}\r\n\r\n")
    answer = connection.read()
    if "\x1b" in given:
        assert answer.status == 400
    else:
        assert (answer.headers["x-request-id"] == given) == is_kept
        assert len(answer.headers["x-request-id"]) <= 128


def test_one_connection_more_is_told_503(server: DoorServer) -> None:
    wait_until(lambda: server.num_connections == 0)
    held = [server.connect() for _ in range(40)]
    wait_until(lambda: server.num_connections == 40)
    extra = server.connect()
    answer = extra.read()
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "too_many_connections", "1")
    assert held[0].request("GET", "/livez").status == 200


def wait_for_the_end(quick: DoorServer, connection: Connection) -> None:
    """Returns when the answer has begun and the connection is gone, though the client took nothing of it."""
    assert connection.socket.recv(1, socket.MSG_PEEK) == b"H"
    wait_until(lambda: quick.num_connections == 0, SOON_S)


@pytest.mark.parametrize("path", ["/big?size=4000000", "/drip?size=4000000"])
def test_who_does_not_read_is_cut_off(quick: DoorServer, path: str) -> None:
    began_s = time.monotonic()
    connection: Connection = quick.connect(receive_buffer=4096)
    connection.send(request_bytes("GET", path))
    wait_for_the_end(quick, connection)
    assert time.monotonic() - began_s >= 0.7


def test_who_reads_slowly_but_reads_is_not_cut_off() -> None:
    """It takes longer in all than the timeout, and no pause is nearly as long."""
    with door_server(Config(server=ServerConfig(slow_client_timeout_s=3.0))) as server:
        connection: Connection = server.connect(receive_buffer=4096)
        connection.send(request_bytes("GET", "/drip?size=1200000"))
        began_s = time.monotonic()
        while time.monotonic() < began_s + 3.5:
            connection.read_some(25_000)
            time.sleep(0.1)
        assert len(connection.read().body) == 1_200_000


def ask_and_not_read(server: DoorServer, size: int, **headers: str) -> int:
    """Asks for an answer of that size, and returns how much of it is left in the server when all is written."""
    wait_until(lambda: server.num_connections == 0)
    connection: Connection = server.connect(receive_buffer=4096)
    wait_until(lambda: server.num_connections == 1)
    (ours,) = server.server.server_state.connections
    connection.send(request_bytes("GET", f"/big?size={size}", **headers))
    wait_until(lambda: ours.cycle is not None and ours.cycle.response_complete)
    return ours.transport.get_write_buffer_size()


def test_a_small_answer_that_nobody_reads_does_not_hold_the_connection(server: DoorServer, quick: DoorServer) -> None:
    """It fits in the buffers, so nothing is ever paused; closing must not wait for the client either."""
    for size in range(60_000, 400_000, 15_000):
        if left := ask_and_not_read(server, size):
            break
        server.hang_up()
    assert 0 < left <= 64 * KIB
    for headers in ({}, {"connection": "close"}):  # closed after keep_alive_s or at once, and cut off after slow_client_timeout_s
        connection: Connection = quick.connect(receive_buffer=4096)
        connection.send(request_bytes("GET", f"/big?size={size}", **headers))
        wait_for_the_end(quick, connection)


def test_who_waits_for_an_answer_may_begin_the_next_request_slowly() -> None:
    """It is begun at once, and the answer takes longer than a head may."""
    with door_server(Config(server=ServerConfig(header_timeout_s=2.0))) as server:
        connection = server.connect()
        connection.send(request_bytes("GET", "/slow?seconds=2.5"))
        time.sleep(0.1)
        connection.send(b"\r\nGET /liv")
        assert connection.read().body == b"done"
        connection.send(b"ez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.read().json == {"status": "starting"}
