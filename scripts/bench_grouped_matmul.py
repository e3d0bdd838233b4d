"""Times grouped matmul on the cases tagged "bench" and prints ms, GB/s of the weights in use and the share of the measured ceiling.

    python scripts/bench_grouped_matmul.py [--rounds 7] [--dtype float32] [--case NAME]

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
from bench_kernels import read_rate

from pallas_kernels.grouped_matmul import OP, grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case, make


def program(case: Case, dtype: str, implementation: str) -> Callable[[], jax.Array]:
    """A call of a case, compiled."""
    operands = {name: jnp.asarray(value) for name, value in make(case, dtype=dtype).items()}
    compiled = jax.jit(functools.partial(grouped_matmul, implementation=implementation)).lower(**operands).compile()
    return lambda: compiled(**operands).block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--case", help="only cases whose name holds this")
    args = parser.parse_args()
    ceiling = read_rate()
    cases = [case for case in CASES if "bench" in case.tags and (args.case or "") in case.name]
    operands = make(Case("small", (1,), 64, 64), dtype=args.dtype).values()
    names = [name for name, it in OP.implementations.items() if name != "reference" and not it.refusals(*operands, layer=None)]
    runs = {(case.name, name): program(case, args.dtype, name) for case in cases for name in names}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - start)
    print(f"{jax.devices()[0].device_kind}, {args.dtype}, reads memory at {ceiling:.1f} GB/s")
    records = []
    for case in cases:
        num_used = sum(size > 0 for size in case.group_sizes)
        weight_bytes = num_used * case.num_in * case.num_out * jnp.dtype(args.dtype).itemsize
        for name in names:
            median = statistics.median(seconds[case.name, name])
            rate = weight_bytes / median / 1e9
            print(f"{case.name:24} {name:10} {median * 1e3:9.2f} ms {rate:7.2f} GB/s of weights {100 * rate / ceiling:6.1f} % of reading")
            records.append({"case": case.name, "implementation": name, "ms": median * 1e3, "gb_per_s": rate})
    print(json.dumps({"dtype": args.dtype, "ceiling_gb_per_s": ceiling, "results": records}))


if __name__ == "__main__":
    main()
