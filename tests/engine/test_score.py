"""`score`: log-likelihoods of given continuations, against logits that were computed apart."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ContextLengthError, InvalidRequestError, RequestFailedError
from jaxpaged.llm import LLM
from jaxpaged.programs import COMPILE_EVENT
from jaxpaged.request import RequestOutputKind, SamplingParams
from jaxpaged.scoring import ContinuationScore, score_of
from tests.equality import Oracle
from tests.tiny_engine import tiny_config

pytestmark = pytest.mark.jax

CONTEXT = [9 + (17 * index) % 200 for index in range(34)]
ENDINGS = [[40, 41, 42], [7], [50, 60, 70, 80, 90, 100, 110, 120]]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, programs: Path) -> Iterator[LLM]:
    with LLM(config=tiny_config(tiny_folder, programs=programs), sinks=[]) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> Oracle:
    return Oracle(llm.engine.runner, max_tokens=64)


def check(score: ContinuationScore, oracle: Oracle, context: list[int], ending: list[int]) -> None:
    """The sum in float64, and whether each token is the first of the likeliest ones."""
    assert (score.token_ids, score.num_prompt_tokens) == (ending, len(context))
    expected, is_greedy = [], True
    for index, token_id in enumerate(ending):
        logits = oracle.logits(context + ending[:index]).astype(np.float64)
        expected.append(logits[token_id] - logits.max() - math.log(np.exp(logits - logits.max()).sum()))
        is_greedy &= int(np.argmax(logits)) == token_id
    assert score.token_logprobs == pytest.approx(expected, abs=1e-5)
    assert abs(score.logprob - sum(expected)) < 1e-4
    assert score.is_greedy == is_greedy


def test_scores_equal_what_the_model_says_and_share_the_pages_of_their_prompt(llm: LLM, oracle: Oracle) -> None:
    llm.reset_prefix_cache()
    for turn in range(2):
        scores = llm.score(CONTEXT, ENDINGS, use_tqdm=False)
        for score, ending in zip(scores, ENDINGS, strict=True):
            check(score, oracle, CONTEXT, ending)
        # The first time the others wait for the one that computes what they share.
        assert [score.num_cached_tokens for score in scores] == [32 * turn, 32, 32]
    alone = [llm.score([CONTEXT], [ending], use_tqdm=False)[0] for ending in ENDINGS]
    assert [score.logprob for score in alone] == pytest.approx([score.logprob for score in scores], abs=1e-5)


def test_the_greedy_continuation_is_known_as_such(llm: LLM, oracle: Oracle) -> None:
    (output,) = llm.generate([CONTEXT], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    greedy = output.outputs[0].token_ids
    beside = [*greedy[:5], (greedy[5] + 1) % 250]
    one, other = llm.score(CONTEXT, [greedy, beside], use_tqdm=False)
    check(one, oracle, CONTEXT, greedy)
    check(other, oracle, CONTEXT, beside)
    assert (one.is_greedy, other.is_greedy) == (True, False)


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [("The quick brown", " fox jumps"), ("The quick brown ", "fox jumps"), ("def add(a,  ", "b):"), (" ", "x y")],
)
def test_texts_are_tokenized_as_one(llm: LLM, oracle: Oracle, prompt: str, continuation: str) -> None:
    """Spaces between them belong to the continuation, wherever they were given; a prompt of spaces alone keeps them."""
    whole = llm.get_tokenizer().encode(prompt + continuation)
    first = len(llm.get_tokenizer().encode(prompt.rstrip() or prompt))
    (score,) = llm.score(prompt, continuation, use_tqdm=False)
    check(score, oracle, whole[:first], whole[first:])
    (by_ids,) = llm.score({"prompt_token_ids": whole[:first], "cache_salt": "x"}, [whole[first:]], use_tqdm=False)
    assert by_ids.logprob == pytest.approx(score.logprob, abs=1e-5)
    (mixed,) = llm.score([whole[:first]], llm.get_tokenizer().decode(whole[first:]), use_tqdm=False)
    assert mixed.token_ids[0] == whole[first]


def test_several_threads_and_events_loops_get_the_same(async_llm: AsyncLLM, llm: LLM) -> None:
    async def both() -> list[ContinuationScore]:
        answer = async_llm.generate(CONTEXT, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        scores = asyncio.gather(*(async_llm.score(CONTEXT, ending) for ending in ENDINGS))
        assert len((await answer).outputs[0].token_ids) == 8
        return await scores

    expected = llm.score(CONTEXT, ENDINGS, use_tqdm=False)
    for got, score in zip(asyncio.run(both()), expected, strict=True):
        assert got.token_logprobs == pytest.approx(score.token_logprobs, abs=1e-5)
        assert (got.token_ids, got.is_greedy) == (score.token_ids, score.is_greedy)


@pytest.mark.parametrize(
    ("prompts", "continuations", "part"),
    [
        ("", "x", "The prompt has no token"),
        ([[]], [[5]], "The prompt has no token"),
        ("a", "", "The continuation has no token"),
        (["a", "b"], ["c", "d", "e"], "3 continuations for 2 prompts"),
        ([[5]], [[5, 9999]], "integers from 0 to 383"),
        (["a", "b"], ["c", ""], "prompt 1: The continuation has no token"),
    ],
)
def test_what_cannot_be_scored(llm: LLM, prompts: Any, continuations: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        llm.score(prompts, continuations, use_tqdm=False)
    with pytest.raises(ContextLengthError):
        llm.score([[5] * 500], [[6] * 12], use_tqdm=False)
    assert llm.engine.num_unfinished == 0


def test_a_request_that_ended_early_has_no_score(llm: LLM) -> None:
    request = llm._intake.scoring_request(CONTEXT, ENDINGS[0], arrival_s=0.0)
    llm.engine.add(request)
    output = llm.engine.abort(request.request_id)
    with pytest.raises(RequestFailedError, match="aborted"):
        score_of(output)


EVERY_KIND: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "top k": {"temperature": 1.0, "top_k": 5},
    "top k by search": {"temperature": 1.0, "top_k": 200},
    "top p": {"temperature": 1.0, "top_p": 0.5},
    "top p by search": {"temperature": 50.0, "top_p": 0.99},
    "min p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {5: 1.0}},
    "allowed": {"allowed_token_ids": [5, 6, 7]},
    "bad words": {"bad_words": ["the", "quick brown"]},
    "least length": {"min_tokens": 3, "stop_token_ids": [9]},
    "stop strings": {"stop": ["zq"]},
    "samples": {"n": 3, "temperature": 1.0},
    "log-probabilities": {"logprobs": 20},
    "prompt": {"prompt_logprobs": 20},
    "both": {"logprobs": 2, "prompt_logprobs": 0, "temperature": 1.0},
    "prompt alone": {"prompt_logprobs": 5, "max_tokens": 0},
    "no text": {"detokenize": False},
}


def test_no_kind_of_request_compiles_anything(llm: LLM) -> None:
    """After ready the backend compiles nothing more, on any thread, small eager operations included."""
    # What other tests have compiled on the way must not hide what an engine would.
    jax.clear_caches()
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            compiled.append(kind)

    prompt = [5 + index % 200 for index in range(70)]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        params = {kind: SamplingParams(**{"max_tokens": 5, "temperature": 0.0} | fields) for kind, fields in EVERY_KIND.items()}
        for name, own in params.items():
            kind = name
            llm.generate([prompt], own, use_tqdm=False)
        kind = "all together"
        llm.generate([[*prompt[index:], index] for index in range(len(params))], list(params.values()), use_tqdm=False, priority=1)
        kind = "streamed"
        for own in params.values():
            assert list(llm.stream(prompt, msgspec.structs.replace(own, output_kind=RequestOutputKind.DELTA)))
        kind = "chat, score, cache"
        llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=3), use_tqdm=False)
        llm.score(prompt, ENDINGS, use_tqdm=False)
        llm.reset_prefix_cache()
        assert compiled == []
        kind = "control"
        jax.numpy.arange(7).sum().block_until_ready()
        assert compiled, "the test does not see compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
