"""Which GPU a program is traced for: the machine's own, or the one that an abstract mesh names when it is compiled ahead of time."""

from typing import NamedTuple

import jax

CAPABILITY_OF_KIND = {
    **{"A100": (8, 0), "A6000": (8, 6), "L40S": (8, 9)},
    **{"H100": (9, 0), "H200": (9, 0), "GH200": (9, 0), "B200": (10, 0), "GB200": (10, 0)},
}
"""Compute capability by a word of the device kind, for devices that are not there to be asked."""


HOPPER = (9, 0)
"""What our Mosaic kernels are written for."""

HOPPER_MULTIPROCESSORS = 132
"""Of an H100 SXM or an H200: what is assumed where no device can be asked."""


class GpuTarget(NamedTuple):
    """A GPU: its name, compute capability (major, minor), and number of multiprocessors."""

    kind: str
    capability: tuple[int, int] | None
    num_multiprocessors: int


def gpu_target() -> GpuTarget | None:
    """The GPU that programs are traced for now; None: for none."""
    planned = jax.sharding.get_abstract_mesh().abstract_device
    if planned is not None:
        if planned.platform != "gpu":
            return None
        words = planned.device_kind.replace("-", " ").split()
        capability = next((CAPABILITY_OF_KIND[word] for word in words if word in CAPABILITY_OF_KIND), None)
        return GpuTarget(planned.device_kind, capability, planned.num_cores)
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    major, _, minor = str(device.compute_capability).partition(".")
    return GpuTarget(device.device_kind, (int(major), int(minor)), device.core_count)


def platform() -> str:
    """The platform that programs are traced for now: gpu, cpu, ..."""
    return "gpu" if gpu_target() is not None else jax.default_backend()


def hopper_refusals(target: GpuTarget) -> list[str]:
    """A sentence if the GPU is no Hopper."""
    if target.capability == HOPPER:
        return []
    has = "an unknown one" if target.capability is None else ".".join(map(str, target.capability))
    return [f"it needs compute capability 9.0, and {target.kind} has {has}"]
