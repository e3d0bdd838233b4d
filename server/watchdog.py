"""Ends a server whose engine is dead or stuck: clients are told, the stacks go to the log, and the process ends with status 70.

A stopped process or a clock that leaps must not look like a stuck engine, so the thread counts its own ticks and looks at no clock.
A step that holds the interpreter lock keeps this thread from running, too: then `faulthandler`, whose thread needs no lock, ends the
process, unless it is told at each tick to wait longer.
"""

import faulthandler
import os
import threading
from collections.abc import Callable
from typing import Any

from jaxpaged import events
from server.service import Service

TICK_S = 0.5
LOCK_GRACE_S = 30.0
"""How much longer than the limit the interpreter lock may be held; a process that was stopped must not find itself over it."""
TELL_S = 1.5
"""Time for answers that say what happened, and for health routes to be seen."""
EXIT_STATUS = 70


class Watchdog:
    """Looks every half second whether the engine moves.

    Args:
        service: whose engine.
        stacks: an open file for the threads' stacks; None: they are not written.
        leave: ends the process with a status.
        lock_grace_s: see `LOCK_GRACE_S`; None: the interpreter lock is not watched.
        tick_s: seconds between two looks.
    """

    def __init__(
        self,
        service: Service,
        *,
        stacks: Any = None,
        leave: Callable[[int], None] = os._exit,
        lock_grace_s: float | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        self._service, self._stacks, self._leave = service, stacks, leave
        self._lock_grace_s, self._tick_s = lock_grace_s, tick_s
        self._ended = threading.Event()
        self._num_moves, self._num_still = -1, 0
        self._thread = threading.Thread(target=self._run, name="jaxpaged-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._watch_lock()
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

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
        return f"there is work, and no step was finished in {limit_s:g} s"

    def _run(self) -> None:
        while not self._ended.wait(self._tick_s):
            self._watch_lock()
            reason = self.look()
            if reason is not None:
                self._end(reason)
                return
        self._watch_lock(is_over=True)

    def _end(self, reason: str) -> None:
        service = self._service
        is_stuck = service.progress.death is None
        service.die(reason)
        if is_stuck:
            service.emit(events.HealthChanged(time_s=service.clocks.wall(), state="dead", message=reason))
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._ended.wait(TELL_S)
        self._watch_lock(is_over=True)
        service.emit.flush(0.5)
        self._leave(EXIT_STATUS)

    def _watch_lock(self, *, is_over: bool = False) -> None:
        if self._lock_grace_s is None or self._stacks is None:
            return
        if is_over:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(self._service.config.server.watchdog_s + self._lock_grace_s, exit=True, file=self._stacks)
