"""Log-likelihoods and log-probabilities of prompts on real weights: SmolLM2's are those of Hugging Face transformers, in float32."""

import pytest

from jaxpaged import LLM, SamplingParams
from tests.smollm2_golden import read_golden, read_scores

pytestmark = [pytest.mark.jax, pytest.mark.real]

NUM_ITEMS, NUM_TOP = 20, 5
TOLERANCE = 1e-3
"""Of a whole continuation, and of one token."""


def test_two_choice_items_have_the_log_likelihoods_of_transformers(real_llm: LLM) -> None:
    items, _ = read_scores()
    assert len(items) == NUM_ITEMS
    pairs = [(item.context, choice) for item in items for choice in item.choices]
    scores = real_llm.score([context for context, _ in pairs], [choice.text for _, choice in pairs], use_tqdm=False)
    differences = []
    for (context, choice), score in zip(pairs, scores, strict=True):
        assert score.token_ids == choice.token_ids, context
        assert score.is_greedy == choice.is_greedy, (context, choice.text)
        differences.append(abs(score.logprob - choice.logprob))
        assert differences[-1] < TOLERANCE, (context, choice, score)
    print(f"largest difference of {len(pairs)} log-likelihoods: {max(differences):.2g}")
    assert {choice.is_greedy for _, choice in pairs} == {True, False}


def test_prompts_have_the_log_probabilities_of_transformers(real_llm: LLM) -> None:
    """All at once, beside answers; the order of the likeliest ids counts where they are far enough apart."""
    golden, (_, prompts) = read_golden(), read_scores()
    ids = [golden.prompts[name].prompt_token_ids for name in prompts]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=NUM_TOP)
    outputs = real_llm.generate([*ids, *ids], [params] * len(ids) + [SamplingParams(max_tokens=2)] * len(ids), use_tqdm=False)
    largest = 0.0
    for name, token_ids, output in zip(prompts, ids, outputs, strict=False):
        expected, told = prompts[name], output.prompt_logprobs
        assert told is not None
        assert (len(told), told[0]) == (len(token_ids), None)
        rows = zip(token_ids[1:], told[1:], expected.logprobs, expected.top_ids, expected.top, strict=True)
        for own, entries, logprob, top_ids, top in rows:
            assert entries is not None
            largest = max(largest, abs(entries[own].logprob - logprob))
            for token_id, value in zip(top_ids[: NUM_TOP - 1], top, strict=False):
                if value - top[-1] > TOLERANCE:
                    largest = max(largest, abs(entries[token_id].logprob - value))
            assert largest < TOLERANCE, (name, own)
    assert all(output.prompt_logprobs is None for output in outputs[len(ids) :])
    print(f"largest difference of a log-probability: {largest:.2g}")
