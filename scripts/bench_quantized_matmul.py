"""Times int8 products of SmolLM2's matrices by rows, with XLA and with each set of instructions of this processor.

    python scripts/bench_quantized_matmul.py [--rows 1,2,4,8,16,64,512] [--rounds 7] [--paths xla,avx2,avx512_vnni,amx] [--matrices gate]

Layers of a stack take turns, so that weights come from memory as they do in a step. Runs are interleaved; medians of wall and of CPU time
(of all threads) a call, the rate at which weights are read, and multiplications and additions a second of CPU time: a product of a number
in 15 bits with one in 8 counts as one of each. The last line is JSON.
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

from pallas_kernels.quantized_matmul import cpu, xla
from pallas_kernels.quantized_matmul.weights import Int8Weights

MATRICES = {"q": (576, 576), "k": (576, 192), "gate": (576, 1536), "down": (1536, 576), "head": (576, 49152)}
"""Inputs and outputs."""

STACK_BYTES = 64 * 2**20
MAX_CALLS = 32


def program(path: str, num_rows: int, num_in: int, weights: Int8Weights, dtype: str) -> tuple[Callable[[], jax.Array], int]:
    """Products with several layers of a stack, compiled, and how many."""
    num_layers, num_out, _ = weights.values.shape
    multiply = xla.quantized_matmul if path == "xla" else functools.partial(cpu.quantized_matmul, most=path)
    num_calls = min(num_layers, MAX_CALLS) if num_rows <= 64 else min(num_layers, 4)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((num_rows, num_in)), dtype)

    def calls(x: jax.Array, weights: Int8Weights) -> jax.Array:
        # Each product adds to the rows of the next, or the compiler might do them side by side.
        return jax.lax.fori_loop(0, num_calls, lambda layer, x: x.at[:, 0].add(multiply(x, weights, layer=layer)[:, 0].astype(x.dtype)), x)

    compiled = jax.jit(calls).lower(x, weights).compile()
    return lambda: compiled(x, weights).block_until_ready(), num_calls


def stack_of(num_in: int, num_out: int) -> Int8Weights:
    """A stack of layers that no cache holds."""
    num_layers = max(1, STACK_BYTES // (num_in * num_out))
    values = np.random.default_rng(1).integers(-127, 128, (num_layers, num_out, num_in), np.int8)
    return Int8Weights(jnp.asarray(values), jnp.full((num_layers, num_out), 0.01, jnp.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,2,4,8,16,64,512")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--paths", default=",".join(("xla", *cpu.paths())))
    parser.add_argument("--matrices", default="q,k,gate,down")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    results = []
    for name in args.matrices.split(","):
        num_in, num_out = MATRICES[name]
        weights = stack_of(num_in, num_out)
        keys = [(path, int(rows)) for rows in args.rows.split(",") for path in args.paths.split(",")]
        runs = {key: program(*key, num_in, weights, args.dtype) for key in keys}
        wall: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
        spent: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
        for turn in range(args.rounds + 1):
            for key, (run, num_calls) in runs.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                run()
                if turn:  # the first turn warms up
                    wall[key].append((time.perf_counter() - start) / num_calls)
                    spent[key].append((time.process_time() - cpu_start) / num_calls)
        for path, rows in keys:
            seconds, cpu_seconds = statistics.median(wall[path, rows]), statistics.median(spent[path, rows])
            rate, operations = num_in * num_out / seconds / 1e9, 2 * rows * num_in * num_out / cpu_seconds / 1e9
            print(
                f"{name:5} {num_in:5} -> {num_out:5}  {rows:4} rows  {path:12} {seconds * 1e6:9.1f} us  CPU {cpu_seconds * 1e6:9.1f} us  "
                f"{rate:6.2f} GB/s  {operations:7.1f} GOP/s of a processor"
            )
            shape = {"matrix": name, "rows": rows, "path": path}
            results.append({**shape, "us": seconds * 1e6, "cpu_us": cpu_seconds * 1e6, "gb_per_s": rate, "gop_per_cpu_s": operations})
    print(json.dumps({"benchmark": "quantized_matmul", "dtype": args.dtype, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
