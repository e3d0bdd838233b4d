"""Field cases whose fault lies in time: clients that leave at a certain moment, ids that meet, failures, bodies without an end."""

import json
import random
import socket
import threading
import time
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import MIB, Config, LogConfig, SchedulerConfig, ServerConfig
from jaxpaged.detokenizer import Detokenizer
from jaxpaged.tokenizer import Tokenizer
from server.ledger import End
from tests.fakes import FailingRunner
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, talker
from tests.stopwatch import SLOWER, Stopwatch

pytestmark = pytest.mark.jax

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class Steps:
    """A device that makes a step whenever it is allowed one, or freely."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.is_free = True

    def before(self, _: int) -> None:
        """Before each step."""
        while not self.is_free and not self._allowed.acquire(timeout=0.005):
            pass

    def allow(self, number: int) -> None:
        """So many more."""
        self._allowed.release(number)


MOMENTS = {"queued": 0, "in a chunk of its prompt": 2, "token 1": 4, "token 50": 53, "one before the end": 82}
"""A prompt of 200 tokens takes four steps of 64; 80 tokens are asked for."""


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_o28_clients_that_leave_at_a_certain_moment(chat_tokenizer: Tokenizer, moment: str, is_streamed: bool, is_reset: bool) -> None:
    """The request leaves the engine within two steps, its pages are free, the next one is served, and one end more is booked."""
    steps = Steps()
    runner = FailingRunner(talker(chat_tokenizer, max_num_batched_tokens=64), before=steps.before)
    with live_server(chat_tokenizer, runner) as server:
        engine = server.engine._engine
        steps.is_free = False
        body = {"prompt": [*range(3, 203)], "max_tokens": 80, "ignore_eos": True, "temperature": 0, "stream": is_streamed}
        connection = server.open(TEXT, body)
        wait_until(lambda: engine.num_unfinished == 1)
        made = len(server.log.of(events.StepFinished))
        for _ in range(MOMENTS[moment]):
            steps.allow(1)
            made += 1
            wait_until(lambda number=made: len(server.log.of(events.StepFinished)) >= number - 1)  # type: ignore[misc]
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
        server.left()
        wait_until(lambda: server.service.ledger.num_open == 0)
        steps.allow(2)
        wait_until(lambda: not engine.has_work and engine.pages.num_in_use == 0)
        (finished,) = server.log.of(events.RequestFinished)
        assert finished.reason == "abort"
        steps.is_free = True
        assert server.complete("next").status == 200
        assert server.service.ledger.ends()[End.ABORTED] == 1


@pytest.mark.parametrize("when", ["together", "5 ms apart", "after the first token"])
def test_o30_one_request_id_for_two(chat_tokenizer: Tokenizer, when: str) -> None:
    runner = FailingRunner(talker(chat_tokenizer), before=lambda _: time.sleep(0.002))
    with live_server(chat_tokenizer, runner) as server:
        expected = [server.complete(prompt, max_tokens=30).text for prompt in ("one", "two")]
        texts: dict[int, str] = {}

        def send(index: int) -> None:
            body = {"prompt": ("one", "two")[index], "temperature": 0, "max_tokens": 30, "request_id": "same", "user": "same"}
            reply = server.request("POST", TEXT, body, {"x-request-id": "same"})
            assert reply.headers["x-request-id"] == "same"
            texts[index] = reply.text

        first = threading.Thread(target=send, args=(0,))
        first.start()
        if when == "5 ms apart":
            time.sleep(0.005)
        elif when == "after the first token":
            wait_until(lambda: any(event.ttft_s > 0 for event in server.log.of(events.RequestFirstToken)[2:]))
        send(1)
        first.join()
        assert [texts[0], texts[1]] == expected


@pytest.mark.parametrize("is_streamed", [False, True])
def test_o32_a_detokenizer_that_raises(chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_streamed: bool) -> None:
    """F8: the request is told, the answer ends within a second, and others go on."""
    real = Detokenizer.append

    def append(self: Detokenizer, token_ids: Any) -> str:
        if len(self.text) >= 3:
            raise UnicodeError("secret/detokenizer.py")
        return real(self, token_ids)

    with live_server(chat_tokenizer) as server:
        with monkeypatch.context() as patch:
            patch.setattr(Detokenizer, "append", append)
            watch = Stopwatch()
            reply = server.complete("x", stream=is_streamed)
            assert watch.is_within(1.0)
            assert b"secret" not in reply.content
            error = reply.json[-1]["error"] if is_streamed and reply.status == 200 else reply.error
            assert error["type"] == "server_error"
            assert b"[DONE]" not in reply.content
        assert (server.complete("y").status, server.get("/health").status) == (200, 200)


def test_a_tokenizer_that_raises(chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """F7."""
    with live_server(chat_tokenizer) as server:
        with monkeypatch.context() as patch:
            for name in ("encode", "encode_chat"):
                patch.setattr(Tokenizer, name, lambda *_, **__: 1 / 0)
            for is_streamed in (False, True):
                for reply in (server.complete("x", stream=is_streamed), server.chat("x", stream=is_streamed)):
                    assert (reply.status, reply.error["code"]) == (500, "request_failed")
        assert len(server.tracebacks) == 4
        server.tracebacks.clear()
        assert (server.complete("y").status, server.get("/health").status) == (200, 200)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_o32_an_operator_ends_a_stream(chat_tokenizer: Tokenizer, path: str) -> None:
    runner = FailingRunner(talker(chat_tokenizer), before=lambda _: time.sleep(0.005))
    with live_server(chat_tokenizer, runner) as server:
        prompt = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
        connection = server.stream_until(
            path, {**prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}, lambda seen: seen.count(b"data: ") >= 3
        )
        for request_id in list(server.engine._engine.unfinished_ids):
            server.engine.abort(request_id)
        watch, content = Stopwatch(), b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        connection.close()
        assert watch.is_within(1.0)
        assert content.count(b'"error":{') == 1
        assert b"[DONE]" not in content
        server.counts[End.FAILED] += 1
        server.num_unsure += 1


SURROGATES = ("\\ud83d", "a\\udc00b", "\\udfff\\ud800")


@pytest.mark.parametrize("half", SURROGATES)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_o31_halves_of_characters_anywhere(server: LiveServer, half: str, is_streamed: bool) -> None:
    """In names and values of every field that holds text, also of fields that nobody looks at."""
    message = '{"role":"user","content":"x"}'
    bodies = [
        f'{{"messages":[{{"role":"{half}","content":"x"}}]',
        f'{{"messages":[{{"role":"user","content":[{{"type":"{half}","text":"x"}}]}}]',
        f'{{"messages":[{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":"{half}"}}}}]}}]',
        f'{{"messages":[{message}],"stop":"{half}"',
        f'{{"messages":[{message}],"model":"{half}"',
        f'{{"messages":[{message}],"cache_salt":"{half}"',
        f'{{"messages":[{message}],"bad_words":["{half}"]',
        f'{{"messages":[{message}],"chat_template_kwargs":{{"{half}":1}}',
        f'{{"messages":[{message}],"logit_bias":{{"{half}":1}}',
        f'{{"messages":[{message}],"tools":[{{"type":"{half}"}}]',
    ]
    for body in bodies:
        stream = ',"stream":true' if is_streamed else ""
        reply = server.post(CHAT, f"{body}{stream}}}".encode())
        assert reply.status == 400, body
        reply.content.decode("utf-8")
    for body in (f'{{"messages":[{message}],"max_tokens":1,"user":"{half}"}}', f'{{"messages":[{message}],"max_tokens":1,"{half}":1}}'):
        assert server.post(CHAT, body.encode()).status in (200, 400)


def test_o34_nonsense_is_refused_at_once(chat_tokenizer: Tokenizer) -> None:
    """A hundred megabytes, a body without an end, wrong methods: an answer in OpenAI's form, and soon."""
    config = Config(log=LogConfig(level="error"), server=ServerConfig(body_timeout_s=0.5))
    with live_server(chat_tokenizer, config=config) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            watch = Stopwatch()
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            connection.sendall(b"content-length: %d\r\n\r\n" % (100 * MIB))
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
            assert watch.is_within(0.5)
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
            watch, answer = Stopwatch(), b""
            while watch.is_within(2.5) and not answer:
                try:
                    connection.sendall(b'2\r\n{"\r\n')
                    connection.settimeout(0.05)
                    answer = connection.recv(65536)
                except TimeoutError:
                    pass
            assert answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 413 "))
        wait_until(lambda: server.service.ledger.num_open == 0)
        ends = server.service.ledger.ends()
        assert ends[End.REJECTED] + ends[End.ABORTED] == 2
        for end, number in ends.items():
            server.counts[end] = number
        for path in (TEXT, CHAT, "/tokenize"):
            for method in ("GET", "PUT", "DELETE", "PATCH"):
                assert server.request(method, path).status == 405


def test_o29_many_prompts_times_many_samples(server: LiveServer) -> None:
    """Refused before anything is made of them, while health is asked."""
    num_queued = len(server.log.of(events.RequestQueued))
    for prompts, n in ((1000, 100), (256, 64), (257, 1), (1, 10**6), (16, 2**63)):
        tries_s = []
        for _ in range(3):  # a collection of the whole run's garbage may fall into one of them
            watch = Stopwatch()
            reply = server.post(TEXT, {"prompt": ["x"] * prompts, "n": n})
            assert reply.status == 400
            assert server.get("/health").status == 200
            tries_s.append(watch.seconds())
        assert min(tries_s) < SLOWER * 0.5, tries_s
    assert len(server.log.of(events.RequestQueued)) == num_queued


@pytest.mark.parametrize("seed", range(3))
def test_o47_every_end_is_counted_whatever_it_was(chat_tokenizer: Tokenizer, seed: int) -> None:
    """25 answers, 20 clients that leave, 5 failures, some refused: the figures are those of the clients, and nothing is left."""
    is_bad = threading.Event()
    rng = random.Random(seed)
    runner = FailingRunner(
        talker(chat_tokenizer, max_model_len=8192, num_pages=2500),
        before=lambda _: time.sleep(0.001),
        without_id=lambda step, row: is_bad.is_set() and row == 0,
    )
    policy = SchedulerConfig(max_num_queued_requests=4)
    with live_server(chat_tokenizer, runner, Config(log=LogConfig(level="error"), scheduler=policy)) as server:
        kinds = ["answer"] * 25 + ["leave"] * 20 + ["fail"] * 5
        rng.shuffle(kinds)
        for kind in kinds:
            if kind == "leave":
                body = {"prompt": [7] * rng.choice((1, 100)), "max_tokens": 6000, "stream": rng.random() < 0.5, "ignore_eos": True}
                connection = server.open(TEXT, body)
                if rng.random() < 0.7:
                    wait_until(lambda: server.engine._engine.num_unfinished >= 1)
                connection.close()
                server.left()
                wait_until(lambda: server.service.ledger.num_open == 0)
            else:
                if kind == "fail":
                    is_bad.set()
                reply = server.complete(json.dumps(rng.random()))
                is_bad.clear()
                assert reply.status == (500 if kind == "fail" else 200)
        server.after_check()
        figures = server.figures()
        assert {end: figures[f"jaxpaged_http_ends_total{{end={end}}}"] for end in ("length", "aborted", "failed")} == {
            "length": 25,
            "aborted": 20,
            "failed": 5,
        }
        assert figures["jaxpaged_time_to_first_token_seconds_count"] <= 45
