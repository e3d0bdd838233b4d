"""The page pool on the device, and how many pages fit in the memory given."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpaged.config import MIB, CacheConfig
from jaxpaged.errors import MemoryBudgetError
from jaxpaged.host_limits import untouch
from jaxpaged.kv_layout import lay_out

CPU_POOL_BYTES = 512 * MIB
GPU_RESERVE_FRACTION = 0.03
"""Share of the GPU's memory left over for what nobody counts (contexts, fragmentation)."""

DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}


class KVCache(NamedTuple):
    """The pool. An argument and a result of every step, donated: it is updated in place and never copied."""

    k: Float[Array, "layers pages kv_heads page_size head_dim"]
    v: Float[Array, "layers pages kv_heads page_size head_dim"]


class CacheShape(NamedTuple):
    """What decides the size of a page.

    Attributes:
        layers: those of one KV group, which are the pool's.
        num_parts: of the KV heads, on different devices.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype
    num_parts: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device: keys and values of one KV group's layers."""
        return 2 * self.layers * (self.kv_heads // self.num_parts) * self.page_size * self.head_dim * self.dtype.itemsize


class DeviceMemory(NamedTuple):
    """What a live backend says of its memory, in bytes."""

    limit_bytes: int
    in_use_bytes: int


def cache_shape(model: Any, cache: CacheConfig, *, num_parts: int = 1) -> CacheShape:
    """The shape of a model's pages; `model` is its facts, or its family's `Config`, and `num_parts` as in `CacheShape`."""
    dtype = model.dtype if cache.dtype == "auto" else DTYPES[cache.dtype]
    return CacheShape(lay_out(model.windows).layers_per_group, model.kv_heads, model.head_dim, cache.page_size, dtype, num_parts)


def make_cache(shape: CacheShape, num_pages: int, sharding: jax.sharding.Sharding | None = None) -> KVCache:
    """A pool of `num_pages`, zero-filled; page 0 is read by padding only and never given out. `sharding`: None: on the first device."""
    dims = (shape.layers, num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
    return KVCache(zeros(dims, shape.dtype, sharding), zeros(dims, shape.dtype, sharding))


def zeros(dims: tuple[int, ...], dtype: DTypeLike, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Zeros of a device's own. On a CPU they come from the host, which compiles no program, and take memory only as they are used."""
    if jax.default_backend() == "cpu":
        made = jax.block_until_ready(jax.device_put(np.zeros(dims, dtype), sharding, may_alias=False))
        if sharding is None:
            made = made.addressable_data(0)  # asked for its address, the array around it would keep two
            untouch(made.unsafe_buffer_pointer(), made.nbytes)
        return made
    return jnp.zeros(dims, dtype, device=sharding)


def count_pages(
    config: CacheConfig,
    shape: CacheShape,
    *,
    least_pages: int,
    most_pages: int,
    device: DeviceMemory | None,
    temporary_bytes: int,
) -> int:
    """How many pages the pool gets, page 0 included.

    Args:
        config: the budget (`memory`) or the share of the GPU (`gpu_memory_utilization`).
        shape: what decides the size of a page.
        least_pages: what a sequence of one token takes.
        most_pages: more than this is never of use; it bounds the default budget of tiny models.
        device: limit and use of a GPU after the weights were loaded; None on CPU.
        temporary_bytes: scratch memory of the largest step program.

    Raises:
        MemoryBudgetError: fewer than `least_pages` usable pages fit.
    """
    if config.memory is not None:
        budget = config.memory
    elif device is None:
        budget = CPU_POOL_BYTES
    else:
        # XLA's own limit already carries `gpu_memory_utilization` when the command line started the backend.
        free = device.limit_bytes - device.in_use_bytes
        budget = int(free - temporary_bytes - GPU_RESERVE_FRACTION * device.limit_bytes)
    num_pages = budget // shape.page_bytes
    if config.memory is None:
        num_pages = min(num_pages, most_pages + 1)
    if num_pages < 1 + least_pages:
        raise MemoryBudgetError(
            f"the page pool gets {max(budget, 0)} bytes and one page needs {shape.page_bytes}: at least {1 + least_pages} pages are "
            f"needed; raise cache.memory or lower cache.page_size ({shape.page_size})"
        )
    return int(num_pages)


def device_memory(devices: Sequence[jax.Device]) -> DeviceMemory | None:
    """Limit and use of that accelerator's memory that has least left; None where the backend keeps no account (CPU).

    Args:
        devices: those of other processes are left out: they tell nothing here.
    """
    memories: list[DeviceMemory] = []
    for device in devices:
        if device.process_index != jax.process_index():
            continue
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        memories.append(DeviceMemory(int(stats["bytes_limit"]), int(stats["bytes_in_use"])))
    return min(memories, key=lambda memory: memory.limit_bytes - memory.in_use_bytes)
