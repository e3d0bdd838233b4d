"""What quantization costs in quality: perplexity of a fixed text, and how often the likeliest next token is the same.

    python scripts/quality_quantized.py [--model smollm2-135m] [--quantizations int8,int4] [--dtype float32]

The text, scripts/quality_text.txt, is the beginning of two old novels (Carroll 1865, Austen 1813), cut into parts that are computed one by
one. Of each token after a part's first, the log-probability and the likeliest token are asked for, so both models see the same history
everywhere. Answers of 32 greedy tokens to the first 64 of each part are compared as well, up to where they part. Last comes a
line of JSON for each quantization.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import MIB

TEXT = Path(__file__).parent / "quality_text.txt"
PART_TOKENS, HISTORY_TOKENS, ANSWER_TOKENS = 384, 64, 32


class Seen(NamedTuple):
    """What a model says of the text."""

    logprobs: list[float]
    likeliest: list[int]
    answers: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def read(model: str, dtype: str, quantization: str | None) -> Seen:
    """Runs one model over the text."""
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=PART_TOKENS + ANSWER_TOKENS,
        max_num_batched_tokens=PART_TOKENS,
        max_num_seqs=8,
        compilation={"token_buckets": (8, PART_TOKENS)},
        cache={"memory": 256 * MIB},
    ) as llm:
        token_ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
        parts = [token_ids[start : start + PART_TOKENS] for start in range(0, len(token_ids), PART_TOKENS)]
        scored = llm.generate(
            [{"prompt_token_ids": part} for part in parts], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        )
        logprobs, likeliest = [], []
        for part, output in zip(parts, scored, strict=True):
            assert output.prompt_logprobs is not None
            for token_id, told in zip(part, output.prompt_logprobs, strict=True):
                if told is not None:  # nothing comes before a part's first token
                    logprobs.append(told[token_id].logprob)
                    likeliest.append(max(told, key=lambda candidate: told[candidate].logprob))
        histories = [{"prompt_token_ids": part[:HISTORY_TOKENS]} for part in parts]
        answered = llm.generate(histories, SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True))
        return Seen(logprobs, likeliest, [list(output.outputs[0].token_ids) for output in answered])


def num_equal(one: list[int], other: list[int]) -> int:
    """Tokens before two answers part."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def compare(whole: Seen, quantized: Seen) -> dict[str, float]:
    """What a quantization cost."""
    return {
        "num_tokens": len(whole.logprobs),
        "perplexity_float32": whole.perplexity,
        "perplexity": quantized.perplexity,
        "ratio": quantized.perplexity / whole.perplexity,
        "share_equal_likeliest": sum(a == b for a, b in zip(whole.likeliest, quantized.likeliest, strict=True)) / len(whole.likeliest),
        "mean_tokens_before_answers_part": sum(map(num_equal, whole.answers, quantized.answers)) / len(whole.answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantizations", default="int8,int4")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    whole = read(args.model, "float32", None)
    lines = []
    for quantization in args.quantizations.split(","):
        costs = compare(whole, read(args.model, args.dtype, quantization))
        print(
            f"{quantization}: perplexity over {costs['num_tokens']} tokens {costs['perplexity']:.3f}, in float32 "
            f"{costs['perplexity_float32']:.3f} ({costs['ratio'] - 1:+.2%}; within 2 %: {'yes' if costs['ratio'] < 1.02 else 'NO'}); "
            f"likeliest token the same: {costs['share_equal_likeliest']:.1%}"
        )
        record = {"benchmark": "quality_quantized", "model": args.model, "dtype": args.dtype, "quantization": quantization}
        lines.append(json.dumps(record | costs))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
