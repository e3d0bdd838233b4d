"""Every limit at its real default: served at the limit; one over it is refused with field, value and limit, for next to no work."""

import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxpaged.config import Config, LogConfig, ServerConfig
from jaxpaged.tokenizer import Tokenizer
from server.protocol.responses import ResponseObject
from server.response_store import ResponseStore, StoredResponse
from tests.server.door_server import Connection, DoorServer, door_server, wait_until
from tests.server.live import LiveServer, live_server, talker
from tests.server.scripted_llm import scripted_llm
from tests.server.served_process import completion

pytestmark = pytest.mark.jax

TEXT, CHAT, EMBEDDINGS, SCORE = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score"
MOST_REFUSAL_S = 0.05
MIB = 2**20


@pytest.fixture(scope="module")
def real_module_server(chat_tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """Nothing is set: what bounds requests are the defaults. The device has room for conversations of 2,048 messages and 2,000 ids."""
    runner = talker(chat_tokenizer, max_model_len=32_768, num_pages=2_100, max_num_batched_tokens=8_192, max_num_seqs=64)
    runner.vocab = 2_000
    with live_server(chat_tokenizer, runner, Config(log=LogConfig(level="error"))) as server:
        yield server


@pytest.fixture
def real(real_module_server: LiveServer) -> Iterator[LiveServer]:
    yield real_module_server
    real_module_server.after_check()


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 0, **fields}


CASES: list[tuple[str, str, int, int, str, Any]] = [
    (TEXT, "n", 64, 65, "limits.max_n", lambda number: text(n=number)),
    (CHAT, "n", 64, 65, "limits.max_n", lambda number: chat(n=number)),
    (TEXT, "prompt", 256, 257, "limits.max_prompts", lambda number: text(prompt=["x"] * number)),
    (TEXT, "n", 1024, 1032, "limits.max_answers", lambda number: text(prompt=["x"] * (number // 8), n=8)),
    (EMBEDDINGS, "input", 2048, 2049, "limits.max_inputs", lambda number: {"input": ["x"] * number}),
    (SCORE, "continuation", 256, 257, "limits.max_prompts", lambda number: {"prompt": "x", "continuation": ["y"] * number}),
    (CHAT, "messages", 2048, 2049, "limits.max_messages", lambda number: chat(messages=[{"role": "user", "content": ""}] * number)),
    (TEXT, "stop", 16, 17, "limits.max_stop", lambda number: text(stop=["zz"] * number)),
    (CHAT, "stop", 512, 513, "limits.max_stop_chars", lambda number: chat(stop="z" * number)),
    (TEXT, "stop_token_ids", 128, 129, "limits.max_stop_token_ids", lambda number: text(stop_token_ids=list(range(number)))),
    (CHAT, "logit_bias", 1024, 1025, "limits.max_logit_bias", lambda number: chat(logit_bias={str(i): 0 for i in range(number)})),
    (TEXT, "logprobs", 20, 21, "sampling.max_logprobs", lambda number: text(logprobs=number)),
    (CHAT, "top_logprobs", 20, 21, "sampling.max_logprobs", lambda number: chat(logprobs=True, top_logprobs=number)),
    (TEXT, "prompt_logprobs", 20, 21, "sampling.max_logprobs", lambda number: text(prompt_logprobs=number)),
    (TEXT, "priority", 0, -1, "limits.min_priority", lambda number: text(priority=number)),
]


def refused(server: LiveServer, path: str, body: bytes) -> Any:
    """What a body is answered, which takes the process next to nothing of a processor: client, server and engine together."""
    least_s = 1.0
    for _ in range(3):
        begun_s = time.process_time()
        reply = server.post(path, body)
        least_s = min(least_s, time.process_time() - begun_s)
    assert least_s < MOST_REFUSAL_S
    return reply


@pytest.mark.parametrize(("path", "field", "at", "over", "option", "make"), CASES, ids=[f"{case[4]}-{case[0]}" for case in CASES])
def test_at_the_limit_and_one_over(real: LiveServer, path: str, field: str, at: int, over: int, option: str, make: Any) -> None:
    assert real.post(path, make(at)).status == 200
    reply = refused(real, path, msgspec.json.encode(make(over)))
    assert (reply.status, reply.error["param"]) == (400, field)
    message = reply.error["message"]
    assert field in message
    assert option in message
    assert f"got {over}" in message
    assert str(at) in message


def test_a_body_of_four_megabytes_and_one_byte_more(real: LiveServer) -> None:
    raw = b'{"prompt":"x","max_tokens":1,"user":"%s"}'
    full, more = (raw % (b"u" * (4 * MIB - len(raw) + 2 + extra)) for extra in (0, 1))
    assert (len(full), len(more)) == (4 * MIB, 4 * MIB + 1)
    assert real.post(TEXT, full).status == 200
    reply = refused(real, TEXT, more)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert reply.error["message"] == f"the body may have at most {4 * MIB} bytes (server.max_body), got {4 * MIB + 1} bytes"


def test_as_many_parts_as_a_body_may_have(real: LiveServer) -> None:
    def body(number: int) -> bytes:
        """`number` texts, names of fields, lists and objects in all."""
        rest = {"prompt": "x", "max_tokens": 1, "metadata": {}}
        return msgspec.json.encode({**rest, "metadata": {f"key{index}": index for index in range(number - 6)}})

    assert real.post(TEXT, body(65_536)).status == 200
    reply = refused(real, TEXT, body(65_537))
    assert reply.status == 400
    assert "65536 texts" in reply.error["message"]
    assert "limits.max_body_parts), got 65537 or more" in reply.error["message"]


def test_as_many_responses_as_are_stored() -> None:
    def stored(number: int, length: int = 0) -> StoredResponse:
        response = ResponseObject(
            id=f"resp_{number}",
            created_at=0,
            status="completed",
            instructions="i" * length,
            max_output_tokens=None,
            metadata={},
            model="m",
            previous_response_id=None,
            store=True,
            temperature=None,
            top_logprobs=0,
            top_p=None,
        )
        return StoredResponse(response, [], [])

    store = ResponseStore(Config().limits)
    for number in range(1000):
        store.put(stored(number))
    assert len(store) == 1000
    store.put(stored(1000))
    assert len(store) == 1000
    assert "resp_0" not in store._stored
    store = ResponseStore(Config().limits)
    for number in range(64):
        store.put(stored(number, MIB - stored(number).size))
    assert (len(store), store.num_bytes) == (64, 64 * MIB)
    store.put(stored(64))
    assert len(store) == 64
    assert store.num_bytes < 64 * MIB
    assert "resp_0" not in store._stored


@pytest.fixture(scope="module")
def door() -> Iterator[DoorServer]:
    # The limit on time is another matter, and a busy machine takes its time to open 2,048 connections.
    config = Config(server=ServerConfig(header_timeout_s=600))
    with door_server(config, engine=lambda service: scripted_llm(service.config, [service.emit])) as server:
        yield server


def with_headers(number: int) -> bytes:
    lines = "".join(f"x-{index}: 1\r\n" for index in range(number - 1))
    return f"GET /livez HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode()


def with_head_of(size: int) -> bytes:
    head = b"GET /livez HTTP/1.1\r\nhost: x\r\nfill: %s\r\n\r\n"
    return head % (b"f" * (size - len(head) + 2))


@pytest.mark.parametrize(
    ("make", "limit", "option", "what"),
    [(with_headers, 100, "server.max_headers", "headers"), (with_head_of, 16 * 1024, "server.max_header_size", "bytes")],
)
def test_as_many_headers(door: DoorServer, make: Any, limit: int, option: str, what: str) -> None:
    least_s = 1.0
    for _ in range(3):
        at, over = door.connect(), door.connect()
        at.send(make(limit))
        assert at.read().status == 200
        begun_s = time.process_time()
        over.send(make(limit + 1))
        answer = over.read()
        least_s = min(least_s, time.process_time() - begun_s)
        assert (answer.status, answer.code) == (431, "headers_too_large")
        message = answer.json["error"]["message"]
        assert f"{limit} {what}" in message
        assert option in message
        assert f"got {limit + 1}" in message
    assert least_s < MOST_REFUSAL_S


def silent_connection(port: int) -> socket.socket:
    """One that is being opened; nobody waits for it here, which a busy machine would make long."""
    opened = socket.socket()
    opened.setblocking(False)
    assert opened.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
    return opened


def test_as_many_connections(door: DoorServer) -> None:
    door.hang_up()
    wait_until(lambda: door.num_connections == 0)
    used = door.connect()
    held = [silent_connection(door.port) for _ in range(2047)]
    try:
        wait_until(lambda: door.num_connections == 2048)
        assert used.request("POST", TEXT, completion(2)).status == 200
        for _ in range(3):
            extra = Connection(door.port)
            answer = extra.read()
            extra.close()
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "too_many_connections", "1")
            assert "2048" in answer.json["error"]["message"]
        assert used.request("GET", "/livez").status == 200
    finally:
        for opened in held:
            opened.close()
