"""Bad clients: who leaves or does not read is forgotten, and the others never notice.

Bursts are in test_soak.py, noise in test_raw_http.py.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from jaxpaged import events
from jaxpaged.config import KIB, Config, ServerConfig
from server.app import create_app
from server.service import Service
from tests.event_log import EventLog
from tests.fakes import FailingRunner
from tests.server.door_server import DoorServer, door_server, request_bytes, wait_until
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


QUICK = Config(server=ServerConfig(send_buffer=4 * KIB, max_unsent=4 * KIB, slow_client_timeout_s=0.5))


@pytest.fixture(scope="module")
def log() -> EventLog:
    """Of the server below."""
    return EventLog()


@pytest.fixture(scope="module")
def shared(log: EventLog) -> Iterator[DoorServer]:
    """The whole app over steps of 3 ms; 8 sequences at once."""
    with door_server(QUICK, engine=slow_engine(0.003), create_app=create_app, log=log) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def server(shared: DoorServer, log: EventLog) -> Iterator[DoorServer]:
    """The shared one: at rest afterwards, with books that agree, and the answer that it gave before."""
    canary = shared.ask("POST", PATH, completion(8)).json["choices"]
    wait_until(lambda: is_at_rest(shared))
    before = shared.service.ledger.ends()
    log.clear()
    yield shared
    shared.hang_up()
    wait_until(lambda: is_at_rest(shared))
    assert shared.ask("POST", PATH, completion(8)).json["choices"] == canary
    wait_until(lambda: is_at_rest(shared))
    ends = {end: count - before[end] for end, count in shared.service.ledger.ends().items()}
    told = [event.end for event in log.of(events.HttpAnswered) if event.end]
    assert {end.value: told.count(end.value) for end in ends} == {end.value: count for end, count in ends.items()}
    queued = {event.request_id for event in log.of(events.RequestQueued)}
    assert queued == {event.request_id for event in log.of(events.RequestFinished)}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("when", ["at once", "while it waits", "while it runs"])
def test_who_leaves_is_forgotten_within_a_second(server: DoorServer, is_stream: bool, when: str) -> None:
    # Short enough that none of them has to give its pages to another one, and waits then, too.
    others = [server.connect() for _ in range(8 if when == "while it waits" else 0)]
    for other in others:
        other.send(request_bytes("POST", PATH, completion(100)))
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
    assert watch.is_within(1.0)
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
