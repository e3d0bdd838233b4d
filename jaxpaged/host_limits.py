"""What this process may take of the machine, and how JAX is told before it starts.

XLA's CPU client sizes its thread pools once, from `NPROC` or else from the CPU affinity; it does not know cgroup quotas, and
afterwards nothing changes the pools.
"""

import contextlib
import ctypes
import gc
import math
import mmap
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from jaxpaged.config import Config
from jaxpaged.errors import ConfigError

# NPROC: XLA. The others: numpy's BLAS, OpenMP code in libraries, the tokenizer's pool.
THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
GPU_FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

# glibc's mallopt: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, and what a user would set instead.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_KEPT_BYTES = 512 * 1024 * 1024


def available_cpus(root: Path = Path("/")) -> int:
    """CPUs that affinity and the cgroup quota (v1 and v2, every level) allow; at least 1. A quota of 1.5 CPUs counts as 2.

    Args:
        root: where `proc` and `sys` are, for tests.
    """
    quotas = [quota for quota in _cgroup_quotas(root) if quota > 0]
    return max(1, min([_affinity(), *(math.ceil(quota) for quota in quotas)]))


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process could have at most: the machine's, or what a cgroup (v1 and v2, every level) allows of it.

    Args:
        root: where `proc` and `sys` are, for tests.

    Returns:
        None where the system does not tell.
    """
    limits = [limit for limit in _cgroup_memory(root) if limit > 0]
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
        limits.append(int(fields["MemTotal"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    return min(limits, default=None)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_quotas(root: Path) -> Iterator[float]:
    """The quota in CPUs of each cgroup that this process is in, from its own up to the mount."""
    for controllers, group in _memberships(root):
        if not controllers:
            for folder in _levels(root / "sys/fs/cgroup", group):
                yield from _quota_v2(folder)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu", "cpu,cpuacct"):
                for folder in _levels(root / "sys/fs/cgroup" / name, group):
                    yield from _quota_v1(folder)


def _cgroup_memory(root: Path) -> Iterator[int]:
    """The limit in bytes of each cgroup that this process is in, from its own up to the mount."""
    for controllers, group in _memberships(root):
        mount, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:
            mount, name = mount / "memory", "memory.limit_in_bytes"
        if not controllers or "memory" in controllers.split(","):
            for folder in _levels(mount, group):
                with contextlib.suppress(OSError, ValueError):
                    yield int((folder / name).read_text())


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """The controllers (v1; none: v2) and path of each cgroup that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        yield controllers, group


def _levels(mount: Path, group: str) -> Iterator[Path]:
    """The group's folder and those above it. Inside a container the path may not exist: the mount is then its own group."""
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    for i in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:i])


def _quota_v2(folder: Path) -> Iterator[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        yield float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


def _quota_v1(folder: Path) -> Iterator[float]:
    try:
        yield float((folder / "cpu.cfs_quota_us").read_text()) / float((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return


def apply_cpu_threads(threads: int | None, env: MutableMapping[str, str] | None = None) -> int:
    """Sets how many threads JAX and the libraries under it will compute with; call before JAX starts.

    Args:
        threads: `cpu.threads`; None: what `available_cpus` says. A variable that is already set is kept then.
        env: the environment to write to; None: this process's.

    Returns:
        The number of threads XLA will use.

    Raises:
        ConfigError: `threads` is given, JAX has already started, and it started with another number.
    """
    env = os.environ if env is None else env
    if jax_has_started():
        current = _to_int(env.get("NPROC")) or _affinity()
        if threads is not None and threads != current:
            raise ConfigError(
                f"cpu.threads {threads} comes too late: JAX has started in this process with {current}; "
                "make the first engine before using jax, or set NPROC",
                param="cpu.threads",
            )
        return current
    if threads is None:
        threads = _to_int(env.get("NPROC")) or available_cpus()
        for variable in THREAD_VARIABLES:
            env.setdefault(variable, str(threads))
    else:
        for variable in THREAD_VARIABLES:
            env[variable] = str(threads)
    return threads


def apply_gpu_fraction(fraction: float, env: MutableMapping[str, str] | None = None) -> None:
    """Sets the share of GPU memory that XLA's allocator takes when it starts, unless the user has; call before JAX starts.

    Args:
        fraction: `cache.gpu_memory_utilization`.
        env: the environment to write to; None: this process's.
    """
    env = os.environ if env is None else env
    if not jax_has_started():
        env.setdefault(GPU_FRACTION_VARIABLE, f"{fraction:g}")


def prepare_process(config: Config) -> int:
    """All of the above from the tree, for programs that start an engine. Returns the number of threads.

    Raises:
        ConfigError: JAX has already started with other limits.
    """
    apply_gpu_fraction(config.cache.gpu_memory_utilization)
    keep_freed_blocks()
    return apply_cpu_threads(config.cpu.threads)


def keep_freed_blocks() -> bool:
    """Lets a step compute in the memory of the step before it.

    glibc takes blocks over 32 MiB from the system and gives them back each time: a step whose intermediate arrays are larger (32 rows of
    logits over 151,936 ids are 19 MiB) then touches ten thousand new pages every time, which took longer than its sampler.

    Returns:
        Whether it was done; not with another C library, nor where the user has set one of the variables of malloc.
    """
    if any(variable in os.environ for variable in MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def return_freed_memory() -> None:
    """Gives what was freed back to the system: after an engine has closed, hundreds of MB."""
    # jaxlib lets go of the host arrays that it took over without a copy at the next collection only.
    gc.collect()
    return_freed_blocks()


def return_freed_blocks() -> None:
    """The same without looking for objects that nobody holds: takes a few ms."""
    # glibc keeps the memory of freed blocks in its arenas; other C libraries have no such function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def untouch(address: int, num_bytes: int) -> None:
    """Gives the pages of zeros back to the system until somebody writes into them: they are zeros again when they are read.

    Only for private memory whose every byte is 0. Where the system has no such call nothing happens.
    """
    if sys.platform != "linux":
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    with contextlib.suppress(OSError, AttributeError):
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))


def jax_has_started() -> bool:
    """Whether JAX has made its devices in this process. Imports nothing."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def _to_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and int(text) > 0 else None
