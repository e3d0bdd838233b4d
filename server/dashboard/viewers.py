"""Who looks at the live page, and what they are sent: frames that are made once for all of them, and only while somebody looks.

A frame waits for a slow viewer alone and is replaced by the next one, so that at most one is kept for each; the connection's own limits
(`server.send_buffer`, `server.slow_client_timeout_s`) hold for the rest.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final, cast

from jaxpaged.engine_client import WatchedEngine
from jaxpaged.errors import JaxpagedError, ServerDrainingError, TooManyViewersError
from jaxpaged.pool_map import PoolCopy
from server.dashboard.frames import FrameMaker, Present
from server.phase import Phase

if TYPE_CHECKING:
    from server.service import Service

LOG: Final = logging.getLogger("jaxpaged.server")
MAX_VIEWERS: Final = 16
FRAME_S: Final = 0.25
IDLE_FRAME_S: Final = 1.0
LARGE_POOL_PAGES: Final = 65_536
LARGE_POOL_FRAMES: Final = 4
"""A pool so large is copied with every fourth frame: a copy takes a millisecond of the engine's thread then."""
ENDED: Final = b"event: end\ndata: {}\n\n"


class Viewer:
    """One who looks; on the event loop."""

    def __init__(self) -> None:
        self._frame: bytes | None = None
        self._news = asyncio.Event()
        self._is_over = False

    def offer(self, frame: bytes) -> None:
        """A new frame; one that was not sent yet is forgotten."""
        self._frame = frame
        self._news.set()

    def end(self) -> None:
        """No frame comes after the one that waits."""
        self._is_over = True
        self._news.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """Frames as they come, and a last event when the server stops."""
        while True:
            await self._news.wait()
            self._news.clear()
            frame, self._frame = self._frame, None
            if frame is not None:
                yield frame
            if self._is_over:
                yield ENDED
                return


class Viewers:
    """All who look at one server; on its event loop.

    Args:
        service: that they look at.
        sleep: waits.
    """

    def __init__(self, service: "Service", sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._service, self._sleep = service, sleep
        self._maker = FrameMaker(service.live, service.config.diagnose)
        self._viewers: list[Viewer] = []
        self._ticker: asyncio.Task[None] | None = None
        self._copying: asyncio.Task[PoolCopy] | None = None
        self._pool: PoolCopy | None = None
        self._num_frames = 0

    @property
    def num_viewers(self) -> int:
        """Who looks now."""
        return len(self._viewers)

    def join(self) -> Viewer:
        """A new viewer, who leaves with `leave`.

        Raises:
            TooManyViewersError: as many look as may.
            ServerDrainingError: the server stops.
        """
        if not self._is_open:
            raise ServerDrainingError("the server is about to stop, and shows nothing any more")
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewersError(f"{MAX_VIEWERS} pages look at this server already, and one more is not served: close one of them")
        viewer = Viewer()
        self._viewers.append(viewer)
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """A viewer has gone; with the last one everything stops."""
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        if not self._viewers:
            for task in (self._ticker, self._copying):
                if task is not None:
                    task.cancel()
            self._ticker = self._copying = self._pool = None

    async def history(self) -> bytes:
        """What a new viewer gets first."""
        return await asyncio.get_running_loop().run_in_executor(None, self._maker.history, self._service.clocks.wall())

    @property
    def _is_open(self) -> bool:
        return self._service.phase in (Phase.STARTING, Phase.READY)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._copy_pool()
            is_open = self._is_open
            try:
                frame = await loop.run_in_executor(None, self._maker.frame, self._present(), self._pool)
            except Exception:
                # A bug of ours must not leave pages that wait for ever.
                LOG.exception("the live page has no frame")
                is_open = False
            else:
                for viewer in self._viewers:
                    viewer.offer(frame)
            if not is_open:
                for viewer in self._viewers:
                    viewer.end()
                return
            self._num_frames += 1
            await self._rest()

    async def _rest(self) -> None:
        """Until the next frame: at once when something moves, and later when nothing does."""
        progress = self._service.progress
        moves, open_now = progress.num_moves, progress.num_open
        for _ in range(round(IDLE_FRAME_S / FRAME_S)):
            await self._sleep(FRAME_S)
            if progress.num_moves != moves or progress.num_open != open_now or progress.num_open or not self._is_open:
                return

    def _copy_pool(self) -> None:
        """Takes the copy that was asked for with the frame before, if it is there, and asks for the next: nobody waits for a step."""
        copying, engine = self._copying, cast(object, self._service.engine)
        if copying is not None:
            if not copying.done():
                return
            self._copying = None
            if not copying.cancelled():
                error = copying.exception()
                if error is None:
                    self._pool = copying.result()
                elif not isinstance(error, JaxpagedError):
                    raise error
        is_large = self._pool is not None and self._pool.num_usable > LARGE_POOL_PAGES
        if isinstance(engine, WatchedEngine) and (not is_large or self._num_frames % LARGE_POOL_FRAMES == 0):
            self._copying = asyncio.create_task(engine.pool_copy())

    def _present(self) -> Present:
        service, progress = self._service, self._service.progress
        message = service.reason or (progress.start_up.message if service.phase is Phase.STARTING else "")
        if service.phase is Phase.READY and progress.is_paused:
            message = "paused by an operator"
        return Present(
            time_s=service.clocks.wall(),
            phase=service.phase.value,
            message=message,
            running=progress.num_running,
            waiting=progress.num_waiting,
            pool=progress.kv_cache_usage,
            viewers=len(self._viewers),
            model=service.model_name,
            names={record.answer_id: record.request_id for record in service.ledger.open.values() if record.answer_id},
        )
