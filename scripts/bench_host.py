"""Times the host's work between two device steps of a batch that decodes, in CPU time of the engine's thread.

    python scripts/bench_host.py [--seqs 32] [--steps 1000] [--context 1000] [--max-model-len 8192]

Two engines decode the same requests (sampled, text streamed token by token, no stop strings): one over a runner that answers at
once, which gives the work of each part, and one over a real, tiny model, which adds what jax takes to dispatch the compiled step.
Medians over the steps. Two totals are printed next to the goal, 1 ms for 32 sequences:

    composed     the whole step over the instant runner, less its own `run`, plus `dispatch` over the tiny model: what the engine
                 does, and what jax takes to hand the step over
    tiny model   the whole step over the tiny model, as measured: in it are also the wait for its ids, as far as that takes CPU time,
                 and whatever the model's own threads do to caches

The last line is JSON; `total_ms` is the composed one.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged import events
from jaxpaged.batch import BatchLayout
from jaxpaged.config import MIB, CacheConfig, CompilationConfig, Config, SchedulerConfig
from jaxpaged.engine import Clocks, Engine
from jaxpaged.intake import Intake
from jaxpaged.kv_groups import FULL
from jaxpaged.loading.model_config import settle
from jaxpaged.model_runner import ModelRunner
from jaxpaged.model_structure import make_structure
from jaxpaged.models import llama
from jaxpaged.request import RequestOutputKind, SamplingParams
from jaxpaged.settings import StepLimits, decide_limits
from jaxpaged.slot_rows import SlotRow
from jaxpaged.step_program import LoadedModel
from jaxpaged.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level

PARTS = ("schedule", "pack", "update", "detokenize")


class InstantRunner:
    """A device whose answer is there when it is asked: every row says the next letter."""

    def __init__(self, limits: StepLimits, *, page_size: int, num_pages: int, vocab: int) -> None:
        self.limits, self.page_size, self.num_pages, self.vocab = limits, page_size, num_pages, vocab
        self.kv_groups = (FULL,)
        self._num_steps = 0
        max_pages = -(-limits.max_model_len // page_size)
        self._layouts = {
            bucket: BatchLayout(bucket, limits.rows_of(bucket), max_pages, page_size, num_pages, limits.max_num_seqs)
            for bucket in limits.token_buckets
        }

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """See `Runner`."""
        return self._layouts[self.limits.bucket_for(num_tokens)]

    def run(self, layout: BatchLayout, blob: np.ndarray) -> np.ndarray:
        """See `Runner`."""
        self._num_steps += 1
        return np.full(layout.num_seqs, ord("a") + 3 + self._num_steps % 26, np.int32)

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """See `Runner`."""

    def close(self) -> None:
        """See `Runner`."""


class StepSink:
    """Keeps the events of steps and lets go of all others."""

    def __init__(self) -> None:
        self.steps: list[events.StepFinished] = []

    def __call__(self, event: events.Event, /) -> None:
        """See `events.Sink`."""
        if type(event) is events.StepFinished:
            self.steps.append(event)

    def close(self) -> None:
        """See `events.Sink`."""


def limits_for(seqs: int, max_model_len: int) -> StepLimits:
    """Buckets for a prompt and for decoding."""
    config = Config(
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=max(512, 2 * seqs)),
        compilation=CompilationConfig(token_buckets=(seqs, max(512, 2 * seqs))),
    )
    return decide_limits(config, is_gpu=False, model_max_len=max_model_len)


def tiny_runner(limits: StepLimits, tokenizer: Tokenizer) -> ModelRunner:
    """A model so small that its step is nearly all dispatch."""
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": limits.max_model_len,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    config = llama.Config.from_hf(settle(hf, "the benchmark"), np.dtype(np.float32), limits.max_model_len)
    structure = make_structure(llama, config)
    model = LoadedModel.of(structure, tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in structure.expected.values()))
    return ModelRunner(model, limits=limits, cache=CacheConfig(memory=512 * MIB), num_ids=tokenizer.vocab_size, max_parallel=2)


def most_output_tokens(*, seqs: int, steps: int, context: int) -> int:
    """Enough for the first request to be there still when the last prompt is done, and `steps` later."""
    return steps + 100 + seqs * context // max(256, seqs)


def measure(runner: Any, tokenizer: Tokenizer, *, seqs: int, steps: int, context: int) -> dict[str, float]:
    """Median milliseconds of engine-thread CPU time of each part of a step, and of the whole of it."""
    sink = StepSink()
    engine = Engine(runner, tokenizer, max_in_flight=2, sink=sink, clocks=Clocks(monotonic=time.thread_time))
    intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset(), vocab=runner.vocab, seed=0)
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        ignore_eos=True,
        max_tokens=most_output_tokens(seqs=seqs, steps=steps, context=context),
        output_kind=RequestOutputKind.DELTA,
    )
    for index in range(seqs):
        engine.add(intake.request([3 + index, *[40 + index] * (context - 1)], params, arrival_s=0.0))
    while not sink.steps or sink.steps[-1].num_decode_tokens < seqs:
        engine.step()
    sink.steps.clear()
    whole, run = [], []
    started_run = runner.run

    def timed_run(layout: BatchLayout, blob: np.ndarray) -> Any:
        begun = time.thread_time()
        ids = started_run(layout, blob)
        run.append(time.thread_time() - begun)
        return ids

    runner.run = timed_run
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        begun = time.thread_time()
        outputs = engine.step()
        whole.append(time.thread_time() - begun)
        assert len(outputs) == seqs
    assert {step.num_decode_tokens for step in sink.steps} == {seqs}
    figures = {part: statistics.median(getattr(step, f"{part}_s") for step in sink.steps) for part in PARTS}
    figures |= {"dispatch": statistics.median(run), "whole step": statistics.median(whole)}
    figures["95th percentile"] = sorted(whole)[int(len(whole) * 0.95)]
    return {name: seconds * 1e3 for name, seconds in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    tokenizer = byte_level()
    limits = limits_for(args.seqs, args.max_model_len)
    sizes = {"seqs": args.seqs, "steps": args.steps, "context": args.context}
    num_tokens = args.context + most_output_tokens(**sizes)
    if num_tokens > args.max_model_len:
        parser.error(f"prompts and answers take {num_tokens} tokens, more than --max-model-len")
    num_pages = args.seqs * -(-num_tokens // 16) + 64
    runners = {
        "instant": InstantRunner(limits, page_size=16, num_pages=num_pages, vocab=tokenizer.vocab_size),
        "tiny model": tiny_runner(limits, tokenizer),
    }
    figures = {name: measure(runner, tokenizer, **sizes) for name, runner in runners.items()}
    print(f"{'ms of CPU time':18}" + "".join(f"{name:>14}" for name in figures))
    for part in figures["instant"]:
        print(f"{part:18}" + "".join(f"{own[part]:14.3f}" for own in figures.values()))
    total = figures["instant"]["whole step"] - figures["instant"]["dispatch"] + figures["tiny model"]["dispatch"]
    whole = figures["tiny model"]["whole step"]
    print(
        f"host work between two steps, dispatch included: composed {total:.3f} ms, tiny model {whole:.3f} ms (goal for 32 sequences: 1 ms)"
    )
    print(json.dumps({"benchmark": "host", **vars(args), "total_ms": total, "tiny_model_ms": whole, "ms": figures}))


if __name__ == "__main__":
    main()
