"""What an engine tells in each `logprobs_mode`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.config import LogprobsMode
from jaxpaged.errors import InvalidRequestError
from jaxpaged.llm import LLM
from jaxpaged.request import LOWEST_LOGPROB, SamplingParams
from tests.equality import Oracle
from tests.tiny_engine import tiny_config

pytestmark = pytest.mark.jax

PROMPT = [30, 31, 32, 30, 40, 50, 60, 30]
TEMPERATURE, TOP_K, BIAS = 0.5, 3, {77: 4.0}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_answers_and_prompts(tiny_folder: Path, programs: Path, mode: LogprobsMode) -> None:
    """Processed: with the bias, over temperature, the three likeliest alone; prompts are told raw in any case."""
    config = tiny_config(tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16, max_num_seqs=4, logprobs_mode=mode)
    with LLM(config=config, sinks=[]) as llm:
        oracle = Oracle(llm.engine.runner, max_tokens=32)
        params = SamplingParams(
            temperature=TEMPERATURE, top_k=TOP_K, logit_bias=BIAS, seed=3, max_tokens=4, ignore_eos=True, logprobs=5, prompt_logprobs=5
        )
        output, plain = llm.generate([PROMPT, PROMPT], [params, SamplingParams(temperature=0.0, max_tokens=2)], use_tqdm=False)
        assert plain.outputs[0].logprobs is None
        (answer,) = output.outputs
        assert answer.logprobs is not None
        for index, told in enumerate(answer.logprobs):
            values = oracle.logits(PROMPT + answer.token_ids[:index]).astype(np.float64)
            if mode == "processed_logprobs":
                for token_id, value in BIAS.items():
                    values[token_id] += value
                values = log_softmax(np.where(values >= np.sort(values)[-TOP_K], values / TEMPERATURE, -1e9))
            check(told, values, answer.token_ids[index])
        assert output.prompt_logprobs is not None
        for position, told_of_prompt in enumerate(output.prompt_logprobs[1:], 1):
            values = oracle.logits(PROMPT[:position]).astype(np.float64)
            assert told_of_prompt is not None
            check(told_of_prompt, values if mode == "raw_logits" else log_softmax(values), PROMPT[position])
        if mode == "raw_logits":
            with pytest.raises(InvalidRequestError, match="gives logits .*logprobs_mode raw_logits"):
                llm.score([PROMPT], [[5]])
        else:
            assert llm.score([PROMPT], [answer.token_ids], use_tqdm=False)[0].token_ids == answer.token_ids


def check(told: dict[int, Any], values: np.ndarray, own: int) -> None:
    assert next(iter(told)) == own
    possible = [token_id for token_id in np.argsort(-values, kind="stable")[:5].tolist() if values[token_id] > -1e6]
    assert {token_id for token_id, entry in told.items() if entry.logprob > LOWEST_LOGPROB} == {own, *possible}
    assert len(told) in (5, 6)
    for token_id, entry in told.items():
        assert entry.logprob == pytest.approx(max(values[token_id], LOWEST_LOGPROB), abs=1e-4)
