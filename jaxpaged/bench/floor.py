"""What this machine could do at best: memory bandwidth and matrix products, measured, and the least time that a workload needs."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

BANDWIDTH_BYTES = 512 << 20
NUM_READS = 6
MATMUL_SIZE = 1536
NUM_MATMULS = 6
GPU_MATMUL_SIZE = 8192
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.72}
"""Of int4 about: five bits in linear maps, eight and a half in the table, which is a fifth of a small model."""


class Machine(NamedTuple):
    """What was measured: bytes a second that can be read, and operations a second of a large matrix product in a type."""

    bandwidth: float
    flops: float
    dtype: str


class Work(NamedTuple):
    """What a workload asks for.

    Attributes:
        weight_bytes: as they lie in memory; every step reads them once.
        kv_bytes_per_token: keys and values of one token in all layers.
        dtype: of the weights.
        num_parallel: answers that can run side by side.
        lengths: (tokens in, tokens out) of each request.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    dtype: str
    num_parallel: int
    lengths: list[tuple[int, int]]


def least_seconds(work: Work, machine: Machine) -> float:
    """Under this time no engine of this shape can be: it reads the weights once a step and the stored tokens once per token made,
    and multiplies every token with every weight. Holds for dense models; a mixture of experts reads and multiplies fewer weights.
    """
    outputs = [num_output for _, num_output in work.lengths]
    num_steps = max(max(outputs), -(-sum(outputs) // work.num_parallel))
    # The token at position p reads p stored tokens: the sum over an answer.
    num_read = sum(num_prompt * num_output + num_output * (num_output - 1) // 2 for num_prompt, num_output in work.lengths)
    read_s = (num_steps * work.weight_bytes + num_read * work.kv_bytes_per_token) / machine.bandwidth
    num_weights = work.weight_bytes / DTYPE_BYTES.get(work.dtype, 4)
    computed = sum(num_prompt + num_output - 1 for num_prompt, num_output in work.lengths)
    return max(read_s, 2 * num_weights * computed / machine.flops)


def measure(dtype: str, num_threads: int | None = None) -> Machine:
    """Reads and multiplies for about a second, on the device that JAX has; the best of a few tries of each."""
    import jax
    import jax.numpy as jnp

    is_cpu = jax.default_backend() == "cpu"
    size, kind = (MATMUL_SIZE if is_cpu else GPU_MATMUL_SIZE), dtype if dtype in ("float32", "bfloat16", "float16") else "float32"
    a = jnp.ones((size, size), kind)
    product = jax.jit(lambda x, y: x @ y)
    seconds = _best(lambda: product(a, a).block_until_ready(), NUM_MATMULS)
    bandwidth = _host_bandwidth(num_threads or len(os.sched_getaffinity(0))) if is_cpu else _device_bandwidth()
    return Machine(bandwidth, 2 * size**3 / seconds, kind)


def _host_bandwidth(num_threads: int) -> float:
    """Sums a large array with every thread."""
    data = np.ones(BANDWIDTH_BYTES // 8, np.int64)
    parts = np.array_split(data, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return BANDWIDTH_BYTES / _best(lambda: list(pool.map(np.max, parts)), NUM_READS)


def _device_bandwidth() -> float:
    """Copies a large array: it is read and written."""
    import jax
    import jax.numpy as jnp

    data = jnp.ones(BANDWIDTH_BYTES // 4, jnp.float32)
    copied = jax.jit(lambda x: x + 1)
    return 2 * BANDWIDTH_BYTES / _best(lambda: copied(data).block_until_ready(), NUM_READS)


def _best(work: object, times: int) -> float:
    """Seconds of the fastest call; the first one, which compiles, does not count."""
    assert callable(work)
    work()
    seconds = []
    for _ in range(times):
        begun_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds)
