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
    phase: str = ""
    done: int = 0
    total: int = 0


class Health(NamedTuple):
    """An HTTP status and its body."""

    status: int
    body: HealthBody


HEALTHY = Health(200, HealthBody(status="ready"))


class HealthCheck:
    """Answers for one service; all that ask at the same time share one probe.

    Args:
        service: whose health.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._probe: asyncio.Task[None] | None = None
        self._probed_s = float("-inf")
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
        if service.progress.is_paused or service.progress.has_work:
            return HEALTHY  # an engine that has work and does not move is the watchdog's business
        if service.clocks.monotonic() - service.progress.last_move_s < PROBE_INTERVAL_S:
            return HEALTHY
        if service.clocks.monotonic() - self._probed_s >= PROBE_INTERVAL_S and self._probe is None:
            self._probe = asyncio.create_task(self._run_probe(engine))
        if self._probe is not None:
            await asyncio.shield(self._probe)
        return HEALTHY if not self._verdict else Health(503, HealthBody(status="unready", reason=self._verdict))

    async def _run_probe(self, engine: EngineClient) -> None:
        service = self._service
        num_moves = service.progress.num_moves
        self._verdict = ""
        try:
            await asyncio.wait_for(engine.probe(), PROBE_TIMEOUT_S)
        except TimeoutError:
            if service.progress.num_moves == num_moves:
                self._verdict = f"the engine is idle and has not made a step within {PROBE_TIMEOUT_S:g} s"
        except JaxpagedError as error:
            self._verdict = error.message
        self._probed_s, self._probe = service.clocks.monotonic(), None


def _starting(start: StartUp) -> HealthBody:
    return HealthBody(status=Phase.STARTING.value, reason=start.message, phase=start.phase, done=start.done, total=start.total)
