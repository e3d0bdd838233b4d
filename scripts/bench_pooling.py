"""Times what embeddings add to a step: when nobody asks for one, and when all rows do.

    python scripts/bench_pooling.py [--rounds 400]

Each case is a program that takes a step's blob and its hidden states, with and without the sums. Rounds are interleaved and medians
printed, in microseconds; the last line is JSON.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.batch import BatchLayout, unpack
from jaxpaged.pooling import keep_sums, pool_rows

CASES = ((32, 576, "float32"), (512, 576, "float32"), (512, 2048, "bfloat16"), (512, 4096, "bfloat16"))
"""Tokens, width, type."""
NUM_ROWS = 32


def blob_of(layout: BatchLayout, *, asks: bool) -> np.ndarray:
    """A step of 32 rows of equal lengths."""
    length = layout.num_tokens // NUM_ROWS
    firsts = np.arange(NUM_ROWS + 1) * length
    values = {
        "cu_q_lens": firsts,
        "kv_lens": length,
        "pool_starts": firsts[:-1] if asks else layout.num_tokens,
        "pool_slots": np.arange(NUM_ROWS) if asks else layout.num_slots,
    }
    parts = [np.broadcast_to(np.asarray(values.get(name, 0), np.int32), shape).ravel() for name, shape in layout.fields]
    return np.concatenate(parts)


def measure(num_tokens: int, embed: int, dtype: str, rounds: int) -> dict[str, float]:
    """Microseconds of the program without sums, and with them when nobody asks and when all do."""
    layout = BatchLayout(num_tokens, NUM_ROWS, 64, 16, 729, NUM_ROWS)

    def without(hidden: Any, kept: Any, blob: Any) -> Any:
        return unpack(blob, layout).kv_lens + 1, kept, hidden

    def with_sums(hidden: Any, kept: Any, blob: Any) -> Any:
        batch = unpack(blob, layout)
        pooled = pool_rows(hidden, batch, kept)
        return batch.kv_lens + 1, pooled, keep_sums(kept, batch, pooled), hidden

    runs = {
        "without": (jax.jit(without, donate_argnums=(0, 1)), blob_of(layout, asks=False)),
        "nobody asks": (jax.jit(with_sums, donate_argnums=(0, 1)), blob_of(layout, asks=False)),
        "all ask": (jax.jit(with_sums, donate_argnums=(0, 1)), blob_of(layout, asks=True)),
    }
    states = {name: (jnp.ones((num_tokens, embed), dtype), jnp.zeros((NUM_ROWS, embed), jnp.float32)) for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, (run, blob) in runs.items():
            begun = time.perf_counter()
            *_, kept, hidden = jax.block_until_ready(run(*states[name], blob))
            seconds[name].append(time.perf_counter() - begun)
            states[name] = hidden, kept
    return {name: round(1e6 * statistics.median(values[1:]), 1) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    figures = {}
    for num_tokens, embed, dtype in CASES:
        name = f"{num_tokens} tokens x {embed}, {dtype}"
        figures[name] = measure(num_tokens, embed, dtype, args.rounds)
        print(f"{name:32}", "  ".join(f"{kind} {value:8.1f}" for kind, value in figures[name].items()), "us", flush=True)
    print(json.dumps({"benchmark": "pooling", "rounds": args.rounds, "us": figures}))


if __name__ == "__main__":
    main()
