"""What the live page knows: figures of the last minutes, looked at once a second, and the lives of the last requests.

It is a sink, so that whoever opens the page sees what came before, too. A step costs it one comparison; once a second it takes the
figures that `/metrics` has, which is 35 us.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping

from jaxpaged import events
from jaxpaged.diagnose.scrapes import Scrape
from server.dashboard.timeline import RequestRow, Timeline

LOOK_S = 1.0
KEPT_S = 150.0
"""Longer than the longest state that the doctor waits for."""


class LiveView:
    """A sink. Any thread may read it.

    Args:
        scrape: the figures as they are now, told to be of a moment.
    """

    def __init__(self, scrape: Callable[[float], Scrape]) -> None:
        self._scrape = scrape
        self._scrapes: deque[Scrape] = deque()
        self._timeline = Timeline()
        self._next_s = float("-inf")
        self._lock = threading.Lock()

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`. It stands before the figures' own sink, so that a look ends before the event that is late for it."""
        if not self._next_s - 2 * LOOK_S <= event.time_s < self._next_s:
            self.look(event.time_s)
        if type(event) is not events.StepFinished:
            with self._lock:
                self._timeline.take(event)

    def close(self) -> None:
        """See `events.Sink`."""

    def look(self, now_s: float) -> None:
        """Takes the figures if a second is over."""
        with self._lock:
            kept = self._scrapes
            if kept and not kept[-1].at_s - LOOK_S < now_s < kept[-1].at_s + KEPT_S:
                kept.clear()  # a clock that was set, or nothing to be seen any more
            if kept and now_s < kept[-1].at_s + LOOK_S:
                return
            scrape = self._scrape(now_s)
            if kept and now_s >= kept[-1].at_s + 2 * LOOK_S:
                # What happened did so in the first second; then nothing did.
                kept.append(Scrape(kept[-1].at_s + LOOK_S, scrape.values, scrape.spreads))
            kept.append(scrape)
            while kept[0].at_s < now_s - KEPT_S:
                kept.popleft()
            self._next_s = now_s + LOOK_S

    def scrapes(self) -> list[Scrape]:
        """The looks of the last minutes."""
        with self._lock:
            return list(self._scrapes)

    def rows(self, slots: Mapping[str, int], names: Mapping[str, str], now_s: float, seconds: float) -> list[RequestRow]:
        """See `Timeline.rows`."""
        with self._lock:
            return self._timeline.rows(slots, names, now_s, seconds)
