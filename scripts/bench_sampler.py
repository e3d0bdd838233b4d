"""Times the sampler alone on random logits against the step that it is part of.

    python scripts/bench_sampler.py [--rounds 15] [--rows 32]

* 32 rows with temperature and top_p over 49,152 ids: under 10 % of the bfloat16 step of SmolLM2 (random weights) that decodes them.
* The same over 151,936 ids: under 15 ms.

Logits are random: peaked (top_p's mass lies in the 128 largest ids), the same but for 3 rows that are flat (an exact search finds what
they keep), and flat in all rows. Rounds are interleaved; the best and the median time are printed, and the least CPU time of all threads,
which other work on the machine changes less. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.batch import MAX_BANNED_IDS, SamplingRows
from jaxpaged.sampling import sample
from jaxpaged.step_packer import pack_alone
from scripts.bench_step import random_model, rows_of, runner_for

SMOLLM2_VOCAB, QWEN_VOCAB = 49_152, 151_936
NUM_FLAT = {"peaked": 0, "3 rows flat": 3, "flat": None}
"""Rows of which no few ids hold the mass; None: all."""
CONTEXT = 200


def sampling_rows(count: int, vocab: int) -> SamplingRows:
    """Every row sampled, with a temperature and a top_p of its own."""
    one = np.ones(count, np.float32)
    return jax.tree.map(
        jnp.asarray,
        SamplingRows(
            temperature=np.linspace(0.7, 1.0, count, dtype=np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.linspace(0.8, 0.95, count, dtype=np.float32),
            min_p=0 * one,
            presence_penalty=0 * one,
            frequency_penalty=0 * one,
            repetition_penalty=one,
            has_bias=np.zeros(count, np.int32),
            num_logprobs=np.full(count, -1, np.int32),
            seed=np.arange(2 * count, dtype=np.uint32).reshape(count, 2),
            position=np.full(count, CONTEXT, np.int32),
            banned_ids=np.full((count, MAX_BANNED_IDS), vocab, np.int32),
        ),
    )


def sampler(count: int, vocab: int, num_flat: int | None) -> Callable[[], object]:
    """A call that samples `count` rows once."""
    normal = np.random.default_rng(0).standard_normal((count, vocab), dtype=np.float32)
    normal[num_flat if num_flat is not None else count :] *= 8
    logits = jnp.asarray(normal)
    rows = sampling_rows(count, vocab)
    compiled = jax.jit(sample, static_argnames="num_ids").lower(logits, rows, num_ids=vocab).compile()
    return lambda: np.asarray(compiled(logits, rows))


def decode_step(count: int) -> Callable[[], object]:
    """A call that runs one greedy bfloat16 step of SmolLM2 with `count` rows of one token."""
    runner = runner_for(random_model("bfloat16"), (count,), count)
    rows = rows_of([(1, CONTEXT)] * count, runner.page_size)
    layout = runner.layout_for(count)
    return lambda: np.asarray(runner.run(layout, pack_alone(rows, layout, no_token=runner.vocab)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    calls = {"step of SmolLM2, bfloat16": decode_step(args.rows)}
    for vocab in (SMOLLM2_VOCAB, QWEN_VOCAB):
        for name, num_flat in NUM_FLAT.items():
            calls[f"sampler, {vocab} ids, {name}"] = sampler(args.rows, vocab, num_flat)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds + 1):
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    best = {name: min(values) * 1e3 for name, values in seconds.items()}
    best_cpu = {name: min(values) * 1e3 for name, values in cpu_seconds.items()}
    median = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    step = next(iter(calls))
    for name in calls:
        shares = [100 * times[name] / times[step] for times in (best, median, best_cpu)]
        share = "  {:.1f} % of the step, by the medians {:.1f} %, by CPU time {:.1f} %".format(*shares)
        if str(SMOLLM2_VOCAB) not in name:
            share = ""
        print(f"{name:34} best {best[name]:7.2f} ms, median {median[name]:7.2f} ms, CPU {best_cpu[name]:7.2f} ms{share}")
    print(
        json.dumps(
            {"benchmark": "sampler", "rows": args.rows, "rounds": args.rounds, "best_ms": best, "cpu_ms": best_cpu, "median_ms": median}
        )
    )


if __name__ == "__main__":
    main()
