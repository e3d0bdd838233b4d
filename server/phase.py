"""Where a server is between its start and its end, and what the engine's events say about its progress."""

import enum
import threading
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

    phase: str = "resolve"
    message: str = "starting"
    done: int = 0
    total: int = 0


class EngineProgress:
    """A sink that follows the engine: is there work, and does it move? Any thread may read it.

    Attributes:
        start_up: where the start is.
        started: what the engine said when it was ready.
        num_moves: steps, compilations and load phases finished so far. An engine that has work and stays at one number is stuck.
        death: why the engine died; None: it lives.
        is_paused: nothing is computed, because somebody said so.
    """

    def __init__(self) -> None:
        self.start_up = StartUp()
        self.started: events.EngineStarted | None = None
        self.num_moves = 0
        self.num_open = 0
        self.last_move_s = float("-inf")
        self.is_paused = False
        self.death: str | None = None
        self._lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs that the engine is free to compute."""
        return self.num_open > 0 and not self.is_paused

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`."""
        match event:
            case events.StepFinished() | events.ProgramCompiled():
                self._move(event.time_s)
            case events.PhaseChanged():
                self.start_up = StartUp(event.phase, event.message, event.done, event.total)
                self._move(event.time_s)
            case events.EngineStarted():
                self.started = event
                self._move(event.time_s)
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

    def close(self) -> None:
        """See `events.Sink`."""

    def _move(self, time_s: float) -> None:
        self.num_moves += 1
        self.last_move_s = time_s
