"""Health that tells the truth: recent progress of the engine, or else a step made for the question."""

import asyncio
from typing import NamedTuple

import msgspec

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import JaxpagedError
from server.phase import Phase, StartUp
from server.service import Service

PROBE_INTERVAL_S = 10.0
"""An engine that was seen to move within this time is not asked again."""
PROBE_TIMEOUT_S = 5.0


class HealthBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a health route answers with 503: `status` is the server's phase, `reason` why it does not serve.

    While it starts, `phase` is what is done now, and `done` of `total` parts of that.
    """

    status: str
    reason: str = ""
    phase: str | msgspec.UnsetType = msgspec.UNSET
    done: int | msgspec.UnsetType = msgspec.UNSET
    total: int | msgspec.UnsetType = msgspec.UNSET


class Health(NamedTuple):
    """An HTTP status and its body."""

    status: int
    body: HealthBody


HEALTHY = Health(200, HealthBody(status="ready"))


class HealthCheck:
    """Answers for one service; all that ask at the same time share one probe.

    A probe that is under way counts as work of the engine, so that the watchdog ends one that never comes to its end.

    Args:
        service: whose health.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._probe: asyncio.Task[None] | None = None
        self._begun_s = self._probed_s = float("-inf")
        self._num_moves = 0
        """What the engine had done when the probe began."""
        self._verdict = ""
        """Why the last probe failed; empty: it did not."""

    def live(self) -> Health:
        """Whether the process is to be left alone: everything but stuck or dead."""
        service = self._service
        if service.phase is Phase.DEAD or service.progress.death is not None:
            return Health(503, HealthBody(status="dead", reason=service.reason))
        return Health(200, HealthBody(status=service.phase.value))

    async def ready(self) -> Health:
        """Whether it serves."""
        service = self._service
        if service.phase is Phase.STARTING:
            return Health(503, _starting(service.progress.start_up))
        if service.phase in (Phase.DRAINING, Phase.STOPPED):
            return Health(503, HealthBody(status=service.phase.value, reason="the server is about to stop"))
        alive = self.live()
        if alive.status != 200:
            return alive
        try:
            engine = service.ready_engine()
        except JaxpagedError as error:
            return Health(503, HealthBody(status="dead", reason=error.message))
        if service.progress.is_paused:
            return HEALTHY
        if self._probe is None and self._is_due():
            self._begin_probe(engine)
        if self._probe is None:
            return HEALTHY if not self._verdict or self._has_moved else _unready(self._verdict)
        left_s = self._begun_s + PROBE_TIMEOUT_S - service.clocks.monotonic()
        done, _ = await asyncio.wait({self._probe}, timeout=max(0.0, left_s))
        if done:
            return HEALTHY if not self._verdict else _unready(self._verdict)
        if self._has_moved:
            return HEALTHY
        return self.live() if service.phase is Phase.DEAD else _unready(f"the engine has not made a step within {PROBE_TIMEOUT_S:g} s")

    @property
    def _has_moved(self) -> bool:
        return self._service.progress.num_moves != self._num_moves

    def _is_due(self) -> bool:
        progress, now_s = self._service.progress, self._service.clocks.monotonic()
        if progress.num_open:
            return False  # an engine that has work and does not move is the watchdog's business
        return now_s - progress.last_move_s >= PROBE_INTERVAL_S and now_s - self._probed_s >= PROBE_INTERVAL_S

    def _begin_probe(self, engine: EngineClient) -> None:
        progress = self._service.progress
        self._begun_s, self._num_moves, self._verdict = self._service.clocks.monotonic(), progress.num_moves, ""
        progress.is_probed = True
        self._probe = asyncio.create_task(self._run_probe(engine))

    async def _run_probe(self, engine: EngineClient) -> None:
        """However long it takes: a step that nobody waits for any more would be asked for again and again."""
        service = self._service
        try:
            await engine.probe()
        except JaxpagedError as error:
            self._verdict = error.message
        finally:
            service.progress.is_probed = False
            self._probed_s, self._probe = service.clocks.monotonic(), None


def _unready(reason: str) -> Health:
    return Health(503, HealthBody(status="unready", reason=reason))


def _starting(start: StartUp) -> HealthBody:
    return HealthBody(status=Phase.STARTING.value, reason=start.message, phase=start.phase, done=start.done, total=start.total)
