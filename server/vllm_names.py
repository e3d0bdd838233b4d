"""The same figures under vLLM's names and labels: a second view of what is counted once, for tools that look for them."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxpaged import events
from jaxpaged.histograms import Histogram
from jaxpaged.metric_table import DEFINITIONS
from server.prometheus_families import histogram_family

ENGINE = "0"
LABELS_OF_LABELS = {"reason": "finished_reason"}
"""Our label -> vLLM's."""
NOTHING_OF_THE_KIND = ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits")
"""Counters of vLLM's that are always there, and always 0 here: no cache beside the pool, and no images."""


class VllmNames:
    """Shows our figures as vLLM does.

    Args:
        model_name: the label; of the operator's making.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._names = {row.name: row.vllm for row in DEFINITIONS if row.vllm}

    def families(
        self,
        ours: Mapping[str, CounterMetricFamily | GaugeMetricFamily],
        histograms: Mapping[str, Histogram],
        started: events.EngineStarted | None,
    ) -> Iterator[Metric]:
        """What vLLM would show.

        Args:
            ours: counters and gauges by name.
            histograms: by name.
            started: for the limits of the cache; None before the engine is ready.
        """
        docs = {row.name: row.doc for row in DEFINITIONS}
        for name, theirs in self._names.items():
            if name in histograms:
                yield histogram_family(histograms[name], f"vllm:{theirs}", docs[name], self._labels)
            elif name in ours:
                yield self._renamed(ours[name], f"vllm:{theirs}", docs[name])
        for name in NOTHING_OF_THE_KIND:
            yield self._one(CounterMetricFamily, f"vllm:{name}", "Always 0 here", 0)
        if started is not None:
            told = {"block_size": started.page_size, "num_gpu_blocks": started.num_pages, "cache_dtype": started.dtype}
            labels = {**self._labels, **{name: str(value) for name, value in told.items()}}
            info = GaugeMetricFamily("vllm:cache_config_info", "Always 1; the labels say how the page pool is made", labels=list(labels))
            info.add_metric(list(labels.values()), 1)
            yield info

    def _renamed(self, family: CounterMetricFamily | GaugeMetricFamily, name: str, doc: str) -> Metric:
        samples = family.samples
        extra = [LABELS_OF_LABELS[label] for label in (samples[0].labels if samples else {})]
        new = type(family)(name, doc, labels=[*self._labels, *extra])
        for sample in samples:
            new.add_metric([*self._labels.values(), *sample.labels.values()], sample.value)
        return new

    def _one(self, kind: type[CounterMetricFamily], name: str, doc: str, value: float) -> Metric:
        family = kind(name, doc, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
