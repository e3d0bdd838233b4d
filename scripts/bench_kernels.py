"""Times every kernel implementation on the cases tagged "bench" and prints ms, processor time, GB/s and the share of the measured ceiling.

    python scripts/bench_kernels.py [--rounds 7] [--dtype float32] [--case NAME] [--implementation NAME]

The ceiling is the rate at which this machine reads memory, measured in the same run. Rounds of all cases are interleaved, and medians
are printed; the last line is JSON.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import OP, paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case, make, options

CALLS = 4
"""Calls inside one program, so that the cost of starting a program does not count."""


def read_rate(num_bytes: int = 2**28) -> float:
    """GB/s at which a sum reads memory."""
    data = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        total(data).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds) / 1e9


def program(case: Case, dtype: str, implementation: str) -> Callable[[], jax.Array]:
    """A call of `CALLS` layers of a case, compiled, on finite operands."""
    operands = {name: jnp.asarray(value) for name, value in make(case, dtype=dtype).items()}
    for name in ("q", "k_pages", "v_pages"):
        operands[name] = jnp.nan_to_num(operands[name])
    q, k_pages, v_pages = operands.pop("q"), operands.pop("k_pages")[None], operands.pop("v_pages")[None]
    attend = functools.partial(paged_attention, implementation=implementation, **options(case))

    def calls(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> jax.Array:
        # The layer depends on the loop, or the compiler would do one call and repeat its result.
        return jax.lax.fori_loop(
            0, CALLS, lambda i, q: attend(q=q, k_pages=k_pages, v_pages=v_pages, layer=jnp.minimum(i, 0), **operands), q
        )

    compiled = jax.jit(calls).lower(q, k_pages, v_pages).compile()
    return lambda: compiled(q, k_pages, v_pages).block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--case", help="only cases whose name holds this")
    parser.add_argument("--implementation", help="only this one")
    args = parser.parse_args()
    ceiling = read_rate()
    cases = [case for case in CASES if "bench" in case.tags and (args.case or "") in case.name]
    names = [name for name in OP.implementations if name != "reference" and name == (args.implementation or name)]
    runs = {(case.name, name): program(case, args.dtype, name) for case in cases for name in names}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    cpu_seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            run()
            seconds[key].append((time.perf_counter() - start) / CALLS)
            cpu_seconds[key].append((time.process_time() - cpu_start) / CALLS)
    print(f"{jax.devices()[0].device_kind}, {args.dtype}, reads memory at {ceiling:.1f} GB/s")
    records = []
    for case in cases:
        kv_bytes = 2 * sum(kv for _, kv in case.spans) * case.kv_heads * case.head_dim * np.dtype(jnp.dtype(args.dtype)).itemsize
        for name in names:
            median = statistics.median(seconds[case.name, name])
            rate = kv_bytes / median / 1e9
            share, cpu_ms = 100 * rate / ceiling, statistics.median(cpu_seconds[case.name, name]) * 1e3
            times = f"{median * 1e3:8.3f} ms  {cpu_ms:8.3f} ms of processors"
            print(f"{case.name:32} {name:10} {times}  {rate:6.2f} GB/s  {share:5.1f} % of reading the cache once")
            records.append({"case": case.name, "implementation": name, "ms": median * 1e3, "cpu_ms": cpu_ms, "gb_per_s": rate})
    summary = {"benchmark": "kernels", "dtype": args.dtype, "ceiling_gb_per_s": ceiling, "rounds": args.rounds, "results": records}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
