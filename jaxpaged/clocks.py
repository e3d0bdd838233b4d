"""Where times come from."""

import time
from collections.abc import Callable
from typing import NamedTuple


class Clocks(NamedTuple):
    """`monotonic` measures, `wall` labels events for people; both in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


REAL_CLOCKS = Clocks()


class Timer:
    """Splits a step's wall time into its parts. `last` is the time of the last lap."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.last = clock, clock()

    def lap(self) -> float:
        """Seconds since the last lap, or since the timer was made."""
        now = self._clock()
        lap, self.last = now - self.last, now
        return lap
