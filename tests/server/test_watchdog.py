"""The watchdog: stuck is so many ticks with work and without a move; nothing else is."""

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config, ServerConfig
from server import watchdog
from server.phase import Phase
from server.service import Service
from server.watchdog import EXIT_STATUS, Watchdog
from tests.event_log import EventLog
from tests.stopwatch import SLOWER

pytestmark = pytest.mark.jax

QUEUED = events.RequestQueued(time_s=0, request_id="a", num_prompt_tokens=1, max_tokens=1, num_waiting=0)
COMPILED = events.ProgramCompiled(time_s=0, bucket_tokens=2, seconds=1, from_cache=False)


def finished(reason: str = "stop") -> events.RequestFinished:
    return events.RequestFinished(
        time_s=0,
        request_id="a",
        reason=reason,
        num_prompt_tokens=1,
        num_output_tokens=1,
        num_cached_tokens=0,
        num_pages_freed=0,
        num_preemptions=0,
        ttft_s=None,
        e2e_s=1,
        queue_s=1,
    )


def make(watchdog_s: float = 3.0, **options: Any) -> tuple[Service, Watchdog]:
    service = Service(Config(server=ServerConfig(watchdog_s=watchdog_s)))
    service.phase = Phase.READY
    return service, Watchdog(service, **options)


def verdicts(dog: Watchdog, count: int) -> list[str | None]:
    return [dog.look() for _ in range(count)]


def test_work_without_a_move_is_stuck_after_so_many_ticks() -> None:
    service, dog = make(3.0)
    service.emit(QUEUED)
    assert verdicts(dog, 6) == [None] * 6, "the first tick takes the number down"
    assert verdicts(dog, 1) == ["there is work, and no step was finished in 3 s"]


@pytest.mark.parametrize("move", [COMPILED, events.PhaseChanged(time_s=0, phase="load", message="")])
def test_any_move_counts_anew(move: events.Event) -> None:
    service, dog = make(3.0)
    service.emit(QUEUED)
    for _ in range(5):
        assert verdicts(dog, 6) == [None] * 6
        service.emit(move)


@pytest.mark.parametrize(
    "last", [finished(), events.HealthChanged(time_s=0, state="paused"), events.HealthChanged(time_s=0, state="sleeping")]
)
def test_no_work_is_not_stuck(last: events.Event) -> None:
    service, dog = make(1.0)
    assert verdicts(dog, 100) == [None] * 100
    service.emit(QUEUED)
    verdicts(dog, 2)
    service.emit(last)
    assert verdicts(dog, 100) == [None] * 100


def test_after_a_pause_the_count_begins_anew() -> None:
    service, dog = make(3.0)
    service.emit(QUEUED)
    verdicts(dog, 6)
    service.emit(events.HealthChanged(time_s=0, state="paused"))
    verdicts(dog, 20)
    service.emit(events.HealthChanged(time_s=0, state="ready"))
    assert verdicts(dog, 5) == [None] * 5


def test_clocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    service, dog = make(3.0)
    service.emit(QUEUED)
    for leap_s in (0.0, 1e9, -1e9, 3600.0, 0.0):
        monkeypatch.setattr(time, "monotonic", lambda leap_s=leap_s: leap_s)
        monkeypatch.setattr(time, "time", lambda leap_s=leap_s: leap_s)
        assert verdicts(dog, 1) == [None]


def ended(service: Service, dog: Watchdog, statuses: list[int], before: Callable[[], None]) -> float:
    """Starts the thread, does something, and says how long it then took to leave."""
    dog.start()
    before()
    began_s = time.monotonic()
    while not statuses and time.monotonic() < began_s + 30:
        time.sleep(0.005)
    dog.stop()
    return time.monotonic() - began_s


def test_the_end_of_a_stuck_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(watchdog, "TELL_S", 0.2)
    statuses: list[int] = []
    told: list[str] = []
    log = EventLog()
    with (tmp_path / "stacks").open("w+") as stacks:
        service = Service(Config(server=ServerConfig(watchdog_s=1.0)), sinks=(log,))
        monkeypatch.setattr(service, "fail_open", lambda error: told.append(error.message))
        dog = Watchdog(service, stacks=stacks, leave=statuses.append, tick_s=0.05)
        is_over = threading.Event()
        threading.Thread(target=is_over.wait, name="jaxpaged-engine", daemon=True).start()
        seconds = ended(service, dog, statuses, lambda: service.emit(QUEUED))
        is_over.set()
        stacks.seek(0)
        text = stacks.read()
    assert statuses == [EXIT_STATUS] == [70]
    assert 1.0 <= seconds < SLOWER * 3
    assert told == ["the engine stopped: there is work, and no step was finished in 1 s"]
    assert (service.phase, [event.state for event in log.of(events.HealthChanged)]) == (Phase.DEAD, ["dead"])
    assert "test_watchdog.py" in text
    assert "watchdog.py" in text, "the stacks of all threads"


def test_the_end_of_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TELL_S", 0.1)
    statuses: list[int] = []
    service, dog = make(60.0, leave=statuses.append, tick_s=0.05)
    seconds = ended(service, dog, statuses, lambda: service.emit(events.HealthChanged(time_s=0, state="dead", message="gone")))
    assert statuses == [70]
    assert seconds < SLOWER * 1
    assert (service.phase, service.reason) == (Phase.DEAD, "gone")


def test_a_stopped_watchdog_does_nothing() -> None:
    statuses: list[int] = []
    service, dog = make(1.0, leave=statuses.append, tick_s=0.01, stacks=io.StringIO())
    dog.start()
    dog.stop()
    service.emit(QUEUED)
    time.sleep(0.1)
    assert statuses == []
