"""Our figures as prometheus_client's families."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from jaxpaged.histograms import Histogram
from jaxpaged.metric_table import Definition, definitions
from jaxpaged.metrics import Metric as EngineFigure


def histogram_family(histogram: Histogram, name: str, doc: str, labels: dict[str, str] | None = None) -> HistogramMetricFamily:
    """A histogram, with counts that add up from class to class."""
    labels, spread, so_far, buckets = labels or {}, histogram.spread(), 0.0, []
    for bound, count in zip((*map(str, spread.bounds), "+Inf"), spread.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    family = HistogramMetricFamily(name, doc, labels=list(labels))
    family.add_metric(list(labels.values()), buckets=buckets, sum_value=spread.total)
    return family


def plain_family(row: Definition) -> CounterMetricFamily | GaugeMetricFamily:
    """A counter or gauge of the table, still without values."""
    return (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(row.name, row.doc, labels=list(row.labels))


def plain_families(metrics: Iterable[EngineFigure]) -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
    """Counters and gauges of an engine, by name."""
    rows, families = definitions(), dict[str, CounterMetricFamily | GaugeMetricFamily]()
    for metric in metrics:
        if metric.name not in families:
            families[metric.name] = plain_family(rows[metric.name])
        families[metric.name].add_metric(list(metric.labels.values()), metric.value)
    return families
