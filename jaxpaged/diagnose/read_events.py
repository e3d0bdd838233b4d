"""Our event log (`log.format: json`), replayed into the figures that a server has."""

from collections.abc import Iterable, Iterator

import msgspec

from jaxpaged import events
from jaxpaged.diagnose.scrapes import Key, Scrape, observe
from jaxpaged.diagnose.windows import Observation
from jaxpaged.histograms import EventHistograms
from jaxpaged.metrics import EngineMetrics

MAX_WINDOWS = 512
"""A longer log is looked at in longer windows."""
MARK = b'{"event":'


def observe_events(stream: Iterable[events.Event], window_s: float) -> Observation:
    """Windows of `window_s` seconds, or twice, four times, ... as long if there would be more than `MAX_WINDOWS`."""
    metrics, histograms = EngineMetrics(), EventHistograms()
    scrapes: list[Scrape] = []
    last_s: float | None = None

    def scrape(at_s: float) -> None:
        values: dict[Key, float] = {(metric.name, tuple(metric.labels.items())): metric.value for metric in metrics.snapshot()}
        scrapes.append(Scrape(at_s, values, {name: histogram.spread() for name, histogram in histograms.by_name.items()}))

    for event in stream:
        if last_s is None:
            scrape(event.time_s)
        # A clock that was set back must not end the log.
        last_s = max(event.time_s, last_s or event.time_s)
        while event.time_s >= scrapes[-1].at_s + window_s:
            # Long after the last event nothing new can be seen in each of many windows.
            num_windows = int((event.time_s - scrapes[-1].at_s) / window_s)
            if num_windows > MAX_WINDOWS:
                window_s = (event.time_s - scrapes[0].at_s) / MAX_WINDOWS
                continue
            scrape(scrapes[-1].at_s + window_s)
            if len(scrapes) > MAX_WINDOWS:
                del scrapes[1::2]
                window_s *= 2
        _take(event, metrics, histograms)
    if last_s is not None and last_s - scrapes[-1].at_s >= window_s / 4:
        scrape(last_s)
    return observe(scrapes, "an event log of jaxpaged")


def read_events(lines: Iterable[bytes], window_s: float) -> Observation:
    """See `observe_events`. Lines that are no events (cut off, or of another version) are left out."""
    return observe_events(_events(lines), window_s)


def _events(lines: Iterable[bytes]) -> Iterator[events.Event]:
    for line in lines:
        try:
            yield events.from_line(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def _take(event: events.Event, metrics: EngineMetrics, histograms: EventHistograms) -> None:
    histograms(event)
    try:
        metrics(event)
    except ValueError:  # a wrong number in the log; the rest of the event has been taken
        return
