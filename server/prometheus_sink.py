"""Figures for Prometheus, from the stream of events alone: replaying a JSON log gives what `/metrics` gave."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jaxpaged import events
from jaxpaged.diagnose.scrapes import Key, Scrape
from jaxpaged.histograms import EventHistograms
from jaxpaged.metric_table import HTTP_COUNTERS, definitions
from jaxpaged.metrics import EngineMetrics
from server.ledger import End
from server.prometheus_families import histogram_family, plain_families, plain_family
from server.vllm_names import EngineFamilies, VllmNames


class PrometheusSink(Collector):
    """Adds up in memory, and never drops; a registry of its own collects from it.

    Args:
        model_name: shows the figures under vLLM's names, too, with this label; None: under ours alone.
    """

    def __init__(self, model_name: str | None = None) -> None:
        self._engine = EngineMetrics()
        self._vllm = None if model_name is None else VllmNames(model_name)
        self._lock = threading.Lock()
        self._histograms = EventHistograms()
        self._http: dict[str, Counter[tuple[str, ...]]] = {row.name: Counter() for row in HTTP_COUNTERS}
        # From 0 on, so that a share of failures is 0, and not unknown, before the first one.
        self._http["jaxpaged_http_ends_total"].update({(end.value,): 0 for end in End})
        self._http["jaxpaged_http_merged_tokens_total"][()] = 0
        self._started: events.EngineStarted | None = None
        self._copies: list[_CopyFigures] = []
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`. Raises ValueError as `EngineMetrics` does, after the event was taken."""
        with self._lock:
            self._histograms(event)
            self._take(event)
            if self._copies and isinstance(event, events.EngineEvent.__value__):
                self._copies[event.engine](event)
        self._engine(event)

    def scrape(self, at_s: float) -> Scrape:
        """The engine's figures as they are now, for a diagnosis; from any thread."""
        values: dict[Key, float] = {(metric.name, tuple(metric.labels.items())): metric.value for metric in self._engine.snapshot()}
        with self._lock:
            return Scrape(at_s, values, {name: histogram.spread() for name, histogram in self._histograms.by_name.items()})

    def close(self) -> None:
        """See `events.Sink`."""

    def collect(self) -> Iterator[Metric]:
        """All figures, from any thread."""
        rows, families = definitions(), plain_families(self._engine.snapshot())
        with self._lock:
            for name, counts in self._http.items():
                families[name] = plain_family(rows[name])
                for labels, count in sorted(counts.items()):
                    families[name].add_metric(list(labels), count)
            yield from families.values()
            histograms = self._histograms.by_name
            for name, histogram in histograms.items():
                yield histogram_family(histogram, name, rows[name].doc)
            if self._vllm is not None:
                copies = [copy.families() for copy in self._copies]
                yield from self._vllm.families(copies or [EngineFamilies(families, histograms)], self._started)

    def _take(self, event: events.Event) -> None:
        match event:
            case events.EngineStarted():
                self._started = event
                # One alone is told by the sums.
                if self._vllm is not None and event.num_engines > 1:
                    self._copies = [_CopyFigures(event) for _ in range(event.num_engines)]
            case events.HttpAnswered():
                self._http["jaxpaged_http_answers_total"][event.path or "none", str(event.status)] += 1
                self._http["jaxpaged_http_merged_tokens_total"][()] += event.num_merged
                if event.end:
                    self._http["jaxpaged_http_ends_total"][event.end,] += 1
                if event.code:
                    self._http["jaxpaged_http_errors_total"][event.code,] += 1


class _CopyFigures:
    """What one of several copies of the model does. Whoever calls it brings a lock.

    Args:
        started: its pool is empty then.
    """

    def __init__(self, started: events.EngineStarted) -> None:
        self._metrics, self._histograms = EngineMetrics(), EventHistograms()
        nothing = events.EngineLoad(0, 0, started.num_pages, 0, 0)
        self(events.LoadChanged(time_s=started.time_s, **msgspec.structs.asdict(nothing), own_load=nothing))

    def __call__(self, event: events.EngineEvent) -> None:
        own = events.told_alone(event)
        self._histograms(own)
        with contextlib.suppress(ValueError):  # said of the sums
            self._metrics(own)

    def families(self) -> EngineFamilies:
        """Its figures now."""
        return EngineFamilies(plain_families(self._metrics.snapshot()), self._histograms.by_name)
