"""What NVIDIA's driver says of its GPUs, by nvidia-ml-py where it is installed; where it or a GPU is missing there is nothing to say."""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import msgspec


class GpuReading(msgspec.Struct, frozen=True):
    """One GPU now. None: the driver does not tell (a slice of a GPU has no utilisation)."""

    index: int
    name: str
    utilization: float | None
    memory_used_bytes: int
    memory_total_bytes: int


class GpuSource(Protocol):
    """Where readings come from; tests bring their own."""

    def read(self) -> list[GpuReading]: ...


class NvmlSource:
    """Readings of the driver; never raises, and asks no more once there was nothing to ask.

    Args:
        load: finds the library by its name.
    """

    def __init__(self, load: Callable[[str], Any] = importlib.import_module) -> None:
        self._nvml: Any = None
        try:
            self._nvml = load("pynvml")
            self._nvml.nvmlInit()
        except Exception:  # not installed, no driver, or one that is at odds with its library
            self._nvml = None

    def read(self) -> list[GpuReading]:
        """Every GPU that can be read."""
        if self._nvml is None:
            return []
        readings = []
        try:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                readings.append(self._read_one(index))
        except Exception:  # a driver that was unloaded, a GPU that fell off the bus
            return readings
        return readings

    def _read_one(self, index: int) -> GpuReading:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
        try:
            utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except Exception:
            utilization = None
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        return GpuReading(index, text, utilization, int(memory.used), int(memory.total))
