"""Times engine steps of SmolLM2's shape (random weights) with and without log-probabilities of prompts in their programs.

    python scripts/bench_prompt_logprobs.py [--rounds 15] [--dtype float32]

* Nobody asks: 32 decodes, and a prompt of 512 tokens, by programs that could tell and by programs that could not: no difference.
* All 512 tokens of the prompt are told, alone and with the 20 likeliest: what a token costs.

Rounds are interleaved and medians printed, of time and of CPU time (which other work on the machine changes less), with the memory that the
larger program needs beside its arguments; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from unittest import mock

import jax.numpy as jnp
import msgspec
import numpy as np
from bench_step import random_model, rows_of, runner_for

from jaxpaged.model_runner import ModelRunner
from jaxpaged.scheduler import ScheduledRow
from jaxpaged.step_packer import pack_alone

BUCKETS, NUM_ROWS = (32, 512), 32


def tells_nothing(*_: object) -> jax.Array:
    """Stands for `prompt_logprobs` in programs without it."""
    return jnp.zeros((0, 42), jnp.int32)


def asking(num_top: int | None, spans: list[tuple[int, int]], page_size: int) -> list[ScheduledRow]:
    """Rows of `bench_step`, whose prompts are told with that many likeliest ids."""
    rows = rows_of(spans, page_size)
    if num_top is not None:
        for row in rows:
            row.sequence.first_unscored = 1
            request = row.sequence.request
            params = msgspec.structs.replace(request.params, prompt_logprobs=num_top)
            row.sequence.request = msgspec.structs.replace(request, params=params)
    return rows


def scratch_bytes(runner: ModelRunner) -> int:
    """Memory of the largest program beside its arguments and results."""
    analysis = runner.programs[runner.layouts[-1]].memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    model = random_model(args.dtype)
    able = runner_for(model, BUCKETS, NUM_ROWS)
    with mock.patch("jaxpaged.step_program.prompt_logprobs", tells_nothing):
        unable = runner_for(model, BUCKETS, NUM_ROWS)
    decodes, prompt = [(1, 100 + 7 * index) for index in range(NUM_ROWS)], [(512, 512)]
    steps = {
        "32 decodes, not in the program": (unable, None, decodes),
        "32 decodes, nobody asks": (able, None, decodes),
        "512 prompt tokens, not in the program": (unable, None, prompt),
        "512 prompt tokens, nobody asks": (able, None, prompt),
        "512 prompt tokens, told": (able, 0, prompt),
        "512 prompt tokens, told with 20": (able, 20, prompt),
    }
    walls: dict[str, list[float]] = {name: [] for name in steps}
    cpus: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 1):
        for name, (runner, num_top, spans) in steps.items():
            rows = asking(num_top, spans, runner.page_size)
            layout = runner.layout_for(sum(row.num_tokens for row in rows))
            blob = pack_alone(rows, layout, no_token=runner.vocab)
            wall, cpu = time.perf_counter(), time.process_time()
            np.asarray(runner.run(layout, blob))
            if turn:  # the first turn warms up
                walls[name].append(time.perf_counter() - wall)
                cpus[name].append(time.process_time() - cpu)
    ms = {name: [1e3 * statistics.median(times[name]) for times in (walls, cpus)] for name in steps}
    for name, (wall, cpu) in ms.items():
        print(f"{name:40} {wall:8.1f} ms, {cpu:8.1f} ms of CPU time ({min(cpus[name]) * 1e3:.1f} to {max(cpus[name]) * 1e3:.1f})")
    ratios = {}
    for what in ("32 decodes", "512 prompt tokens"):
        pairs = zip(cpus[f"{what}, nobody asks"], cpus[f"{what}, not in the program"], strict=True)
        ratios[what] = statistics.median(one / other for one, other in pairs)
        print(f"{what}: nobody asks over not in the program, CPU time: {ratios[what]:.3f} (about 1)")
    nobody = ms["512 prompt tokens, nobody asks"][1]
    per_token = {name: (ms[f"512 prompt tokens, {name}"][1] - nobody) / 511 for name in ("told", "told with 20")}
    print(f"a token costs {per_token['told']:.3f} ms of CPU time, with the 20 likeliest {per_token['told with 20']:.3f} ms")
    scratch = {"able": scratch_bytes(able), "unable": scratch_bytes(unable)}
    print(f"memory beside arguments: {scratch['able'] / 2**20:.1f} MiB, without {scratch['unable'] / 2**20:.1f} MiB")
    record = {"benchmark": "prompt_logprobs", "dtype": args.dtype, "rounds": args.rounds, "ratios": ratios, "cpu_ms_per_token": per_token}
    print(json.dumps(record | {"scratch_bytes": scratch, "wall_and_cpu_ms": ms}))


if __name__ == "__main__":
    main()
