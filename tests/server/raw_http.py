"""Bytes that are nearly HTTP, drawn from a seed: what a broken, a hostile or a very slow client may send."""

import random
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"get", b"FOO", b"G E T", b"CONNECT", b"PRI", b"", b"A" * 300, b"\x00", b"\xff")
PATHS = (
    b"/livez",
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/v1/models/../../etc/passwd",
    b"/v1/models/%2e%2e%2f%00",
    b"/tokenize",
    b"*",
    b"http://elsewhere/livez",
    b"/%",
    b"/%zz",
    b"/\xff\xfe",
    b"/" + b"a" * 5000,
    b"/livez?" + b"q=1&" * 500,
    b"",
    b"livez",
    b"//",
    b"/livez#x",
    b"/a b",
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.10", b"http/1.1", b"HTTP", b"", b"HTTP/1.1 x", b"SMTP/1.0")
HEADERS = (
    b"host: x",
    b"host:",
    b"host: a\r\nhost: b",
    b"content-type: application/json",
    b"content-type: \xff",
    b"connection: close",
    b"connection: keep-alive, upgrade\r\nupgrade: websocket",
    b"upgrade: h2c\r\nhttp2-settings: x",
    b"expect: 100-continue",
    b"expect: 900-nothing",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked, identity",
    b"transfer-encoding : chunked",
    b"transfer-encoding: xchunked",
    b"content-length: 5",
    b"content-length: 5\r\ncontent-length: 6",
    b"content-length: -1",
    b"content-length: +5",
    b"content-length: 0x5",
    b"content-length: 99999999999999999999999",
    b"content-length: 4000000000",
    b"content-length: 5, 5",
    b"content-length:",
    b"content-encoding: gzip",
    b"x-request-id: " + b"i" * 200,
    b"x-request-id: a\x1b[31m",
    b"authorization: Bearer " + b"k" * 3000,
    b"x: \x00",
    b"x\x00y: 1",
    b" folded: 1",
    b"x: a\r\n b",
    b"no colon",
    b": no name",
    b"x" * 9000 + b": 1",
    b"x: " + b"y" * 20000,
    b"\r",
    b"x: a\rb",
    b"trailer: x",
    b"te: trailers",
    b"range: bytes=0-",
    b"accept-encoding: *",
)
BODIES = (
    b"",
    b"hello",
    b'{"prompt":"x","max_tokens":2}',
    b'{"prompt":"x","max_tokens":3,"stream":true}',
    b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2}',
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5;ext=" + b"e" * 3000 + b"\r\nhello\r\n0\r\nx: y\r\n\r\n",
    b"ffffffffffffffff\r\nhello",
    b"fffffffffffffffff\r\nhello",
    b"7fffffff\r\nhello",
    b"-5\r\nhello\r\n",
    b"5\nhello\n0\n\n",
    b"5\r\nhelloX0\r\n\r\n",
    b"0\r\n" + b"t: 1\r\n" * 300 + b"\r\n",
    b"\x00" * 100,
    b"[" * 5000,
    b"\xff\xfe\xfd",
    b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n",
)
WHOLE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 64,
    b"\r\n\r\n\r\n",
    b"\n",
    b"SSH-2.0-x\r\n",
    b"EHLO x\r\n",
    b"GET /livez\r\n\r\n",
    b"\x80\x80\x00\x00",
)


class Attempt(NamedTuple):
    """What a client does: the pieces that it sends, and how it then behaves."""

    pieces: Sequence[bytes]
    ends_writing: bool
    leaves: bool


def draw_attempt(rng: random.Random) -> Attempt:
    """One client."""
    parts = []
    for _ in range(rng.choice((1, 1, 1, 2, 5, 40))):
        if rng.random() < 0.1:
            parts.append(rng.choice(WHOLE))
            continue
        line = b" ".join((rng.choice(METHODS[:2] * 4 + METHODS), rng.choice(PATHS), rng.choice(VERSIONS[:1] * 12 + VERSIONS)))
        body = rng.choice(BODIES)
        headers = [rng.choice(HEADERS) for _ in range(rng.choice((0, 1, 2, 3, 6, 120)))]
        if rng.random() < 0.5:
            headers += [b"host: x", b"content-type: application/json", b"content-length: %d" % len(body)]
        end = rng.choice((b"\r\n",) * 8 + (b"\n", b"\r", b"\r\n\r\n"))
        parts.append(end.join([line, *headers]) + end + end + body)
    data = b"".join(parts)
    if rng.random() < 0.3:
        place = rng.randrange(len(data) + 1)
        data = data[:place] + rng.randbytes(rng.choice((1, 3, 50))) + data[place:]
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data) + 1)]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 2, 8))))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    return Attempt(pieces, rng.random() < 0.3, rng.random() < 0.15)


class Outcome(NamedTuple):
    """What came back, and how long the server then kept the connection."""

    answer: bytes
    is_closed: bool
    seconds: float


def attempt(port: int, what: Attempt, limit_s: float) -> Outcome:
    """Does it, and reads until the server closes or the time is over."""
    began_s = time.monotonic()
    answer = b""
    with socket.create_connection(("127.0.0.1", port), limit_s) as connection:
        try:
            for piece in what.pieces:
                connection.sendall(piece)
                if len(what.pieces) > 1:
                    time.sleep(0.001)
            if what.leaves:
                return Outcome(b"", True, 0.0)
            if what.ends_writing:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has closed, and what it said before is still to be read
        try:
            while time.monotonic() < began_s + limit_s:
                piece = connection.recv(65536)
                if not piece:
                    return Outcome(answer, True, time.monotonic() - began_s)
                answer += piece
        except TimeoutError:
            pass
        except OSError:
            return Outcome(answer, True, time.monotonic() - began_s)
    return Outcome(answer, False, time.monotonic() - began_s)
