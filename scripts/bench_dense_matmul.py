"""Times the dense matmul by each implementation on the shapes of SmolLM2-135M, layer after layer out of a stack that no cache holds.

    python scripts/bench_dense_matmul.py [--rounds 7] [--dtype bfloat16] [--rows 1,4,16,64,512]

Prints microseconds, GB/s of weights and GFLOP/s of a product for each number of rows; processor time beside wall time, which is what to
compare on a busy machine. Rounds of all are interleaved, and medians printed; the last line is JSON.
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
from jax import lax

from pallas_kernels.dense_matmul import OP, dense_matmul

SHAPES = {"q, o": (576, 576), "k, v": (576, 192), "gate, up": (576, 1536), "down": (1536, 576)}
"""Inputs and outputs."""

STACK_BYTES = 100 << 20


def program(num_rows: int, stack: jax.Array, implementation: str) -> Callable[[], jax.Array]:
    """Products of the same rows with each layer, compiled."""
    rows = np.random.default_rng(0).standard_normal((num_rows, stack.shape[-1]))
    x = jnp.asarray(rows, stack.dtype)

    def all_layers(x: jax.Array, stack: jax.Array) -> jax.Array:
        def step(layer: jax.Array, total: jax.Array) -> jax.Array:
            return total + dense_matmul(x, stack, layer=layer, implementation=implementation)

        return lax.fori_loop(0, stack.shape[0], step, jnp.zeros((num_rows, stack.shape[1]), jnp.float32))

    compiled = jax.jit(all_layers).lower(x, stack).compile()
    return functools.partial(compiled, x, stack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", default="1,4,16,64,512")
    args = parser.parse_args()
    records = []
    names = [name for name in OP.implementations if name != "reference"]
    for shape, (num_in, num_out) in SHAPES.items():
        itemsize = jnp.dtype(args.dtype).itemsize
        layers = STACK_BYTES // (num_in * num_out * itemsize)
        rng = np.random.default_rng(1)
        stack = jnp.asarray(rng.standard_normal((layers, num_out, num_in), np.float32), args.dtype)
        runs = {(rows, name): program(rows, stack, name) for rows in map(int, args.rows.split(",")) for name in names}
        times: dict[tuple[int, str], list[tuple[float, float]]] = {key: [] for key in runs}
        for _ in range(args.rounds):
            for key, run in runs.items():
                wall, busy = time.perf_counter(), time.process_time()
                run().block_until_ready()
                times[key].append(((time.perf_counter() - wall) / layers, (time.process_time() - busy) / layers))
        for (rows, name), seconds in times.items():
            wall, busy = (statistics.median(one) for one in zip(*seconds, strict=True))
            rate, flops = num_in * num_out * itemsize / wall / 1e9, 2 * rows * num_in * num_out / wall / 1e9
            print(
                f"{shape:9} {num_in:5} -> {num_out:5} {rows:4} rows {name:5} {wall * 1e6:9.1f} us ({busy * 1e6:9.1f} us of processors) "
                f"{rate:6.1f} GB/s {flops:7.1f} GFLOP/s",
                flush=True,
            )
            records.append({"in": num_in, "out": num_out, "rows": rows, "implementation": name, "us": wall * 1e6, "cpu_us": busy * 1e6})
    print(json.dumps({"dtype": args.dtype, "results": records}))


if __name__ == "__main__":
    main()
