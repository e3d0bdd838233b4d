"""How far the loading of weights is, as events of the start: bytes, share, bytes a second."""

import time
from collections.abc import Callable

from jaxpaged.loading.progress import Meter, TransferReport, figures

INTERVAL_S = 1.0
"""Seconds between two events; a load that is shorter has none."""


class LoadProgress:
    """A `loading.progress.Progress` that says it in the words of a start's phase."""

    def __init__(self, name: str, say: Callable[[str, int, int], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is said yet.

        Args:
            name: the model's.
            say: takes a message, the bytes done and those in all.
            clock: seconds.
        """
        self._name, self._say, self._clock = name, say, clock
        self._due_s = clock() + INTERVAL_S

    def meter(self, total_bytes: int | None) -> Meter:
        """Counts the bytes of one load; None: nobody knows how many there will be."""
        return Meter(self, self._name, total_bytes, clock=self._clock)

    def show(self, report: TransferReport) -> None:
        now_s = self._clock()
        if now_s >= self._due_s and not report.is_finished:
            self._due_s = now_s + INTERVAL_S
            self._say(f"loading {self._name}: {figures(report)}", report.done_bytes, report.total_bytes or 0)

    def note(self, message: str) -> None:
        pass

    def close(self) -> None:
        pass
