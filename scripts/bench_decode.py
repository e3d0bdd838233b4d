"""Times decode steps of SmolLM2's shape (random weights) in float32, bfloat16 and int8, with and without native kernels.

    python scripts/bench_decode.py [--rounds 21] [--variants float32,bfloat16,int8-xla,int8-cpu] [--batches 1,16] [--context 200]

One token of each sequence a step, sampler and all, without the host's part of the engine. Variants take turns, and medians are printed:
wall time says little on a machine that does other work, CPU time (of all threads) more. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from unittest import mock

import numpy as np
from bench_step import random_model, rows_of, runner_for

from jaxpaged.model_runner import ModelRunner
from jaxpaged.step_packer import pack_alone
from pallas_kernels import native
from pallas_kernels.quantized_matmul import cpu

VARIANTS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8-xla": ("float32", "int8"),
    "int8-cpu": ("float32", "int8"),
    "int8-bfloat16-cpu": ("bfloat16", "int8"),
}
"""Type of activations, and quantization; int8 with XLA alone or with native kernels."""


def runner_of(variant: str, batches: list[int]) -> ModelRunner:
    """A runner with programs for the batches alone."""
    dtype, quantization = VARIANTS[variant]
    buckets = tuple(sorted({max(2, batch) for batch in batches}))
    max_rows = 0 if variant.endswith("xla") else cpu.max_rows()
    with mock.patch.object(cpu, "max_rows", return_value=max_rows):
        return runner_for(random_model(dtype, quantization), buckets, max(2, *batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--variants", default="float32,bfloat16,int8-xla,int8-cpu")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--context", type=int, default=200)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    runners = {variant: runner_of(variant, batches) for variant in args.variants.split(",")}
    wall: dict[tuple[int, str], list[float]] = {}
    cpu_time: dict[tuple[int, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for variant, runner in runners.items():
            for batch in batches:
                rows = rows_of([(1, args.context)] * batch, runner.page_size)
                layout = runner.layout_for(batch)
                blob = pack_alone(rows, layout, no_token=runner.vocab)
                start, cpu_start = time.perf_counter(), time.process_time()
                np.asarray(runner.run(layout, blob))
                if turn:  # the first turn warms up
                    wall.setdefault((batch, variant), []).append(time.perf_counter() - start)
                    cpu_time.setdefault((batch, variant), []).append(time.process_time() - cpu_start)
    print(f"CPU kernels: {native.library().missing or 'there'}")
    results = []
    for batch, variant in sorted(wall):
        seconds, spent = wall[batch, variant], statistics.median(cpu_time[batch, variant])
        low, median, high = statistics.quantiles(seconds, n=4)
        print(
            f"batch {batch:3} {variant:18} {batch / median:8.1f} tokens/s (quartiles {batch / high:.1f} to {batch / low:.1f}), "
            f"best {batch / min(seconds):.1f}; {median * 1e3:.1f} ms, CPU {spent * 1e3:.1f} ms"
        )
        results.append({"batch": batch, "variant": variant, "ms": median * 1e3, "tokens_per_s": batch / median, "cpu_ms": spent * 1e3})
    print(json.dumps({"benchmark": "decode", "context": args.context, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
