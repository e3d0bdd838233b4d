"""Figures for Prometheus, from the stream of events alone: replaying a JSON log gives what `/metrics` gave."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged import events
from jaxpaged.metrics import EngineMetrics

SECONDS_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of values by class, as Prometheus wants them.

    Args:
        bounds: upper bounds of the classes; a last class holds larger values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """One value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Values that were counted in the same classes already."""
        for index, count in enumerate(counts):
            self._counts[index] += count
        self._sum += total

    def family(self, name: str, doc: str) -> HistogramMetricFamily:
        """As a figure of Prometheus."""
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return HistogramMetricFamily(name, doc, buckets=buckets, sum_value=self._sum)


class PrometheusSink(Collector):
    """Adds up in memory, and never drops; a registry of its own collects from it."""

    def __init__(self) -> None:
        self._engine = EngineMetrics()
        self._lock = threading.Lock()
        self._first_token = Histogram(SECONDS_BOUNDS)
        self._gaps = Histogram(events.TOKEN_GAP_BOUNDS_S)
        self._whole = Histogram(SECONDS_BOUNDS)
        self._queue = Histogram(SECONDS_BOUNDS)
        self._answers: Counter[tuple[str, str]] = Counter()
        self._ends: Counter[str] = Counter()
        self._codes: Counter[str] = Counter()
        self._num_merged = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`."""
        self._engine(event)
        with self._lock:
            match event:
                case events.RequestFirstToken():
                    self._first_token.observe(event.ttft_s)
                case events.StepFinished():
                    self._gaps.add(event.token_gaps, event.token_gaps_s)
                case events.RequestFinished():
                    self._whole.observe(event.e2e_s)
                    self._queue.observe(event.queue_s)
                case events.HttpAnswered():
                    self._num_merged += event.num_merged
                    self._answers[event.path or "none", str(event.status)] += 1
                    if event.end:
                        self._ends[event.end] += 1
                    if event.code:
                        self._codes[event.code] += 1

    def close(self) -> None:
        """See `events.Sink`."""

    def collect(self) -> Iterator[Metric]:
        """All figures, from any thread."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric in self._engine.snapshot():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if metric.name not in families:
                families[metric.name] = kind(metric.name, _doc(metric.name), labels=list(metric.labels))
            families[metric.name].add_metric(list(metric.labels.values()), metric.value)
        yield from families.values()
        with self._lock:
            yield self._first_token.family("jaxpaged_time_to_first_token_seconds", "From a request's arrival to its first token")
            yield self._gaps.family("jaxpaged_token_gap_seconds", "Between two tokens of an answer")
            yield self._whole.family("jaxpaged_request_seconds", "From a request's arrival to its end")
            yield self._queue.family("jaxpaged_queue_seconds", "From a request's arrival to its first step")
            yield _counter("jaxpaged_http_answers", "Requests over HTTP by route and status", ["path", "status"], self._answers)
            yield _counter("jaxpaged_http_ends", "Requests for an answer, by their end", ["end"], self._ends)
            merged = "Tokens of streams that came with one before, because the event loop or the client lagged"
            yield CounterMetricFamily("jaxpaged_http_merged_tokens", merged, value=self._num_merged)
            yield _counter("jaxpaged_http_errors", "Errors that were told, by code", ["code"], self._codes)


def _counter(name: str, doc: str, labels: list[str], counts: Counter[str] | Counter[tuple[str, str]]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, doc, labels=labels)
    for key, count in sorted(counts.items()):
        family.add_metric([key] if isinstance(key, str) else list(key), count)
    return family


def _doc(name: str) -> str:
    return name.removeprefix("jaxpaged_").removesuffix("_total").replace("_", " ").capitalize()
