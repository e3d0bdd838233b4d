"""Many clients at once: a soak of good, bad and leaving ones (L1), a burst into a short queue (L3), a storm of cancellations (L5)."""

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config, LogConfig, SchedulerConfig
from jaxpaged.tokenizer import Tokenizer
from server.ledger import End
from tests.server.bad_inputs import OK, rows
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker

pytestmark = pytest.mark.jax

NUM_THREADS = 6
CANARY = {"prompt": "canary", "temperature": 0, "max_tokens": 16}


def soak(server: LiveServer, num_requests: int, seed: int) -> None:
    """Sizes of all kinds, 10 % that leave, 5 % bad ones, 5 % with several answers; the canary sings the same throughout."""
    bad = [row for row in rows() if row.status != OK]
    canary = server.post("/v1/completions", CANARY).text
    expected = {prompt: server.complete(prompt, max_tokens=24).text for prompt in ("one", "two", "three", "four")}
    faults: list[str] = []
    lock = threading.Lock()
    numbers = iter(range(num_requests))

    def work(own: random.Random) -> None:
        while True:
            with lock:
                if next(numbers, None) is None:
                    return
            draw = own.random()
            try:
                if draw < 0.10:
                    is_streamed = own.random() < 0.5
                    body: dict[str, Any] = {
                        "prompt": [own.randrange(3, 259)] * own.randrange(1, 200),
                        "max_tokens": 200,
                        "stream": is_streamed,
                    }
                    connection = server.open("/v1/completions", body)
                    time.sleep(own.random() * 0.01)
                    connection.close()
                    with lock:
                        server.left()
                elif draw < 0.15:
                    row = own.choice(bad)
                    assert server.post(row.path, row.body).status == row.status
                elif draw < 0.20:
                    assert len(server.complete(own.choice(list(expected)), n=own.randrange(2, 5), max_tokens=4).texts) >= 2
                elif draw < 0.25:
                    assert server.post("/v1/completions", CANARY).text == canary
                elif draw < 0.35:
                    assert server.post("/v1/responses", {"input": "x", "max_output_tokens": own.randrange(1, 20)}).status == 200
                else:
                    prompt = own.choice(list(expected))
                    reply = server.complete(prompt, max_tokens=24, stream=own.random() < 0.5)
                    assert reply.text == expected[prompt]
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(random.Random(seed + index),)) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert server.post("/v1/completions", CANARY).text == canary


def threads_but_tokenizers() -> Counter[str]:
    """The threads that run; the pool of tokenizers starts its own when they are needed."""
    return Counter(thread.name for thread in threading.enumerate() if not thread.name.startswith("jaxpaged-tokenizer"))


def test_soak(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer) as server:
        server.chat("warm")
        before = threads_but_tokenizers()
        soak(server, 500, 1)
        wait_until(lambda: server.door.num_connections == 0)
        assert threads_but_tokenizers() == before
        assert sum(server.counts.values()) >= 500


@pytest.mark.tier("long", area="server")
def test_long_soak(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer) as server:
        soak(server, 10_000, 2)


def test_a_leak_would_be_noticed(chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """L2: pages that one request in many does not give back."""
    with pytest.raises(AssertionError):
        with live_server(chat_tokenizer) as server:
            pages = server.engine._engine.pages
            release, number = pages.release, iter(range(10**9))
            monkeypatch.setattr(pages, "release", lambda *args: None if next(number) == 7 else release(*args))
            for index in range(20):
                server.complete(f"number {index}")


def test_a_lost_end_would_be_noticed(chat_tokenizer: Tokenizer) -> None:
    """A request that the books count twice."""
    with pytest.raises(AssertionError, match="the client counted otherwise"):
        with live_server(chat_tokenizer) as server:
            server.complete("x")
            server.service.ledger._ends[End.LENGTH] += 1


def test_a_burst_into_a_short_queue(chat_tokenizer: Tokenizer) -> None:
    """200 clients at once, 8 run and 64 wait: exactly the others are told to come again, at once, and health is quick throughout."""
    policy = SchedulerConfig(max_num_queued_requests=64)
    runner = slowed(talker(chat_tokenizer, max_num_seqs=8, num_pages=200), 0.02)
    with live_server(chat_tokenizer, runner, Config(log=LogConfig(level="error"), scheduler=policy)) as server:
        replies: list[tuple[int, float]] = []
        gate = threading.Barrier(201)

        def ask(index: int) -> None:
            gate.wait()
            begun_s = time.monotonic()
            reply = server.complete([5, 6, 7 + index % 200], max_tokens=15, stream=index % 2 == 0)
            replies.append((reply.status, time.monotonic() - begun_s))

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(200)]
        for thread in threads:
            thread.start()
        gate.wait()
        slowest_s = 0.0
        while any(thread.is_alive() for thread in threads):
            begun_s = time.monotonic()
            assert server.get("/livez").status == 200
            slowest_s = max(slowest_s, time.monotonic() - begun_s)
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        by_status = Counter(status for status, _ in replies)
        assert by_status.keys() == {200, 429}
        assert by_status[200] >= 72
        rejected = server.log.of(events.RequestRejected)
        assert by_status[429] == len(rejected) == sum(event.code == "queue_full" for event in rejected)
        assert max(event.num_waiting for event in server.log.of(events.StepFinished)) <= 64
        assert sorted(seconds for status, seconds in replies if status == 429)[-2] < 3.0
        assert slowest_s < 2.0


def test_a_storm_of_cancellations_and_a_probe(chat_tokenizer: Tokenizer) -> None:
    own = random.Random(5)
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.001)) as server:
        begun_s = time.monotonic()
        expected = server.chat("probe").text
        idle_s = time.monotonic() - begun_s
        for _ in range(300):
            body = {"prompt": [own.randrange(3, 259)] * own.randrange(1, 400), "max_tokens": 100, "stream": own.random() < 0.5}
            connection = server.open("/v1/completions", body)
            time.sleep(own.random() * 0.004)
            connection.close()
        server.left(300)
        wait_until(lambda: not server.engine._engine.has_work and server.service.ledger.num_open == 0, 1.0)
        begun_s = time.monotonic()
        assert server.chat("probe").text == expected
        assert time.monotonic() - begun_s < max(0.5, 2 * idle_s)
