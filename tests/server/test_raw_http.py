"""B4: bytes that are nearly HTTP. The server lives, closes every connection in time, and never takes a body for a request."""

import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpaged.config import MIB, Config, LogConfig, ServerConfig
from jaxpaged.tokenizer import Tokenizer
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker
from tests.server.raw_http import attempt, draw_attempt
from tests.server.traffic import vitals
from tests.server.workers import with_many_clients
from tests.stopwatch import SLOWER, Stopwatch

pytestmark = pytest.mark.jax

QUICK = ServerConfig(header_timeout_s=1.0, body_timeout_s=1.0, keep_alive_s=1.0, slow_client_timeout_s=1.0)
LIMIT_S = 1.0 + 2.0


@pytest.fixture(scope="module")
def quick_server(chat_tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """The whole app, and a second of patience."""
    with live_server(chat_tokenizer, config=Config(log=LogConfig(level="error"), server=QUICK)) as server:
        yield server


def trust_the_books(server: LiveServer) -> None:
    """Nobody knows how such clients have ended; that the books agree with the figures and the engine is still checked."""
    wait_until(lambda: server.service.ledger.num_open == 0)
    server.counts = Counter({end.value: number for end, number in server.service.ledger.ends().items()})
    server.num_unsure, server.num_prompts = 10**9, 0
    server.after_check()


STATUS = re.compile(rb"HTTP/1\.[01] (\d\d\d) ")


@pytest.mark.parametrize(
    "number",
    [
        150,
        pytest.param(10_000, marks=[pytest.mark.tier("long", area="server"), pytest.mark.timeout(7200)]),
    ],
)
def test_bytes_that_are_nearly_http(quick_server: LiveServer, number: int) -> None:
    server, statuses = quick_server, Counter[int]()
    lock = threading.Lock()

    def one(index: int) -> None:
        what = draw_attempt(random.Random(index))
        outcome = attempt(server.port, what, LIMIT_S + 3)
        assert outcome.is_closed, (index, what, outcome)
        assert outcome.seconds < LIMIT_S + 1, (index, outcome)
        found = [int(status) for status in STATUS.findall(outcome.answer)]
        assert all(200 <= status < 500 or status in (100, 501, 503) for status in found), (index, outcome)
        assert b"Traceback" not in outcome.answer
        with lock:
            statuses.update(found)

    with_many_clients(min(number, 100), one, 24)
    wait_until(lambda: server.door.num_connections == 0)
    before = vitals()
    for begin in range(100, number, 1000):
        with_many_clients(min(1000, number - begin), lambda index, first=begin: one(first + index), 24)
        assert server.get("/livez").status == 200
    wait_until(lambda: server.door.num_connections == 0)
    after = vitals()
    assert (after.num_threads, after.num_descriptors) == (before.num_threads, before.num_descriptors)
    assert after.resident_bytes - before.resident_bytes < 50 * MIB
    assert {200, 400} <= set(statuses)
    trust_the_books(server)


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"

AMBIGUOUS = {
    "length and chunks": b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: %d\r\n\r\n0\r\n\r\n",
    "space before the colon": b"content-length: %d\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "tab before chunked": b"content-length: %d\r\ntransfer-encoding:\tchunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"content-length: %d\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks are not the last coding": b"content-length: %d\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: %d\r\n\r\n",
    "list of lengths": b"content-length: 0, %d\r\n\r\n",
    "plus": b"content-length: +%d\r\n\r\n",
    "minus": b"content-length: -%d\r\n\r\n",
    "hexadecimal": b"content-length: 0x%d\r\n\r\n",
    "folded": b"x: 1\r\n content-length: %d\r\n content-length: 0\r\n\r\n",
    "NUL in the name": b"content-length\x00: %d\r\n\r\n",
    "no length's digits": b"content-length: \r\ncontent-length: %d\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_body_is_never_taken_for_a_request(quick_server: LiveServer, name: str) -> None:
    """Where two readers could see the end of a body at two places, there is one answer, it is a refusal, and the connection ends."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    data = head + AMBIGUOUS[name].replace(b"%d", b"%d" % len(SMUGGLED)) + SMUGGLED
    with socket.create_connection(("127.0.0.1", quick_server.port), 10) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert [int(status) for status in STATUS.findall(answer)] == [400], answer
    assert b'"object":"list"' not in answer


def test_a_length_beyond_all_numbers(quick_server: LiveServer) -> None:
    for length in (b"99999999999999999999999", b"18446744073709551616", b"9223372036854775807"):
        with socket.create_connection(("127.0.0.1", quick_server.port), 10) as connection:
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\nabc")
            assert STATUS.findall(connection.recv(65536))[0] in (b"400", b"413")


def test_readers_that_never_read(chat_tokenizer: Tokenizer) -> None:
    """A megabyte for each, and none of it read: little memory, pages free after the timeout, and neighbours get their tokens."""
    config = Config(log=LogConfig(level="error"), server=ServerConfig(slow_client_timeout_s=1.0))
    runner = slowed(talker(chat_tokenizer, max_model_len=8192, num_pages=4500, max_num_seqs=16), 0.002)
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 5, "temperature": 0}
    with live_server(chat_tokenizer, runner, config) as server:
        assert server.complete("warm", stream=True, max_tokens=50).status == 200

        def steps_of_a_neighbour() -> tuple[int, int]:
            reply = server.complete("neighbour", stream=True, max_tokens=30)
            return len(reply.json), reply.json[-1]["choices"][0]["finish_reason"] == "length"

        alone = steps_of_a_neighbour()
        before = vitals().resident_bytes
        silent = [server.open("/v1/completions", body, receive_buffer=4096) for _ in range(12)]
        wait_until(lambda: server.engine._engine.scheduler.num_running >= 12)
        beside = steps_of_a_neighbour()
        assert abs(beside[0] - alone[0]) <= alone[0] // 3, "its deltas come step by step as before"
        grown = vitals().resident_bytes - before
        assert grown < 2 * MIB * len(silent)
        wait_until(lambda: server.service.ledger.num_open == 0 and not server.engine._engine.has_work, 25.0)  # the default is 30
        assert server.engine._engine.pages.num_in_use == 0
        server.left(len(silent))
        for connection in silent:
            connection.close()


def test_health_beside_many_streams_and_a_prompt_of_four_megabytes(chat_tokenizer: Tokenizer) -> None:
    runner = slowed(talker(chat_tokenizer, max_model_len=512, num_pages=2500, max_num_seqs=64), 0.01)
    with live_server(chat_tokenizer, runner) as server:
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        streams = [server.open("/v1/completions", body) for _ in range(64)]
        wait_until(lambda: server.engine._engine.scheduler.num_running == 64)
        waits: list[float] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set() or len(waits) < 3:
                watch = Stopwatch()
                assert server.get("/health").status == 200
                waits.append(watch.seconds())

        asking = threading.Thread(target=ask)
        asking.start()
        reply = server.complete("word " * (4 * MIB // 5 - 100))
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        is_over.set()
        asking.join()
        for connection in streams:
            connection.close()
        server.left(len(streams))
        assert max(waits) < SLOWER * 0.2, waits
