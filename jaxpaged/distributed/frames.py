"""Frames on the stream between two processes: numbered, bounded, and each with a code that only who knows the secret can make.

    kind (1 byte)  number (8)  length (4)  code (16)  payload

Numbers count from 0 in each direction. The code is keyed BLAKE2b over the first three and the payload, with another key for each
direction of each connection, so that nothing can be put in, left out, turned around or sent again.
"""

import enum
import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxpaged.errors import StreamError

CODE_BYTES = 16
TEXT_BYTES = 4096
"""Of a frame with a sentence or a word."""
_HEAD = struct.Struct("!BQI")


class Kind(enum.IntEnum):
    """What a frame is.

    WELCOME, REFUSED: the answer to who comes; the second with the reason. VALUE: of a meeting at the start. BEAT: a sign of life. RUN,
    WRITE_SLOT, SLEEP, WAKE_WEIGHTS, WAKE_POOL: calls of the runner. STOP: process 0 ends in order; BYE: the answer. FAILED: who sends
    it ends, and why.
    """

    WELCOME = 1
    REFUSED = 2
    VALUE = 3
    BEAT = 4
    RUN = 5
    WRITE_SLOT = 6
    SLEEP = 7
    WAKE_WEIGHTS = 8
    WAKE_POOL = 9
    STOP = 10
    BYE = 11
    FAILED = 12


TEXTS = frozenset({Kind.REFUSED, Kind.VALUE, Kind.FAILED})
CALLS = frozenset({Kind.RUN, Kind.WRITE_SLOT, Kind.SLEEP, Kind.WAKE_WEIGHTS, Kind.WAKE_POOL, Kind.STOP})


class Frame(NamedTuple):
    """One that came."""

    kind: Kind
    payload: bytes

    @property
    def text(self) -> str:
        """Of TEXTS."""
        return self.payload.decode("utf-8", "replace")


class Keys(NamedTuple):
    """Of one connection: for what goes out and for what comes in."""

    out: bytes
    into: bytes


class FrameStream:
    """One end of a connection. One thread at a time sends and one receives.

    Args:
        connection: open, and closed by `close`.
        keys: of this end.
        most_bytes: of a frame of that kind; more is a fault.
    """

    def __init__(self, connection: socket.socket, keys: Keys, most_bytes: Callable[[Kind], int]) -> None:
        self._connection, self._keys = connection, keys
        self.most_bytes = most_bytes
        self._num_sent = self._num_received = 0

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Sends one frame, its payload in parts. Raises OSError."""
        head = _HEAD.pack(kind, self._num_sent, sum(len(part) for part in parts))
        self._num_sent += 1
        code = _code(self._keys.out, head, *parts)
        self._connection.sendall(b"".join((head, code, *parts)))

    def receive(self, deadline_s: float | None = None) -> Frame:
        """Waits for the next frame.

        Args:
            deadline_s: monotonic time until which it must be there.

        Raises:
            StreamError: it is none of ours, or the other end is gone.
        """
        head = read_exactly(self._connection, _HEAD.size, deadline_s)
        number, count, length = _HEAD.unpack(head)
        if number not in Kind.__members__.values() or count != self._num_received:
            raise StreamError("what came is no frame of ours")
        kind = Kind(number)
        if length > self.most_bytes(kind):
            raise StreamError(f"a frame {kind.name} of {length} bytes is too long")
        code = read_exactly(self._connection, CODE_BYTES, deadline_s)
        payload = read_exactly(self._connection, length, deadline_s)
        if not hmac.compare_digest(code, _code(self._keys.into, head, payload)):
            raise StreamError("a frame was not made by who knows the secret")
        self._num_received += 1
        return Frame(kind, payload)

    def close(self) -> None:
        """Ends the connection, also under a thread that sends or receives."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


def read_exactly(connection: socket.socket, num_bytes: int, deadline_s: float | None = None) -> bytes:
    """So many bytes. Raises StreamError when they do not come, or not in time."""
    content = bytearray(num_bytes)
    view, done = memoryview(content), 0
    try:
        while done < num_bytes:
            if deadline_s is not None:
                # A deadline for all of it: a limit for each read would let who drips stay for ever.
                connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            received = connection.recv_into(view[done:])
            if not received:
                raise StreamError("the connection was ended")
            done += received
    except TimeoutError as error:
        raise StreamError("nothing came in time") from error
    except OSError as error:
        raise StreamError(f"the connection broke: {error.strerror or error}") from error
    return bytes(content)


def _code(key: bytes, head: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(head, key=key, digest_size=CODE_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
