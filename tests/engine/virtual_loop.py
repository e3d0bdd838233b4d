"""An event loop and a pool of workers without threads, sockets or clocks, one turn at a time: a seed replays exactly."""

import asyncio
import concurrent.futures
import random
from collections.abc import Callable
from typing import Any


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose time is somebody else's, and which never waits.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._virtual_time = clock
        self._selector = self
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """See `asyncio.AbstractEventLoop`."""
        return self._virtual_time()

    def select(self, timeout: float | None) -> list[Any]:
        """As a selector: nothing ever comes from outside."""
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """Called with what `select` has returned."""

    def _write_to_self(self) -> None:
        """Wakes a loop that waits in `select`; this one never does."""

    @property
    def next_s(self) -> float | None:
        """When it has something to do; None: not before somebody calls."""
        if self._ready:  # type: ignore[attr-defined]
            return self.time()
        times = [handle.when() for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        return min(times, default=None)

    def turn(self) -> None:
        """Runs what is ready now; what that makes ready waits for the next turn."""
        self.call_soon(self.stop)
        self.run_forever()


class VirtualPool(concurrent.futures.Executor):
    """Work that is done when somebody calls `work`, by one of two workers, so that it may overtake."""

    def __init__(self) -> None:
        self._waiting: list[tuple[concurrent.futures.Future[Any], Callable[[], Any]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """See `concurrent.futures.Executor`."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self, rng: random.Random) -> None:
        """Does one piece."""
        future, call = self._waiting.pop(rng.randrange(min(2, len(self._waiting))))
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
