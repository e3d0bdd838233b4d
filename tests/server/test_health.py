"""Health in every state of a server: what /livez, /readyz, /health and KServe's two say, and what they cost."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config, SchedulerConfig, ServerConfig
from jaxpaged.errors import EngineDeadError
from server import health_check
from server.health_check import HealthCheck
from server.phase import Phase
from server.service import Service
from server.watchdog import Watchdog
from tests.event_log import EventLog
from tests.fakes import FailingRunner
from tests.server.door_server import DoorServer, door_server, request_bytes, wait_until
from tests.server.scripted_llm import script_runner, scripted_llm
from tests.server.served_process import completion
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.jax

READY_PATHS = ("/health", "/readyz", "/v2/health/ready")
LIVE_PATHS = ("/livez", "/v2/health/live")


class Gate:
    """A device that waits before a step while the gate is closed."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_steps = 0

    def before(self, _: int) -> None:
        """Before each step."""
        self.num_steps += 1
        assert self.is_open.wait(20)

    def engine(self, service: Service) -> Any:
        """An engine over such a device."""
        return scripted_llm(service.config, [service.emit], lambda config: FailingRunner(script_runner(config), before=self.before))


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened again at the end, so that engines can be closed."""
    gate = Gate()
    yield gate
    gate.is_open.set()


def statuses(server: DoorServer) -> tuple[int, int]:
    """(live, ready), of all paths that ask the same."""
    live = {server.ask("GET", path).status for path in LIVE_PATHS}
    ready = {server.ask("GET", path).status for path in READY_PATHS}
    assert len(live) == len(ready) == 1
    return live.pop(), ready.pop()


def idle_since(server: DoorServer, seconds: float) -> None:
    """Lets the engine's last move be that long ago."""
    server.service.progress.last_move_s = time.monotonic() - seconds


def test_loading_says_what_is_done(gate: Gate) -> None:
    with door_server() as server:
        assert statuses(server) == (200, 503)
        starting = {"status": "starting", "reason": "starting", "phase": "find", "done": 0, "total": 0}
        assert server.ask("GET", "/readyz").json == starting
        server.service.emit(events.PhaseChanged(time_s=0, phase="compile", message="compiling 0/9", done=0, total=9))
        assert server.ask("GET", "/readyz").json == {**starting, "reason": "compiling 0/9", "phase": "compile", "total": 9}
        server.service.emit(events.PhaseChanged(time_s=0, phase="compile", message="compiling 3/9", done=3, total=9))
        assert server.ask("GET", "/readyz").json == {
            "status": "starting",
            "reason": "compiling 3/9",
            "phase": "compile",
            "done": 3,
            "total": 9,
        }
        answer = server.ask("POST", "/v1/completions", completion())
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "server_starting", "5")
        server.service.attach(gate.engine(server.service))
        try:
            assert statuses(server) == (200, 200)
        finally:
            assert server.service.engine is not None
            server.service.engine.close()


def test_ready_and_a_full_queue(gate: Gate) -> None:
    config = Config(scheduler=SchedulerConfig(max_num_queued_requests=1))
    with door_server(config, engine=gate.engine) as server:
        assert statuses(server) == (200, 200)
        gate.is_open.clear()
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(server.ask, "POST", "/v1/completions", completion(2)) for _ in range(12)]
            ledger = server.service.ledger
            wait_until(lambda: ledger.num_open + sum(ledger.ends().values()) == 12)  # some may be refused before the first step
            time.sleep(0.05)
            assert statuses(server) == (200, 200)
            gate.is_open.set()
            answers = [future.result() for future in asked]
        refused = [answer for answer in answers if answer.status != 200]
        assert refused
        assert {(answer.status, answer.code, answer.headers["retry-after"]) for answer in refused} == {(429, "queue_full", "1")}
        wait_until(lambda: server.service.ledger.num_open == 0)
        assert sum(server.service.ledger.ends().values()) == 12


def test_draining_and_stopped(gate: Gate) -> None:
    with door_server(engine=gate.engine) as server:
        server.service.drain()
        assert statuses(server) == (200, 503)
        answer = server.ask("POST", "/v1/completions", completion())
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "server_draining", "5")
        assert server.ask("GET", "/readyz").json == {"status": "draining", "reason": "the server is about to stop"}
        assert answer.headers["connection"] == "close", "the next request is for another server"
        server.service.stop()
        assert statuses(server) == (200, 503)


def test_stuck(gate: Gate) -> None:
    with door_server(engine=gate.engine) as server:
        gate.is_open.clear()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, "POST", "/v1/completions", completion())
            wait_until(lambda: server.service.progress.has_work)
            idle_since(server, 1000)
            assert statuses(server) == (200, 200), "whether work that does not move is stuck is the watchdog's to say"
            server.service.die("there is work, and no step was finished in 60 s")
            watch = Stopwatch()
            answer = asked.result()
            assert (answer.status, answer.code) == (503, "engine_dead")
            assert watch.is_within(1.0)
        assert statuses(server) == (503, 503)
        assert server.ask("GET", "/livez").json == {"status": "dead", "reason": "there is work, and no step was finished in 60 s"}
        gate.is_open.set()


def test_dead() -> None:
    def fail(step: int) -> None:
        if step > 3:
            raise RuntimeError("the device is gone")

    log = EventLog()
    with door_server(
        engine=lambda service: scripted_llm(
            service.config, [service.emit], lambda config: FailingRunner(script_runner(config), before=fail)
        ),
        log=log,
    ) as server:
        connection = server.connect()
        connection.send(request_bytes("POST", "/v1/completions", completion(400, stream=True)))
        assert b'"code":"engine_dead"' in connection.read_until(b"engine_dead")
        assert connection.read().body.count(b"data: ") >= 2
        assert statuses(server) == (503, 503)
        answer = server.ask("POST", "/v1/completions", completion())
        assert (answer.status, answer.code) == (503, "engine_dead")
        wait_until(lambda: server.service.ledger.num_open == 0)
        assert server.service.ledger.ends()["failed"] == 1  # type: ignore[index]


def test_paused_is_well(gate: Gate) -> None:
    with door_server(engine=gate.engine) as server:
        engine: Any = server.service.engine
        asyncio.run(engine.pause("keep"))
        idle_since(server, 1000)
        assert statuses(server) == (200, 200)
        assert gate.num_steps == 0
        asyncio.run(engine.resume())


def test_an_idle_engine_is_asked_for_a_step_and_leaves_no_trace(gate: Gate) -> None:
    log = EventLog()
    with door_server(engine=gate.engine, log=log) as server:
        before = len(log)
        with ThreadPoolExecutor(8) as pool:
            idle_since(server, 1000)
            assert {answer.status for answer in pool.map(lambda _: server.ask("GET", "/health"), range(24))} == {200}
        assert gate.num_steps == 1, "all who ask share one probe"
        assert {type(event) for event in log[before:]} == {events.HttpAnswered}
        assert {event.end for event in log[before:]} == {""}  # type: ignore[union-attr]
        engine: Any = server.service.engine
        assert engine._engine.pages.num_cached_idle == engine._engine.pages.num_in_use == 0
        assert server.ask("POST", "/v1/completions", completion()).json["choices"][0]["text"] == "bcde"


def test_a_recent_step_is_enough(gate: Gate) -> None:
    with door_server(engine=gate.engine) as server:
        assert server.ask("POST", "/v1/completions", completion()).status == 200
        num_steps = gate.num_steps
        assert statuses(server) == (200, 200)
        assert gate.num_steps == num_steps


def test_an_idle_engine_that_does_not_answer_is_not_ready(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "PROBE_TIMEOUT_S", 0.2)
    with door_server(engine=gate.engine) as server:
        idle_since(server, 1000)
        gate.is_open.clear()
        unready = {"status": "unready", "reason": "the engine has not made a step within 0.2 s"}
        for _ in range(3):
            answer = server.ask("GET", "/readyz")
            assert (answer.status, answer.json) == (503, unready)
        assert gate.num_steps == 1, "the step that is under way is the one that is waited for"
        assert server.ask("GET", "/livez").status == 200
        gate.is_open.set()
        monkeypatch.setattr(health_check, "PROBE_INTERVAL_S", 0.0)
        wait_until(lambda: server.ask("GET", "/readyz").status == 200)
        assert not server.service.progress.is_probed


def test_an_idle_engine_that_is_stuck_is_dead_after_the_watchdogs_ticks(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks it for anything but its health."""
    monkeypatch.setattr(health_check, "PROBE_TIMEOUT_S", 0.05)
    with door_server(Config(server=ServerConfig(watchdog_s=3)), engine=gate.engine) as server:
        dog = Watchdog(server.service)
        assert [dog.look() for _ in range(100)] == [None] * 100, "idle is not stuck"
        idle_since(server, 1000)
        gate.is_open.clear()
        assert server.ask("GET", "/readyz").status == 503
        server.service.progress.num_open += 1  # a request that comes meanwhile does not make it well
        assert server.ask("GET", "/readyz").status == 503
        server.service.progress.num_open -= 1
        verdicts = [dog.look() for _ in range(6)]
        assert verdicts == [None] * 5 + ["health was asked for, and no step was finished in 3 s"]
        server.service.die(str(verdicts[-1]))
        assert statuses(server) == (503, 503)
        assert server.ask("GET", "/livez").json == {"status": "dead", "reason": verdicts[-1]}
        gate.is_open.set()


def test_a_step_for_health_that_ends_is_no_work(gate: Gate) -> None:
    with door_server(Config(server=ServerConfig(watchdog_s=1)), engine=gate.engine) as server:
        dog = Watchdog(server.service)
        idle_since(server, 1000)
        assert statuses(server) == (200, 200)
        assert gate.num_steps == 1
        assert [dog.look() for _ in range(20)] == [None] * 20


def test_a_probe_that_kills_the_engine_says_so() -> None:
    def fail(_: int) -> None:
        raise RuntimeError("the device is gone")

    with door_server(
        engine=lambda service: scripted_llm(
            service.config, [service.emit], lambda config: FailingRunner(script_runner(config), before=fail)
        )
    ) as server:
        idle_since(server, 1000)
        assert server.ask("GET", "/readyz").status == 503
        assert statuses(server) == (503, 503)
        assert "the device is gone" in server.ask("GET", "/livez").json["reason"]


def test_ready_engine_says_why_not() -> None:
    service = Service(Config())
    service.progress(events.HealthChanged(time_s=0, state="dead", message="boom"))
    with pytest.raises(EngineDeadError, match="boom"):
        service.ready_engine()
    assert HealthCheck(service).live().status == 503
    assert service.phase is Phase.STARTING


def test_version_and_load(gate: Gate) -> None:
    with door_server(Config(server=ServerConfig()), engine=gate.engine) as server:
        assert set(server.ask("GET", "/version").json) == {"version"}
        assert server.ask("GET", "/load").json == {"server_load": 0, "num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0}
        gate.is_open.clear()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, "POST", "/v1/completions", completion())
            wait_until(lambda: server.ask("GET", "/load").json["server_load"] == 1)
            gate.is_open.set()
            assert asked.result().status == 200
