"""Times of the product on a machine that others use, too."""

import time
from pathlib import Path

SLOWER = 5
"""So many times longer than promised may something take on a machine whose processors are all taken by other tests."""


class Stopwatch:
    """Seconds since it was made, less those that threads of this process stood in the queue for a processor: what others took of it.

    What others take is more than that: caches, the time of a virtual processor, and the turns of an event loop that wait for each other.
    So a test says `is_within` a promise, and what breaks that is not a slow machine but a wait for a timeout or for work of another kind.
    """

    def __init__(self) -> None:
        self._begun_s, self._queued_s = time.monotonic(), _queued_s()

    def seconds(self) -> float:
        """Never less than nothing; where the system keeps no such figures, all the time that has passed."""
        return max(0.0, time.monotonic() - self._begun_s - (_queued_s() - self._queued_s))

    def is_within(self, promised_s: float) -> bool:
        """Whether a promise of seconds on a quiet machine is kept, as far as a busy one can tell."""
        return self.seconds() < SLOWER * promised_s


def _queued_s() -> float:
    """Seconds that the threads of this process have been ready to run and did not."""
    total_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total_ns += int(path.read_text().split()[1])
        except (OSError, IndexError):  # a thread that has ended meanwhile
            continue
    return total_ns / 1e9
