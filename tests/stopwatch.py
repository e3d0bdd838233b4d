"""Times of the product on a machine that others use, too."""

import time
from pathlib import Path


class Stopwatch:
    """Seconds since it was made, less those that threads of this process stood in the queue for a processor: what others took of it."""

    def __init__(self) -> None:
        self._begun_s, self._queued_s = time.monotonic(), _queued_s()

    def seconds(self) -> float:
        """Never less than nothing; where the system keeps no such figures, all the time that has passed."""
        return max(0.0, time.monotonic() - self._begun_s - (_queued_s() - self._queued_s))


def _queued_s() -> float:
    """Seconds that the threads of this process have been ready to run and did not."""
    total_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total_ns += int(path.read_text().split()[1])
        except (OSError, IndexError):  # a thread that has ended meanwhile
            continue
    return total_ns / 1e9
