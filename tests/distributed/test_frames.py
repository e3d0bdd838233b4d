"""The stream: what one end sends comes out at the other, and nothing else does."""

import random
import socket
import time
from collections.abc import Iterator

import pytest

from jaxpaged.distributed.frames import CODE_BYTES, Frame, FrameStream, Keys, Kind
from jaxpaged.errors import StreamError

MOST_BYTES = 1000
HEAD_BYTES = 13
Ends = tuple[FrameStream, FrameStream, socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends of a stream, and their sockets."""
    one, other = socket.socketpair()
    left = FrameStream(one, Keys(b"l" * 32, b"r" * 32), lambda kind: MOST_BYTES)
    right = FrameStream(other, Keys(b"r" * 32, b"l" * 32), lambda kind: MOST_BYTES)
    yield left, right, one, other
    left.close()
    right.close()


def sent_bytes(kind: Kind, payload: bytes, *, key: bytes = b"l" * 32, number: int = 0) -> bytes:
    """What goes over the wire."""
    one, other = socket.socketpair()
    with one, other:
        stream = FrameStream(one, Keys(key, key), lambda kind: MOST_BYTES)
        for _ in range(number):
            stream.send(Kind.BEAT)
        stream.send(kind, payload)
        return other.recv(10_000)[(HEAD_BYTES + CODE_BYTES) * number :]


def test_frames_come_as_they_were_sent(ends: Ends) -> None:
    left, right, *_ = ends
    left.send(Kind.RUN, b"\1\2", memoryview(b"\3"))
    left.send(Kind.BEAT)
    right.send(Kind.VALUE, b"pages=7")
    assert right.receive() == Frame(Kind.RUN, b"\1\2\3")
    assert right.receive() == Frame(Kind.BEAT, b"")
    assert left.receive().text == "pages=7"


def test_any_bit_that_is_turned_is_seen() -> None:
    frame = sent_bytes(Kind.RUN, b"blob")
    rng = random.Random(0)
    for bit in range(8 * len(frame)):
        turned = bytearray(frame)
        turned[bit // 8] ^= 1 << bit % 8
        one, other = socket.socketpair()
        with one, other:
            one.sendall(bytes(turned) + rng.randbytes(5000))
            with pytest.raises(StreamError):
                FrameStream(other, Keys(b"", b"l" * 32), lambda kind: MOST_BYTES).receive()


@pytest.mark.parametrize(
    "content",
    [
        sent_bytes(Kind.RUN, b"x", number=1),  # one was left out
        sent_bytes(Kind.RUN, b"x", key=b"r" * 32),  # its own, turned around
        sent_bytes(Kind.RUN, b"x", key=b"?" * 32),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\0" * 64,
    ],
    ids=["left out", "turned around", "another key", "http", "zeros"],
)
def test_what_is_no_frame_is_refused(ends: Ends, content: bytes) -> None:
    _, right, one, _ = ends
    one.sendall(content)
    with pytest.raises(StreamError):
        right.receive()


def test_a_frame_that_comes_again_is_refused(ends: Ends) -> None:
    _, right, one, _ = ends
    frame = sent_bytes(Kind.RUN, b"x")
    one.sendall(frame + frame)
    assert right.receive().payload == b"x"
    with pytest.raises(StreamError, match="no frame of ours"):
        right.receive()


def test_too_long_is_refused_before_it_is_read(ends: Ends) -> None:
    left, right, *_ = ends
    left.send(Kind.RUN, bytes(MOST_BYTES + 1))
    with pytest.raises(StreamError, match="a frame RUN of 1001 bytes is too long"):
        right.receive()


def test_an_end_and_a_pause_in_the_middle_of_a_frame(ends: Ends) -> None:
    _, right, one, _ = ends
    one.sendall(sent_bytes(Kind.RUN, b"blob")[:-2])
    with pytest.raises(StreamError, match="nothing came in time"):
        right.receive(time.monotonic() + 0.05)
    one.close()
    with pytest.raises(StreamError, match="the connection was ended"):
        right.receive()
