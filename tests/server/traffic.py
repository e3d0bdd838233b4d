"""A mix of clients, drawn from a seed: whole answers and streams, samples, bad bodies, and clients that leave at any moment.

Each answer is compared with what the server said to the same body when it was alone. `LiveServer` counts the ends, and its
`after_check` compares them with those of the server, the engine and the figures.
"""

import ctypes
import gc
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.server.live import LiveServer, Reply

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

BAD: Sequence[tuple[str, Any]] = (
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 0}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True, "temperature": -1}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": [10**9]}),
    (TEXT, {"prompt": "x", "max_tokens": 10**6}),
    (TEXT, {"prompt": "x", "logit_bias": {"99999999": 1}}),
    (TEXT, {"prompt": "x", "model": "../../etc/passwd"}),
    (TEXT, {"prompt": "x", "stop": ["a"] * 10_000}),
    (TEXT, b"{"),
    (TEXT, b"\xff"),
)


class Told(NamedTuple):
    """An answer that is the same whoever else is served: text and ids of each choice, and the counts without those of the cache."""

    texts: list[str]
    token_ids: list[list[int]]
    counts: tuple[int, int]


def told(reply: Reply) -> Told:
    """What a whole or streamed answer says."""
    assert reply.status == 200, reply.content
    ids: dict[int, list[int]] = {}
    bodies = reply.json if reply.is_stream else [reply.json]
    for body in bodies:
        for choice in body["choices"]:
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    usage = bodies[-1]["usage"]
    return Told(reply.texts, [ids[index] for index in sorted(ids)], (usage["prompt_tokens"], usage["completion_tokens"]))


class Vitals(NamedTuple):
    """What a process holds.

    Attributes:
        heap_bytes: what malloc has given out: whatever is larger than 512 bytes, and arrays.
        num_blocks: what Python's own allocator has given out: small objects, of 512 bytes at most.
        resident_bytes: of the whole process, with what the allocators keep for later.
    """

    num_threads: int
    num_descriptors: int
    heap_bytes: int
    num_blocks: int
    resident_bytes: int


class _MallocFigures(ctypes.Structure):
    """glibc's `struct mallinfo2`, summed over the arenas of all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def vitals() -> Vitals:
    """Of this process, when all garbage is collected and what is free was given back."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocFigures
    libc.malloc_trim(0)
    malloc = libc.mallinfo2()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Vitals(
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        malloc.uordblks + malloc.hblkhd,
        sys.getallocatedblocks(),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


class Traffic:
    """Clients of one server.

    Args:
        server: alone at first, so that it can be asked what it says to each body.
        seed: of every choice.
        num_bodies: different bodies.
        long_tokens: an answer that is still being made when its client leaves.
    """

    def __init__(self, server: LiveServer, *, seed: int, num_bodies: int = 24, long_tokens: int = 6000) -> None:
        self._server, self._seed, self._long_tokens = server, seed, long_tokens
        rng = random.Random(seed)
        self._bodies = [self._draw_body(rng) for _ in range(num_bodies)]
        self._told = [told(server.post(path, body)) for path, body in self._bodies]
        self.canary = self._told[0]

    def run(self, number: int, *, num_clients: int = 12, begin: int = 0, meanwhile: Callable[[int], None] = lambda _: None) -> None:
        """So many requests, and the checks of each; `meanwhile` is called now and then with the number of those that are done."""

        def one(index: int) -> None:
            self._one(random.Random(f"{self._seed} {index}"))
            if index % 100 == 0:
                meanwhile(index)

        with ThreadPoolExecutor(num_clients) as pool:
            for future in [pool.submit(one, index) for index in range(begin, begin + number)]:
                future.result()

    def check_canary(self) -> None:
        """The first body is answered as ever."""
        path, body = self._bodies[0]
        assert told(self._server.post(path, body)) == self.canary, "the canary answers otherwise"

    def leave(self, rng: random.Random) -> None:
        """A client that leaves before its answer is there: at once, when it has begun, or in the middle; politely or not."""
        server, is_streamed, num_events = self._server, rng.random() < 0.7, rng.choice((0, 1, 5, 20))
        body = {
            "prompt": [rng.randrange(3, 200) for _ in range(rng.choice((1, 20, 200)))],
            "max_tokens": self._long_tokens,
            "ignore_eos": True,
            "stream": is_streamed,
            "n": rng.choice((1, 1, 4)),
            "return_token_ids": True,  # so that a token without text is an event, too
        }
        connection = server.open(TEXT, body)
        if is_streamed and num_events:
            seen = b""
            while seen.count(b"data: ") < num_events:
                piece = connection.recv(65536)
                assert piece, f"the stream ended: {seen!r}"
                seen += piece
                assert seen.startswith(b"HTTP/1.1 200"), seen
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
        server.left()

    def _draw_body(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        size = rng.choice((1, 3, 15, 16, 17, 40, 90))
        common: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": rng.choice((1, 2, 7, 16, 24)),
            "return_token_ids": True,
            "n": rng.choice((2, 3, 4)) if rng.random() < 0.05 else 1,
        }
        if rng.random() < 0.4:
            letters = "".join(rng.choice("abcdefgh ") for _ in range(size))
            return CHAT, {**common, "messages": [{"role": "user", "content": letters}]}
        shared = [7] * rng.choice((0, 0, 16, 32))
        return TEXT, {**common, "prompt": [*shared, *(rng.randrange(3, 200) for _ in range(size))]}

    def _one(self, rng: random.Random) -> None:
        draw = rng.random()
        if draw < 0.10:
            self.leave(rng)
        elif draw < 0.15:
            path, body = rng.choice(BAD)
            reply = self._server.post(path, body)
            assert 400 <= reply.status < 500, (body, reply)
        else:
            index = rng.randrange(len(self._bodies))
            path, body = self._bodies[index]
            if rng.random() < 0.5:
                body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            assert told(self._server.post(path, body)) == self._told[index], "an answer hangs on who else is served"
