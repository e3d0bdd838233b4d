"""Ends a server whose engine is dead or stuck: clients are told, the stacks go to the log, and the process ends with status 70.

A stopped process or a clock that leaps must not look like a stuck engine, so the thread counts its own ticks and looks at no clock.
A step that holds the interpreter lock keeps this thread from running, too: then a small process beside this one, which counts ticks in
the same way and is told of each of ours, ends it (`lock_watch`).
"""

import faulthandler
import os
import threading
from collections.abc import Callable
from typing import Any

from jaxpaged import events
from server.heartbeat import Heartbeat
from server.service import Service

TICK_S = 0.5
LOCK_GRACE_S = 30.0
"""How much longer than the limit the interpreter lock may be held: a step that is only slow should be told of by the watchdog itself."""
TELL_S = 1.5
"""Time for answers that say what happened, and for health routes to be seen."""
EXIT_STATUS = 70


class Watchdog:
    """Looks every half second whether the engine moves.

    Args:
        service: whose engine.
        stacks: an open file for the threads' stacks; None: they are not written.
        leave: ends the process with a status, once the log is written.
        heartbeat: told of each tick; None: the interpreter lock is not watched.
        tick_s: seconds between two looks.
    """

    def __init__(
        self,
        service: Service,
        *,
        stacks: Any = None,
        leave: Callable[[int], None] = os._exit,
        heartbeat: Heartbeat | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self._service, self._stacks, self._leave = service, stacks, leave
        self._heartbeat, self._tick_s = heartbeat, tick_s
        self._ended = threading.Event()
        self._num_moves, self._num_still = -1, 0
        self._thread = threading.Thread(target=self._run, name="jaxpaged-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        if self._heartbeat is not None:
            self._heartbeat.start()
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def look(self) -> str | None:
        """One tick: why the engine is to be given up, or None."""
        progress = self._service.progress
        if progress.death is not None:
            return progress.death
        is_still = progress.has_work and progress.num_moves == self._num_moves
        self._num_still = self._num_still + 1 if is_still else 0
        self._num_moves = progress.num_moves
        limit_s = self._service.config.server.watchdog_s
        if self._num_still * self._tick_s < limit_s:
            return None
        work = "there is work" if progress.num_open else "health was asked for"
        return f"{work}, and no step was finished in {limit_s:g} s"

    def _run(self) -> None:
        while not self._ended.wait(self._tick_s):
            if self._heartbeat is not None:
                self._heartbeat.beat()
            reason = self.look()
            if reason is not None:
                self._end(reason)
                return

    def _end(self, reason: str) -> None:
        service = self._service
        is_stuck = service.progress.death is None
        service.die(reason)
        if is_stuck:
            service.emit(events.HealthChanged(time_s=service.clocks.wall(), state="dead", message=reason))
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._ended.wait(TELL_S)
        self._leave(EXIT_STATUS)
