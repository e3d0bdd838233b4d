"""Stops code that runs too long on its thread: an exception is raised in it from outside."""

import _thread
import ctypes
import threading
from collections.abc import Callable

RETRY_S = 0.05


class TimeUpError(BaseException):
    """Raised in the middle of code whose time is up. No Exception, so that code which catches those does not go on."""


class _Watch:
    """Raises TimeUpError in the thread that made it, from `seconds` on, until `end`.

    Bare threads, locks and flags, because the exception may come in the middle of `start` and `end`, and the methods of
    `threading.Thread` do not survive that.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._has_ended = True
        self._seconds = seconds
        self._thread_id = threading.get_ident()
        self._running, self._ending = threading.Lock(), threading.Lock()
        self._running.acquire()
        self._ending.acquire()

    def start(self) -> None:
        """Begins to count."""
        self._has_ended = False
        try:
            _thread.start_new_thread(self._watch, ())
        except RuntimeError:
            self._has_ended = True
            raise

    def _watch(self) -> None:
        wait_s = self._seconds
        while not self._running.acquire(timeout=wait_s) and not self.is_over:
            _raise_in(self._thread_id, TimeUpError)
            wait_s = RETRY_S  # whatever swallowed it goes on no longer than this
        self._has_ended = True
        self._ending.release()

    def end(self) -> None:
        """From here on nothing is raised; what was raised and has not come yet is taken back. May be called again if it was cut short."""
        if self._running.locked():
            self._running.release()
        while not self._has_ended:
            self._ending.acquire(timeout=RETRY_S)
        _raise_in(self._thread_id, None)


def run_within[T](seconds: float, function: Callable[[], T]) -> T:
    """Calls the function, for at most about `seconds`; code inside must not hold locks of ours.

    The exception comes between two bytecodes of Python: one call into C is not cut short.

    Raises:
        TimeUpError: the time was up before it had returned.
    """
    watch = _Watch(seconds)
    try:
        watch.start()
        return function()
    finally:
        watch.is_over = True
        # The exception can still come at any point of this loop, which then starts again; once `end` is through it cannot.
        while True:
            try:
                watch.end()
                break
            except TimeUpError:
                continue


def _raise_in(thread_id: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None if kind is None else ctypes.py_object(kind))
