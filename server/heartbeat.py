"""The server's side of `lock_watch`: a sign of life at each tick, and what ends the process when the interpreter lock is held for ever."""

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from server import lock_watch
from server.lock_watch import SIGNAL

LOG: Final = logging.getLogger("jaxpaged.server")
END_TIMEOUT_S = 1.0


class Heartbeat:
    """A process beside this one that ends it with status `SIGNAL` after so long without a `beat`.

    Args:
        limit_s: so long; counted in ticks, so that a stopped process is not taken for one whose lock is held.
        tick_s: seconds between two beats.
        stacks: an open file for the threads' stacks.
    """

    def __init__(self, limit_s: float, tick_s: float, stacks: Any) -> None:
        self._limit_s, self._tick_s, self._stacks = limit_s, tick_s, stacks
        self._watcher: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self) -> None:
        """Begins to be watched; without the means for it the server goes on, and the log says so."""
        if not sys.executable or not Path("/proc/self/stat").exists():
            LOG.warning("this system has no /proc: a step that holds the interpreter lock for ever will not be noticed")
            return
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        numbers = (os.getpid(), self._tick_s, math.ceil(self._limit_s / self._tick_s), self._limit_s)
        command = [sys.executable, "-I", "-S", lock_watch.__file__, *map(str, numbers)]
        try:
            _leave_on_signal(self._stacks)
            self._watcher = subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL, stderr=self._stacks)
        except (OSError, AttributeError) as error:
            LOG.warning("a step that holds the interpreter lock for ever will not be noticed: %s", error)
        finally:
            os.close(reader)

    def beat(self) -> None:
        """A sign of life."""
        if self._pipe >= 0:
            with contextlib.suppress(OSError):  # it is gone, or stopped and full of beats
                os.write(self._pipe, b".")

    def stop(self) -> None:
        """Is watched no more."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._watcher is not None:
            try:
                self._watcher.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._watcher.kill()
                self._watcher.wait()
            self._watcher = None
            faulthandler.unregister(SIGNAL)


def _leave_on_signal(stacks: Any) -> None:
    """Handlers of the signal that need no interpreter: stacks, then `_exit`, whose parameter a handler's has the type of.

    Raises AttributeError where the C library has no such function.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(SIGNAL, ctypes.cast(library._exit, ctypes.c_void_p))
    faulthandler.register(SIGNAL, file=stacks, all_threads=True, chain=True)
