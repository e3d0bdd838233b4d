"""The same figures under vLLM's names and labels: a second view of what is counted once, for tools that look for them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxpaged import events
from jaxpaged.histograms import Histogram
from jaxpaged.metric_table import DEFINITIONS
from server.prometheus_families import histogram_family

LABELS = ("model_name", "engine")
LABELS_OF_LABELS = {"reason": "finished_reason"}
"""Our label -> vLLM's."""
NOTHING_OF_THE_KIND = ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits")
"""Counters of vLLM's that are always there, and always 0 here: no cache beside the pool, and no images."""


class EngineFamilies(NamedTuple):
    """The figures of one engine.

    Attributes:
        plain: counters and gauges by name.
        histograms: by name.
    """

    plain: Mapping[str, CounterMetricFamily | GaugeMetricFamily]
    histograms: Mapping[str, Histogram]


class VllmNames:
    """Shows our figures as vLLM does.

    Args:
        model_name: the label; of the operator's making.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._names = {row.name: row.vllm for row in DEFINITIONS if row.vllm}

    def families(self, engines: Sequence[EngineFamilies], started: events.EngineStarted | None) -> Iterator[Metric]:
        """What vLLM would show.

        Args:
            engines: the figures of each copy of the model, in the order of their numbers; at least one.
            started: for the limits of the cache; None before the engine is ready.
        """
        docs = {row.name: row.doc for row in DEFINITIONS}
        for name, theirs in self._names.items():
            told = [
                self._told(engine, f"vllm:{theirs}", docs[name], number, name)
                for number, engine in enumerate(engines)
                if name in engine.histograms or name in engine.plain
            ]
            if told:
                yield _joined(told)
        for name in NOTHING_OF_THE_KIND:
            family = CounterMetricFamily(f"vllm:{name}", "Always 0 here", labels=LABELS)
            for number in range(len(engines)):
                family.add_metric(list(self._labels(number).values()), 0)
            yield family
        if started is not None:
            told_of_cache = {"block_size": started.page_size, "num_gpu_blocks": started.num_pages, "cache_dtype": started.dtype}
            info = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Always 1; the labels say how the page pool is made",
                labels=[*LABELS, *told_of_cache],
            )
            for number in range(len(engines)):
                info.add_metric([*self._labels(number).values(), *map(str, told_of_cache.values())], 1)
            yield info

    def _labels(self, engine: int) -> dict[str, str]:
        return dict(zip(LABELS, (self._model_name, str(engine)), strict=True))

    def _told(self, engine: EngineFamilies, theirs: str, doc: str, number: int, name: str) -> Metric:
        """One figure of one engine."""
        labels = self._labels(number)
        if name in engine.histograms:
            return histogram_family(engine.histograms[name], theirs, doc, labels)
        family = engine.plain[name]
        extra = [LABELS_OF_LABELS[label] for label in (family.samples[0].labels if family.samples else {})]
        new = type(family)(theirs, doc, labels=[*labels, *extra])
        for sample in family.samples:
            new.add_metric([*labels.values(), *sample.labels.values()], sample.value)
        return new


def _joined(families: Sequence[Metric]) -> Metric:
    """The samples of all, which have the same name, in the first."""
    first, *others = families
    for other in others:
        first.samples += other.samples
    return first
