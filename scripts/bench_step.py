"""Times single engine steps of SmolLM2's shape (random weights) and prints the ratios that the design promises.

    python scripts/bench_step.py [--rounds 9] [--dtype float32]

* 15 decodes beside 497 prompt tokens against a prompt of 512 tokens: at most 1.6 times.
* A step of 2 tokens with `max_num_seqs` 4, 32 and 256: no difference.

Rounds are interleaved and medians printed; the last line is JSON.
"""

import argparse
import json
import statistics
import time

import jax.numpy as jnp
import numpy as np

from jaxpaged.config import MIB, CacheConfig, CompilationConfig, Config, SchedulerConfig
from jaxpaged.loading.model_config import settle
from jaxpaged.loading.quantize_weights import quantize_weights
from jaxpaged.model_loader import DTYPES
from jaxpaged.model_runner import ModelRunner
from jaxpaged.model_structure import make_structure
from jaxpaged.models import llama
from jaxpaged.request import Request, SamplingParams
from jaxpaged.scheduler import ScheduledRow
from jaxpaged.sequence import Sequence
from jaxpaged.settings import decide_limits
from jaxpaged.step_packer import pack_alone
from jaxpaged.step_program import LoadedModel

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}
"""Its config.json."""
CONTEXT = 2048


def random_model(dtype: str, quantization: str | None = None) -> LoadedModel:
    """SmolLM2-135M's architecture with random weights."""
    config = llama.Config.from_hf(settle(SMOLLM2, "the benchmark"), DTYPES[dtype], CONTEXT)
    structure = make_structure(llama, config)
    rng = np.random.default_rng(0)
    arrays = {
        path: (rng.standard_normal(leaf.shape, dtype=np.float32) * 0.02).astype(leaf.dtype) for path, leaf in structure.expected.items()
    }
    if quantization is not None:
        structure = make_structure(llama, config, quantization)
        arrays = quantize_weights(arrays, structure.expected)
    return LoadedModel.of(structure, tuple(map(jnp.asarray, arrays.values())))


def runner_for(model: LoadedModel, buckets: tuple[int, ...], max_num_seqs: int) -> ModelRunner:
    """A runner with few buckets and a pool of 256 MiB; a step that could hold every sequence is among its programs."""
    budget = max(buckets[-1], max_num_seqs)
    config = Config(
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        compilation=CompilationConfig(token_buckets=tuple(sorted({*buckets, budget}))),
    )
    limits = decide_limits(config, is_gpu=False, model_max_len=CONTEXT)
    return ModelRunner(model, limits=limits, cache=CacheConfig(memory=256 * MIB), num_ids=model.facts.vocab, max_parallel=2)


def rows_of(spans: list[tuple[int, int]], page_size: int) -> list[ScheduledRow]:
    """Rows of (tokens in this step, tokens in all) with pages of their own."""
    rows, next_page = [], 1
    for index, (num_tokens, total) in enumerate(spans):
        params = SamplingParams(temperature=0.0)
        request = Request(request_id=str(index), prompt_token_ids=[7] * total, params=params, seed=0, arrival_s=0.0)
        sequence = Sequence(request)
        num_pages = -(-total // page_size)
        sequence.tables = (list(range(next_page, next_page + num_pages)),)
        next_page += num_pages
        rows.append(ScheduledRow(sequence, num_tokens, total - num_tokens, True, slot=index, takes_from_slot=False, epoch=0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    model = random_model(args.dtype)
    wide = runner_for(model, (512,), 32)
    narrow = {seqs: runner_for(model, (2, 256), seqs) for seqs in (4, 32, 256)}
    steps = {
        "512 prompt tokens": (wide, [(512, 512)]),
        "15 decodes + 497 prompt tokens": (wide, [*((1, 271 + 13 * i) for i in range(15)), (497, 497)]),
        **{f"2 tokens, max_num_seqs {seqs}": (runner, [(1, 200), (1, 200)]) for seqs, runner in narrow.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 1):
        for name, (runner, spans) in steps.items():
            rows = rows_of(spans, runner.page_size)
            layout = runner.layout_for(sum(row.num_tokens for row in rows))
            blob = pack_alone(rows, layout, no_token=runner.vocab)
            start = time.perf_counter()
            np.asarray(runner.run(layout, blob))
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(f"{name:32} {median * 1e3:8.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})")
    pairs = zip(seconds["15 decodes + 497 prompt tokens"], seconds["512 prompt tokens"], strict=True)
    mixed = statistics.median(a / b for a, b in pairs)
    rows_ratio = medians["2 tokens, max_num_seqs 256"] / medians["2 tokens, max_num_seqs 4"]
    print(f"mixed step over prompt step: {mixed:.2f} (at most 1.6); 256 rows allowed over 4: {rows_ratio:.2f} (about 1)")
    record = {"benchmark": "step", "dtype": args.dtype, "rounds": args.rounds, "mixed_ratio": mixed, "rows_ratio": rows_ratio}
    print(json.dumps(record | {"ms": {name: median * 1e3 for name, median in medians.items()}}))


if __name__ == "__main__":
    main()
