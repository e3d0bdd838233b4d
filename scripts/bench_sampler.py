"""Times the sampler alone on random logits, and its parts, against the step that it is part of.

    python scripts/bench_sampler.py [--rounds 15] [--rows 32] [--no-step]

* 32 rows with temperature and top_p over 49,152 ids: under 10 % of the bfloat16 step of SmolLM2 (random weights) that decodes them.
* The same over 151,936 ids: under 15 ms.

Logits are random: peaked (top_p's mass lies in the 128 largest ids), the same but for 3 rows that are flat (an exact search finds what
they keep), and flat in all rows; then peaked ones with a temperature alone, and greedy. Rounds are interleaved; the best and the median
time are printed, and the least and the median CPU time of all threads, which other work on the machine changes less. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.batch import MAX_BANNED_IDS, SamplingRows
from jaxpaged.config import Config
from jaxpaged.host_limits import prepare_process
from jaxpaged.kept_ids import kept_by_largest, scale, search_kept
from jaxpaged.largest_logits import block_maxima, find_largest
from jaxpaged.sampling import NUM_FEW, sample
from jaxpaged.step_packer import pack_alone
from scripts.bench_step import random_model, rows_of, runner_for

SMOLLM2_VOCAB, QWEN_VOCAB = 49_152, 151_936
NUM_FLAT = {"peaked": 0, "3 rows flat": 3, "flat": None}
"""Rows of which no few ids hold the mass; None: all."""
CONTEXT = 200
STEP = "step of SmolLM2, bfloat16"


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


def random_logits(count: int, vocab: int, num_flat: int | None) -> jax.Array:
    """Normal logits: peaked but for `num_flat` rows (None: for none)."""
    normal = np.random.default_rng(0).standard_normal((count, vocab), dtype=np.float32)
    normal[num_flat if num_flat is not None else count :] *= 8
    return jnp.asarray(normal)


def compiled(work: Callable[..., Any], *args: Any) -> Callable[[], object]:
    """A call that runs `work` once and waits for it."""
    program = jax.jit(work).lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args))


def samplers(count: int, vocab: int) -> dict[str, Callable[[], object]]:
    """Calls that sample `count` rows once, case by case."""
    rows = sampling_rows(count, vocab)
    program = jax.jit(sample, static_argnames="num_ids").lower(random_logits(count, vocab, 0), rows, num_ids=vocab).compile()

    def call(logits: jax.Array, rows: SamplingRows) -> Callable[[], object]:
        return lambda: jax.block_until_ready(program(logits, rows))

    calls = {f"top_p, {name}": call(random_logits(count, vocab, num_flat), rows) for name, num_flat in NUM_FLAT.items()}
    logits = random_logits(count, vocab, 0)
    calls["temperature alone"] = call(logits, rows._replace(top_p=jnp.ones(count, jnp.float32)))
    calls["greedy"] = call(logits, rows._replace(temperature=jnp.zeros(count, jnp.float32)))
    return calls


def parts(count: int, vocab: int) -> dict[str, Callable[[], object]]:
    """Calls of the sampler's parts with temperature and top_p on peaked logits, and of the search on flat ones."""
    rows, logits = sampling_rows(count, vocab), random_logits(count, vocab, 0)
    maxima = block_maxima(logits)
    largest = find_largest(logits, maxima)
    few = min(NUM_FEW, count)
    flat, of_few = random_logits(few, vocab, None), jax.tree.map(lambda column: column[:few], rows)
    few_largest = find_largest(flat, block_maxima(flat))
    few_known = kept_by_largest(flat, few_largest, of_few, jnp.ones(few, bool))
    scaled = scale(flat, few_largest.highest, of_few.temperature)
    return {
        "part: a copy of the logits": compiled(lambda logits: logits + 0, logits),
        "part: maxima of blocks": compiled(block_maxima, logits),
        "part: the largest 128": compiled(find_largest, logits, maxima),
        "part: what they keep, and the sum over all": compiled(kept_by_largest, logits, largest, rows, jnp.ones(count, bool)),
        f"part: the search, {few} flat rows": compiled(search_kept, scaled, few_known.kept, few_known.is_known, of_few.top_k, of_few.top_p),
    }


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
    parser.add_argument("--no-step", action="store_true", help="without the step, which takes a minute to compile")
    args = parser.parse_args()
    prepare_process(Config())
    calls = {} if args.no_step else {STEP: decode_step(args.rows)}
    for vocab in (SMOLLM2_VOCAB, QWEN_VOCAB):
        for name, call in {**samplers(args.rows, vocab), **parts(args.rows, vocab)}.items():
            calls[f"{vocab}, {name}"] = call
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds + 1):
        for name, call in calls.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    best, best_cpu = ({name: min(values) * 1e3 for name, values in each.items()} for each in (seconds, cpu_seconds))
    median, median_cpu = ({name: statistics.median(values) * 1e3 for name, values in each.items()} for each in (seconds, cpu_seconds))
    print(f"{'ms':60} {'best':>8} {'median':>8} {'CPU best':>9} {'median':>8}")
    for name in calls:
        share = ""
        if STEP in calls and name.startswith(str(SMOLLM2_VOCAB)) and "part" not in name:
            shares = [100 * times[name] / times[STEP] for times in (best, median, best_cpu)]
            share = "  {:.1f} % of the step, by the medians {:.1f} %, by CPU time {:.1f} %".format(*shares)
        print(f"{name:60} {best[name]:8.2f} {median[name]:8.2f} {best_cpu[name]:9.2f} {median_cpu[name]:8.2f}{share}")
    figures = {"best_ms": best, "cpu_ms": best_cpu, "median_ms": median, "median_cpu_ms": median_cpu}
    print(json.dumps({"benchmark": "sampler", "rows": args.rows, "rounds": args.rounds, **figures}))


if __name__ == "__main__":
    main()
