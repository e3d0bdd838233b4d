"""What waits for a client that does not read: so many bytes and so many events, and no more are made."""

import socket
import threading

import pytest

from jaxpaged.config import KIB
from server.asgi_types import Receive, Scope, Send
from server.http_protocol import chunk_writer
from tests.server.door_server import door_server, request_bytes

pytestmark = pytest.mark.jax


def test_the_buffers_are_as_small_as_the_options_say() -> None:
    with door_server() as server:
        connection = server.connect()
        connection.request("GET", "/livez")
        (ours,) = server.server.server_state.connections
        size = ours.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert size == 2 * 64 * KIB, "Linux doubles what it is told"
        assert ours.transport.get_write_buffer_limits()[1] == 256 * KIB  # type: ignore[attr-defined]


class Flood:
    """An app that writes events of a size until it is told to wait, and then waits until they are sent."""

    def __init__(self, size: int) -> None:
        self.event = b"x" * size
        self.is_full, self.is_sent = threading.Event(), threading.Event()
        self.num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writer = chunk_writer(scope)
        assert writer is not None
        while not writer.is_paused:
            writer.write(self.event)
            self.num_written += 1
        self.is_full.set()
        await send({"type": "http.response.body", "body": self.event, "more_body": True})
        self.is_sent.set()
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(("size", "most"), [(8, 1000 * 13), (4000, 256 * KIB)])
def test_so_many_events_or_bytes_wait_for_who_does_not_read(size: int, most: int) -> None:
    flood = Flood(size)
    chunk = len(b"%x" % size) + 2 + size + 2
    with door_server(create_app=lambda _: flood) as server:
        connection = server.connect(receive_buffer=4096)
        connection.send(request_bytes("GET", "/"))
        assert flood.is_full.wait(20)
        (ours,) = server.server.server_state.connections
        waiting = ours.transport.get_write_buffer_size()
        assert most - 2 * chunk <= waiting <= most + 2 * chunk
        assert not flood.is_sent.is_set()
        body = connection.read().body
        assert flood.is_sent.wait(20), "goes on once it is read"
        assert len(body) == (flood.num_written + 1) * size
        assert ours.transport.get_write_buffer_limits()[1] == 256 * KIB  # type: ignore[attr-defined]
