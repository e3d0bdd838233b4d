"""The whole way from text to text on real weights: SmolLM2 answers as Hugging Face transformers does, in float32."""

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.request import FinishReason
from tests.equality import TIE_MARGIN
from tests.smollm2_golden import Golden, GoldenPrompt, read_golden

pytestmark = [pytest.mark.jax, pytest.mark.real]

NUM_PROMPTS, NUM_TOKENS = 20, 64


@pytest.fixture(scope="module")
def golden() -> Golden:
    return read_golden()


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first id that differs; lists of unequal length differ at the end of the shorter."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def test_prompts_have_the_ids_that_transformers_gives(real_llm: LLM, golden: Golden) -> None:
    tokenizer = real_llm.get_tokenizer()
    for prompt in golden.prompts.values():
        if isinstance(prompt.prompt, str):
            assert tokenizer.encode(prompt.prompt) == prompt.prompt_token_ids, prompt.name
        else:
            assert tokenizer.apply_chat_template(prompt.prompt, add_generation_prompt=True) == prompt.prompt_token_ids, prompt.name


def test_greedy_ids_and_text_equal_transformers(real_llm: LLM, golden: Golden) -> None:
    """All prompts at once: their prompts go in chunks beside the decodes of others, and rows come and go."""
    prompts = list(golden.prompts.values())
    assert len(prompts) == NUM_PROMPTS
    asked = [prompt.prompt if isinstance(prompt.prompt, str) else prompt.prompt_token_ids for prompt in prompts]
    outputs = real_llm.generate(asked, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
    ties = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        assert output.prompt_token_ids == prompt.prompt_token_ids, prompt.name
        assert (len(answer.token_ids), answer.finish_reason) == (NUM_TOKENS, FinishReason.LENGTH)
        at = first_difference(answer.token_ids, prompt.output_token_ids)
        if at is None:
            assert answer.text == prompt.output_text
        else:
            assert prompt.margins[at] < TIE_MARGIN, (
                f"{prompt.name}: token {at} is {answer.token_ids[at]} instead of {prompt.output_token_ids[at]}"
                f" with a margin of {prompt.margins[at]}"
            )
            ties.append((prompt.name, at, prompt.margins[at]))
    num_tokens = NUM_PROMPTS * NUM_TOKENS
    print(f"{num_tokens} tokens, {len(ties)} ties: {ties}")
    assert len(ties) * 10_000 <= num_tokens, ties


def test_chat_answers_as_transformers_does(real_llm: LLM, golden: Golden) -> None:
    """Up to the end token, which stops it and is not shown."""
    prompt = golden.prompts["chat"]
    assert not isinstance(prompt.prompt, str)
    (output,) = real_llm.chat(prompt.prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    (answer,) = output.outputs
    length = prompt.output_token_ids.index(2) + 1
    assert (answer.token_ids, answer.finish_reason) == (prompt.output_token_ids[:length], FinishReason.STOP)
    assert answer.text == "The capital of Japan is Tokyo."


def surest_beginning(golden: Golden, num_tokens: int) -> GoldenPrompt:
    """The prompt whose first tokens have the widest margins."""
    return max(golden.prompts.values(), key=lambda prompt: min(prompt.margins[:num_tokens]))


def test_o14_very_small_temperatures_are_greedy(real_llm: LLM, golden: Golden) -> None:
    """At 0.001 a margin of 0.1 leaves the second choice a probability of exp(-100)."""
    prompt = surest_beginning(golden, 16)
    assert min(prompt.margins[:16]) > 0.1
    temperatures = (0.0, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
    params = [SamplingParams(temperature=value, seed=7, max_tokens=16, ignore_eos=True) for value in temperatures]
    outputs = real_llm.generate([prompt.prompt_token_ids] * len(params), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [prompt.output_token_ids[:16]] * len(params)


def test_o14_unset_temperature_is_the_documented_default(real_llm: LLM, golden: Golden) -> None:
    """The file brings no sampling values, so the default is 1; and a temperature between draws real tokens."""
    prompt = golden.prompts["story"]
    temperatures = (None, 1.0, 0.01, 0.1)
    params = [SamplingParams(temperature=value, seed=7, max_tokens=16, ignore_eos=True) for value in temperatures]
    outputs = real_llm.generate([prompt.prompt_token_ids] * len(params), params, use_tqdm=False)
    unset, one, *small = [output.outputs[0].token_ids for output in outputs]
    assert unset == one != prompt.output_token_ids[:16]
    assert all(len(ids) == 16 and len(set(ids)) > 8 for ids in small)
