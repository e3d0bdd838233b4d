"""Figures of the machine: memory of the process, and what the GPUs do. They are read when asked for, and are no events."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxpaged.gpu_readings import GpuReading, GpuSource
from jaxpaged.metric_table import definitions

STATUS = Path("/proc/self/status")


class MachineMetrics(Collector):
    """A collector with a registry of its own, which also has the usual `process_*` figures.

    Args:
        gpus: where readings of GPUs come from.
        status: the kernel's file about the process.
        wall: the time of day.
    """

    def __init__(self, gpus: GpuSource, status: Path = STATUS, wall: Callable[[], float] = time.time) -> None:
        self._gpus, self._status, self._wall = gpus, status, wall
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """What can be read; a figure that cannot is absent, not 0."""
        now = "jaxpaged_scrape_time_seconds"
        yield GaugeMetricFamily(now, definitions()[now].doc, value=self._wall())
        for name, field in (("jaxpaged_process_memory_bytes", "VmRSS"), ("jaxpaged_process_peak_memory_bytes", "VmHWM")):
            if (value := self._memory(field)) is not None:
                yield GaugeMetricFamily(name, definitions()[name].doc, value=value)
        readings = self._gpus.read()
        used = [(reading, float(reading.memory_used_bytes)) for reading in readings]
        total = [(reading, float(reading.memory_total_bytes)) for reading in readings]
        busy = [(reading, reading.utilization) for reading in readings if reading.utilization is not None]
        yield from _of_gpus("jaxpaged_gpu_utilization_ratio", busy)
        yield from _of_gpus("jaxpaged_gpu_memory_used_bytes", used)
        yield from _of_gpus("jaxpaged_gpu_memory_total_bytes", total)

    def _memory(self, field: str) -> int | None:
        try:
            found = re.search(rf"^{field}:\s*(\d+) kB$", self._status.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None


def _of_gpus(name: str, values: list[tuple[GpuReading, float]]) -> Iterator[Metric]:
    if values:
        row = definitions()[name]
        family = GaugeMetricFamily(name, row.doc, labels=list(row.labels))
        for reading, value in values:
            family.add_metric([str(reading.index)], value)
        yield family
