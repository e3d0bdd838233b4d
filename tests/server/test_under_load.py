"""Many clients, and bad ones: who is too many is told at once, who leaves or does not read is forgotten, and the others never notice."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from jaxpaged import events
from jaxpaged.config import KIB, Config, SchedulerConfig, ServerConfig
from server.app import create_app
from server.service import Service
from tests.fakes import EventLog, FailingRunner
from tests.server.door_server import Answer, DoorServer, door_server, request_bytes, wait_until
from tests.server.scripted_llm import script_runner, scripted_llm
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.jax

PATH = "/v1/completions"


def completion(max_tokens: int = 4, **fields: Any) -> bytes:
    return msgspec.json.encode({"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **fields})


def slow_engine(seconds: float) -> Callable[[Service], Any]:
    """Each step takes so long."""
    return lambda service: scripted_llm(
        service.config, [service.emit], lambda config: FailingRunner(script_runner(config), before=lambda _: time.sleep(seconds))
    )


def is_at_rest(server: DoorServer) -> bool:
    """Nothing runs, nothing waits, no page is held, the books are closed."""
    engine: Any = server.service.engine
    inner = engine._engine
    return not inner.has_work and inner.pages.num_in_use == 0 and server.service.ledger.num_open == 0


QUICK = Config(
    server=ServerConfig(send_buffer=4 * KIB, slow_client_timeout_s=0.5, header_timeout_s=0.5, body_timeout_s=0.5, keep_alive_s=0.5),
    scheduler=SchedulerConfig(max_num_queued_requests=64),
)


@pytest.fixture(scope="module")
def log() -> EventLog:
    """Of the server below."""
    return EventLog()


@pytest.fixture(scope="module")
def shared(log: EventLog) -> Iterator[DoorServer]:
    """The whole app over steps of 3 ms; 8 sequences at once, 64 may wait."""
    with door_server(QUICK, engine=slow_engine(0.003), create_app=create_app, log=log) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def server(shared: DoorServer, log: EventLog) -> Iterator[DoorServer]:
    """The shared one: at rest afterwards, with books that agree, and the answer that it gave before."""
    canary = shared.ask("POST", PATH, completion(8)).json["choices"]
    wait_until(lambda: is_at_rest(shared), 2)
    before = shared.service.ledger.ends()
    log.clear()
    yield shared
    shared.hang_up()
    wait_until(lambda: is_at_rest(shared), 2)
    assert shared.ask("POST", PATH, completion(8)).json["choices"] == canary
    wait_until(lambda: is_at_rest(shared), 2)
    ends = {end: count - before[end] for end, count in shared.service.ledger.ends().items()}
    told = [event.end for event in log.of(events.HttpAnswered) if event.end]
    assert {end.value: told.count(end.value) for end in ends} == {end.value: count for end, count in ends.items()}
    queued = {event.request_id for event in log.of(events.RequestQueued)}
    assert queued == {event.request_id for event in log.of(events.RequestFinished)}


def burst(server: DoorServer, num_clients: int) -> tuple[list[Answer], list[float], list[float]]:
    """So many clients at once at an engine that stands still: answers, seconds of the refusals, seconds of /health meanwhile."""
    engine: Any = server.service.engine
    asyncio.run(engine.pause("keep", clear_cache=False))
    refused_s: list[float] = []
    health_s: list[float] = []

    def ask(_: int) -> Answer:
        began_s = time.monotonic()
        answer = server.ask("POST", PATH, completion())
        if answer.status != 200:
            refused_s.append(time.monotonic() - began_s)
        return answer

    with ThreadPoolExecutor(num_clients) as pool:
        asked = [pool.submit(ask, number) for number in range(num_clients)]
        while len(refused_s) < num_clients - 64:
            began_s = time.monotonic()
            assert server.ask("GET", "/health").status == 200
            health_s.append(time.monotonic() - began_s)
        asyncio.run(engine.resume())
        return [future.result() for future in asked], refused_s, health_s


def test_a_burst_is_refused_exactly_as_far_as_it_is_too_much(server: DoorServer) -> None:
    answers, refused_s, health_s = burst(server, 200)
    assert [answer.status for answer in answers].count(200) == 64
    refused = [answer for answer in answers if answer.status != 200]
    assert {(answer.status, answer.code, answer.headers["retry-after"]) for answer in refused} == {(429, "queue_full", "1")}
    assert len(refused) == len(refused_s) == 136
    assert health_s, "nobody asked meanwhile"


@pytest.mark.tier("long", area="server")
def test_a_burst_of_a_thousand() -> None:
    config = Config(scheduler=SchedulerConfig(max_num_queued_requests=64))
    with door_server(config, engine=slow_engine(0.003), create_app=create_app) as server:  # type: ignore[arg-type]
        answers, refused_s, health_s = burst(server, 1000)
    assert [answer.status for answer in answers].count(200) == 64
    assert sorted(health_s)[int(len(health_s) * 0.99)] < 0.2
    assert len(refused_s) == 936


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("when", ["at once", "while it waits", "while it runs"])
def test_who_leaves_is_forgotten_within_a_second(server: DoorServer, is_stream: bool, when: str) -> None:
    others = [server.connect() for _ in range(8 if when == "while it waits" else 0)]
    for other in others:
        other.send(request_bytes("POST", PATH, completion(200)))
    connection = server.connect()
    connection.send(request_bytes("POST", PATH, completion(490, stream=is_stream), x_request_id="leaver"))
    if when == "while it waits":
        wait_until(lambda: server.service.progress.num_waiting == 1)
    elif when == "while it runs":
        wait_until(lambda: server.service.progress.num_running == 1)
    before = server.service.ledger.ends()["aborted"]  # type: ignore[index]
    connection.close()
    watch = Stopwatch()
    wait_until(lambda: server.service.ledger.ends()["aborted"] == before + 1)  # type: ignore[index]
    wait_until(lambda: server.service.progress.num_waiting == 0 and server.service.progress.num_running <= len(others))
    assert watch.seconds() < 1
    for other in others:
        assert other.read().status == 200


def test_who_does_not_read_a_stream_is_cut_off_and_its_neighbour_is_not_held_up(server: DoorServer) -> None:
    deaf = server.connect(receive_buffer=4 * KIB)
    deaf.send(request_bytes("POST", PATH, completion(490, stream=True, logprobs=5)))
    hears = server.connect()
    hears.send(request_bytes("POST", PATH, completion(400, stream=True)))
    wait_until(lambda: server.service.progress.num_running == 2)
    (ours,) = [c for c in server.server.server_state.connections if c.client == deaf.socket.getsockname()]
    most, began_s, before = 0, time.monotonic(), server.service.ledger.ends()["aborted"]  # type: ignore[index]
    while server.service.ledger.ends()["aborted"] == before:  # type: ignore[index]
        assert time.monotonic() < began_s + 10
        most = max(most, ours.transport.get_write_buffer_size())
        time.sleep(0.001)
    answer = hears.read()
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.body.count(b"data: ") > 350, "the neighbour's tokens were not collected"
    assert 4 * KIB < most < 16 * KIB, "what is not read is not collected here"


def test_scrapes_and_health_beside_streams(server: DoorServer) -> None:
    streams = [server.connect() for _ in range(8)]
    for stream in streams:
        stream.send(request_bytes("POST", PATH, completion(100, stream=True)))
    with ThreadPoolExecutor(8) as pool:
        paths = ["/metrics", "/health", "/load", "/livez"] * 25
        assert {answer.status for answer in pool.map(lambda path: server.ask("GET", path), paths)} == {200}
    bodies = {stream.read().body.count(b"data: ") for stream in streams}
    assert bodies <= {101, 102, 100} or min(bodies) > 50


def fuzz(server: DoorServer, count: int, seed: int) -> None:
    """Requests with random damage: each connection is answered or closed, and none of them is 5xx for a reason of ours."""
    rng = random.Random(seed)
    whole = [
        request_bytes("POST", PATH, completion(3)),
        request_bytes("GET", "/livez"),
        request_bytes("GET", "/v1/models"),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        b'5\r\n{"pro\r\n1b\r\nmpt":"a","max_tokens":1   }\r\n0\r\n\r\n',
    ]
    for _ in range(count):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            place, what = rng.randrange(len(data) + 1), rng.randrange(5)
            if what == 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            elif what == 1:
                del data[place : place + rng.randrange(1, 9)]
            elif what == 2:
                data[place:place] = rng.choice((b"\r\n", b"\0", b": ", b"\xff\xfe", b"%00", b"..", b"x" * 3000, b"\r\n\r\n", b"0\r\n\r\n"))
            elif what == 3:
                data[place:place] = data[: rng.randrange(1, 40)]
            else:
                del data[place:]
            data = data or bytearray(b"\n")
        connection = server.connect()
        try:
            connection.send(bytes(data))
            if rng.random() < 0.7:
                connection.socket.shutdown(1)
        except OSError:
            pass
        connection.socket.settimeout(3)
        connection.seconds_to_end()
        statuses = [int(line.split(b" ")[1]) for line in connection.seen.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert all(status < 500 for status in statuses), (bytes(data), connection.seen)
        connection.close()


def test_damaged_requests(server: DoorServer) -> None:
    fuzz(server, 80, seed=7)


@pytest.mark.tier("long", area="server")
@pytest.mark.parametrize("seed", range(10))
def test_many_damaged_requests(server: DoorServer, seed: int) -> None:
    fuzz(server, 1000, seed=seed)
