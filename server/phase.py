"""Where a server is between its start and its end, and what the engine's events say about its progress."""

import enum
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxpaged import events


class Phase(enum.StrEnum):
    """What a server does; it only ever goes on to a later one."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class StartUp(NamedTuple):
    """How far the start is: what is done now, and `done` of `total` parts of it (0 of 0: not in parts)."""

    phase: str = "find"
    message: str = "starting"
    done: int = 0
    total: int = 0


class EngineProgress:
    """A sink that follows the engine: is there work, and does it move? Any thread may read it.

    Args:
        clock: monotonic.

    Attributes:
        start_up: where the start is.
        phases: when each phase of the start began, by the wall clock of its events.
        started: what the engine said when it was ready.
        num_moves: steps, compilations and load phases finished so far. An engine that has work and stays at one number is stuck.
        last_move_s: monotonic time of the last one.
        death: why the engine died; None: it lives.
        num_open: requests that the engine has taken and not ended.
        num_running, num_waiting, kv_cache_usage: its load; the last is the share of its pages that are in use.
        is_paused: nothing is computed, because somebody said so.
        is_probed: a step is made for a question about health; set by who asks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start_up = StartUp()
        self.phases: dict[str, float] = {}
        self.started: events.EngineStarted | None = None
        self.num_moves = 0
        self.num_open = self.num_running = self.num_waiting = 0
        self.kv_cache_usage = 0.0
        self.last_move_s = float("-inf")
        self.is_paused = self.is_probed = False
        self.death: str | None = None
        self._lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether there is something that the engine is free to compute: a request that waits or runs, or a step for health."""
        return (self.num_open > 0 or self.is_probed) and not self.is_paused

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`."""
        match event:
            case events.StepFinished():
                self._take_load(event)
                self._move()
            case events.LoadChanged():
                self._take_load(event)
            case events.ProgramCompiled():
                self._move()
            case events.PhaseChanged():
                self.phases.setdefault(event.phase, event.time_s)
                self.start_up = StartUp(event.phase, event.message, event.done, event.total)
                self._move()
            case events.EngineStarted():
                self.started = event
                self._move()
            case events.RequestQueued():
                with self._lock:
                    self.num_open += 1
            case events.RequestFinished():
                with self._lock:
                    self.num_open -= 1
            case events.HealthChanged():
                # A draining engine computes what has begun; those that wait for `resume` are not work.
                self.is_paused = event.state in ("draining", "paused", "sleeping")
                if event.state == "dead":
                    self.death = event.message or "the engine stopped"

    def phase_seconds(self) -> dict[str, float]:
        """How long each phase of the start took, in order."""
        if self.started is None:
            return {}
        ends = [*list(self.phases.values())[1:], self.started.time_s]
        return {name: max(0.0, end - begun) for (name, begun), end in zip(self.phases.items(), ends, strict=True)}

    def close(self) -> None:
        """See `events.Sink`."""

    def _take_load(self, event: events.StepFinished | events.LoadChanged) -> None:
        self.num_running, self.num_waiting = event.num_running, event.num_waiting
        self.kv_cache_usage = event.num_pages_in_use / event.num_pages_total

    def _move(self) -> None:
        self.num_moves += 1
        self.last_move_s = self._clock()
