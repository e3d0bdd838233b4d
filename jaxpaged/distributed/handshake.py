"""Who comes shows that it knows the secret and has the same options and code, and is shown the same of process 0.

    process 0  -> MAGIC, 32 random bytes
    who comes  -> MAGIC, 32 random bytes, length, what it is as JSON, HMAC over all that both have said
    process 0  -> a frame WELCOME, or REFUSED with the reason, with keys that only who knows the secret can make

Somebody who does not know the secret learns nothing but that this is jaxpaged, and is not answered.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from jaxpaged.distributed.frames import TEXT_BYTES, FrameStream, Keys, Kind, read_exactly
from jaxpaged.distributed.settings import Processes
from jaxpaged.errors import ConfigError, StreamError

MAGIC = b"jaxpaged processes 1\n"
NONCE_BYTES = 32
MAX_HELLO_BYTES = 64 * 1024
HANDSHAKE_S = 10.0
"""For all of it, however slowly it comes."""
_LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process tells of itself.

    Attributes:
        index: which it is.
        number: how many it thinks there are.
        terms: what must be the same everywhere, in words, by name.
    """

    index: int
    number: int
    terms: dict[str, str]


class Visitor(NamedTuple):
    """A process that has shown that it knows the secret."""

    hello: Hello
    stream: FrameStream


def receive_visitor(connection: socket.socket, secret: bytes) -> Visitor:
    """Process 0's half, up to its answer. Raises StreamError when who comes does not know the secret, or does not say so in time."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    ours = MAGIC + secrets.token_bytes(NONCE_BYTES)
    try:
        connection.sendall(ours)
    except OSError as error:
        raise StreamError(f"the connection broke: {error.strerror or error}") from error
    theirs = read_exactly(connection, len(MAGIC) + NONCE_BYTES + _LENGTH.size, deadline_s)
    (length,) = _LENGTH.unpack(theirs[-_LENGTH.size :])
    if not theirs.startswith(MAGIC) or length > MAX_HELLO_BYTES:
        raise StreamError("what came is no process of ours")
    said = read_exactly(connection, length, deadline_s)
    proof = read_exactly(connection, hashlib.sha256().digest_size, deadline_s)
    if not hmac.compare_digest(proof, _mac(secret, b"proof", ours, theirs, said)):
        raise StreamError("a process came with another secret")
    try:
        hello = msgspec.json.decode(said, type=Hello)
    except msgspec.DecodeError as error:
        raise StreamError("what a process says of itself cannot be read") from error
    down, up = _keys(secret, ours, theirs)
    connection.settimeout(None)
    return Visitor(hello, FrameStream(connection, Keys(down, up), _short))


def introduce(connection: socket.socket, processes: Processes, terms: Mapping[str, str]) -> FrameStream:
    """The other half, its answer included.

    Raises:
        ConfigError: process 0 does not want us, with its reason.
        StreamError: it ends the connection before it has said anything.
    """
    deadline_s = time.monotonic() + HANDSHAKE_S
    theirs = read_exactly(connection, len(MAGIC) + NONCE_BYTES, deadline_s)
    if not theirs.startswith(MAGIC):
        raise ConfigError(f"what listens at port {processes.steps_port} of {processes.host} is no process 0 of this jaxpaged")
    said = msgspec.json.encode(Hello(processes.index, processes.number, dict(terms)))
    ours = MAGIC + secrets.token_bytes(NONCE_BYTES) + _LENGTH.pack(len(said))
    down, up = _keys(processes.secret, theirs, ours)
    stream = FrameStream(connection, Keys(up, down), _short)
    try:
        connection.sendall(ours + said + _mac(processes.secret, b"proof", theirs, ours, said))
        # Process 0 looks at us at once, and answers when it has.
        answer = stream.receive(deadline_s)
    except (OSError, StreamError) as error:
        raise ConfigError(
            "process 0 ended the handshake without an answer: give all processes the same distributed.secret", param="distributed.secret"
        ) from error
    if answer.kind is not Kind.WELCOME:
        raise ConfigError(f"process 0 refuses this one: {answer.text}")
    connection.settimeout(None)
    return stream


def _short(kind: Kind) -> int:
    """Frames of the start are short."""
    return TEXT_BYTES


def _keys(secret: bytes, leaders: bytes, followers: bytes) -> tuple[bytes, bytes]:
    session = _mac(secret, b"session", leaders, followers)
    return _mac(session, b"down"), _mac(session, b"up")


def _mac(key: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        # With their lengths: no two lists of parts look the same.
        mac.update(_LENGTH.pack(len(part)) + part)
    return mac.digest()
