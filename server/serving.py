"""The life of a server process: listen, load, serve, drain, end. Its exit status says how it ended.

0: it was told to stop, and has drained; 70: the engine died or got stuck; 128 + n: a second signal n; 2 or 1, by an error that is
raised: it could not start.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

from jaxpaged import events
from jaxpaged.config import Config
from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import ServerDrainingError
from jaxpaged.events import Sink
from server.admin import create_admin_app
from server.asgi_types import App
from server.auth import ApiKeys
from server.front import behind_admin_front, behind_front
from server.heartbeat import Heartbeat
from server.http_server import HttpServer
from server.listeners import url_of
from server.phase import Phase
from server.request_ids import RequestIds
from server.service import Service
from server.startup_report import ready_report
from server.watchdog import EXIT_STATUS, LOCK_GRACE_S, TELL_S, TICK_S, Watchdog

LOG: Final = logging.getLogger("jaxpaged.server")
POLL_S = 0.02
END_TIMEOUT_S = 4.0
"""After the drain the process ends within this time and `FLUSH_S`, whatever hangs."""
TELL_REST_S = 1.0
"""Of it: time for those that are told that there is no more time."""
CLOSE_ENGINE_S = 3.0
"""Of it, at most: for the engine to give its memory back."""
FLUSH_S = 0.5

type MakeEngine = Callable[[Config, Sequence[Sink]], EngineClient]
"""Loads the model; blocks, and raises JaxpagedError."""


class Doors(NamedTuple):
    """What was opened and checked before the model is looked at."""

    public: Sequence[socket.socket]
    admin: Sequence[socket.socket]
    tls: ssl.SSLContext | None
    keys: ApiKeys


def calm_garbage_collector() -> None:
    """For a process that serves: its collections are short and seldom.

    What is there now stays to the end; walked through again and again it would cost 0.3 s each time, in which nobody is answered. Young
    objects that survive are looked at once in 250,000 allocations, for a hundred streams of events make many that live for a while.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 50, 100)


class Serving:
    """One server process.

    Args:
        service: what is served.
        doors: closed at the end.
        make_engine: called on a thread of its own.
        create_app: the public app.
        say: shows text to whoever started the program.
        stacks: an open file for the threads' stacks.
        leave: ends the process at once.
    """

    def __init__(
        self,
        service: Service,
        doors: Doors,
        make_engine: MakeEngine,
        create_app: Callable[[Service], App],
        *,
        say: Callable[[str], None],
        stacks: Any = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._service, self._doors, self._make_engine, self._create_app = service, doors, make_engine, create_app
        self._say, self._leave = say, leave
        heartbeat = None if stacks is None else Heartbeat(service.config.server.watchdog_s + LOCK_GRACE_S, TICK_S, stacks)
        self._watchdog = Watchdog(service, stacks=stacks, leave=self._leave_at_once, heartbeat=heartbeat)
        self._unix_paths = [listener.getsockname() for listener in doors.admin if listener.family == socket.AF_UNIX]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        """Set whenever something below has changed."""
        self._num_signals = 0
        self._is_loaded = False
        self._load_error: BaseException | None = None

    def run(self) -> int:
        """Serves until told to stop; returns the exit status.

        Raises:
            JaxpagedError: the model could not be loaded.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            asyncio.run(self._main())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._load_error is not None:
            raise self._load_error
        if self._is_dead:
            threading.Event().wait(TELL_S + 1)  # the watchdog ends the process
            return EXIT_STATUS
        return self._close_engine()

    @property
    def _is_dead(self) -> bool:
        return self._service.phase is Phase.DEAD or self._service.progress.death is not None

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_say_loop_error)
        service, options = self._service, self._service.config.server
        app = behind_front(self._create_app(service), service, self._doors.keys)
        ids = RequestIds(service.config.limits.max_request_id_chars)
        ledger = service.ledger
        servers = [HttpServer(app, options, self._doors.public, self._doors.tls, ids, ledger)]
        if self._doors.admin:
            admin = behind_admin_front(create_admin_app(service), service, self._doors.keys)
            servers.append(HttpServer(admin, options, self._doors.admin, ids=ids, ledger=ledger))
        running = [asyncio.create_task(server.serve()) for server in servers]
        try:
            for server, task in zip(servers, running, strict=True):
                await _first(server.is_listening.wait(), task)
            threading.Thread(target=self._load, name="jaxpaged-load", daemon=True).start()
            await self._until(lambda: self._is_loaded or self._load_error is not None)
            if self._is_loaded and not self._num_signals:
                self._watchdog.start()
                self._greet()
                await self._until(lambda: self._is_dead)
            if self._num_signals:
                await self._drain()
            elif self._is_dead:
                await asyncio.sleep(TELL_S + 1)  # health routes say what happened, until the watchdog ends the process
        finally:
            service.stop()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)

    def _load(self) -> None:
        try:
            engine = self._make_engine(self._service.config, [self._service.emit])
            calm_garbage_collector()
            self._service.attach(engine)
            self._is_loaded = True
        except BaseException as error:
            self._load_error = error
        self._poke()

    def _greet(self) -> None:
        service, doors = self._service, self._doors
        started = service.progress.started
        url = url_of(doors.public[0], is_tls=doors.tls is not None)
        if started is None:
            self._say(f"serving {service.model_name} at {url}/v1\n")
            return
        options = service.config.server
        admin = " and ".join(
            ([options.admin_socket] if options.admin_socket else [])
            + [url_of(listener, is_tls=False) for listener in doors.admin if listener.family != socket.AF_UNIX]
        )
        phases = service.progress.phase_seconds()
        self._say(ready_report(started, phases, url=url, model=service.model_name, has_key=bool(doors.keys), admin=admin or None))

    async def _drain(self) -> None:
        """Lets open requests come to their ends for a while, and tells those that do not."""
        service = self._service
        service.drain()
        seconds = service.config.server.drain_timeout_s
        num_open = service.ledger.num_open_generations
        message = f"told to stop: {num_open} requests are open and have {seconds:g} s" if num_open else "told to stop"
        service.emit(events.PhaseChanged(time_s=service.clocks.wall(), phase="drain", message=message))
        are_over = await self._are_over_within(seconds)
        threading.Thread(target=self._end_in_time, name="jaxpaged-end", daemon=True).start()
        if not are_over:
            service.fail_open(ServerDrainingError("the server stops, and the answer was not done in time; ask another server, or later"))
            await self._are_over_within(TELL_REST_S)

    async def _are_over_within(self, seconds: float) -> bool:
        assert self._loop is not None
        deadline_s = self._loop.time() + seconds
        while self._service.ledger.num_open_generations and self._service.progress.death is None:
            if self._loop.time() >= deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Waits for a condition or a signal; looks whenever woken up, and now and then."""
        while not (is_so() or self._num_signals):
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 0.25)

    def _poke(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._leave_at_once(128 + number)
        self._poke()

    def _leave_at_once(self, status: int) -> None:
        with contextlib.suppress(Exception):
            self.unlink_sockets()
            self._service.emit.flush(FLUSH_S)
        self._leave(status)

    def _end_in_time(self) -> None:
        """A supervisor waits for so long and then kills; whatever still hangs by then is not worth it."""
        time.sleep(END_TIMEOUT_S)
        self._leave_unclosed()

    def unlink_sockets(self) -> None:
        """Removes the names of unix sockets, by which they were bound; their sockets may be closed."""
        for path in self._unix_paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _close_engine(self) -> int:
        """The status of a server that was told to stop. A model that is still being loaded cannot be told: the process ends under it."""
        self._watchdog.stop()
        engine = self._service.engine
        if engine is None:
            self._leave_unclosed()
            return 0
        closing = threading.Thread(target=engine.close, name="jaxpaged-close", daemon=True)
        closing.start()
        closing.join(CLOSE_ENGINE_S)
        if closing.is_alive():
            self._leave_unclosed()
        return 0

    def _leave_unclosed(self) -> None:
        """The engine does not say that it has stopped: it hangs, is slow, or is not there yet."""
        self._service.emit(events.EngineStopped(time_s=self._service.clocks.wall()))
        self._leave_at_once(0)


def _say_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What the event loop could not give to anybody; that there are no descriptors left for connections needs no traceback."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        LOG.warning("no file descriptor is left for new connections; raise the limit of open files, or lower server.max_connections")
    else:
        loop.default_exception_handler(context)


async def _first(waiting: Any, task: "asyncio.Task[None]") -> None:
    """Waits for the first of the two; raises what the task failed with."""
    waiter = asyncio.ensure_future(waiting)
    await asyncio.wait({waiter, task}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        task.result()
