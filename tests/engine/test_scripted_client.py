"""The scripted doors of `tests/scripted_client.py` are true to what they stand for."""

import asyncio
import math

import numpy as np
import pytest

from jaxpaged.async_llm import EngineClient
from jaxpaged.errors import EngineDeadError
from jaxpaged.request import FinishReason, RequestOutput, SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.engine.async_bench import params, run
from tests.event_log import EventLog
from tests.fakes import FailingRunner, ScriptRunner
from tests.script import follow, follow_samples
from tests.scripted_client import scripted_async_llm, scripted_llm
from tests.text.vocabularies import id_of

pytestmark = pytest.mark.jax

PROMPT = (5, 6)


def test_a_script_is_followed_by_both_doors(script_tokenizer: Tokenizer) -> None:
    answer = [id_of(script_tokenizer, text) for text in ("hello", " two", " words")]

    async def work() -> RequestOutput:
        with scripted_async_llm(runner(script_tokenizer, [*answer, 2]), script_tokenizer) as client:
            assert isinstance(client, EngineClient)
            return await client.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0))

    with scripted_llm(runner(script_tokenizer, [*answer, 2]), script_tokenizer) as llm:
        outputs = [run(work), *llm.generate([list(PROMPT)], SamplingParams(temperature=0))]
    for output in outputs:
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("hello two words", FinishReason.STOP)


def test_what_may_not_be_chosen_gives_way(script_tokenizer: Tokenizer) -> None:
    with scripted_llm(runner(script_tokenizer, [10, 2, 12, 2]), script_tokenizer) as llm:
        ids = [
            llm.generate([list(PROMPT)], SamplingParams(temperature=0, max_tokens=4, **fields))[0].outputs[0].token_ids
            for fields in ({"min_tokens": 3}, {"logit_bias": {10: -100}}, {"allowed_token_ids": [20, 11, 30]}, {"stop_token_ids": [12]})
        ]
    assert ids == [[10, 3, 12, 2], [11, 2], [11, 11, 20, 11], [10, 2]]


def test_log_probabilities_of_a_script(script_tokenizer: Tokenizer) -> None:
    """Likeliest are the ids that follow the scripted one, each e times less likely than the one before."""
    with scripted_llm(runner(script_tokenizer, [100]), script_tokenizer) as llm:
        asked = SamplingParams(temperature=0, max_tokens=2, logprobs=3, logit_bias={100: -100.0})
        told = llm.generate([list(PROMPT)], asked)[0].outputs[0].logprobs
    assert told is not None
    total = math.log(sum(math.exp(-distance) for distance in range(script_tokenizer.vocab_size)))
    for token in told:
        assert [(index, logprob.rank) for index, logprob in token.items()] == [(101, 2), (100, 1), (102, 3)]
        np.testing.assert_allclose([logprob.logprob for logprob in token.values()], np.array([-1, 0, -2]) - total, rtol=1e-6)


def test_log_probabilities_of_a_scripted_prompt(script_tokenizer: Tokenizer) -> None:
    """What the model would have said is the likeliest, then the id after it, and so on."""
    with scripted_llm(ScriptRunner(lambda _: 9, vocab=script_tokenizer.vocab_size, max_num_batched_tokens=4), script_tokenizer) as llm:
        prompt = [10, 10, 12, 11, *range(20, 30)]
        told = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    assert told is not None
    assert told[0] is None
    for token_id, token in zip(prompt[1:], told[1:], strict=True):
        assert token is not None
        assert token[token_id].rank == (token_id - 9) % script_tokenizer.vocab_size + 1
        assert {9, 10} <= token.keys()
    assert len(told) == len(prompt)


def test_each_sample_follows_its_own_script(script_tokenizer: Tokenizer) -> None:
    samples = [[10, 11, 2], [20, 2], [30, 31, 32, 33, 2]]
    script = ScriptRunner(by_seed=follow_samples({PROMPT: samples}, seed=7), vocab=script_tokenizer.vocab_size)
    with scripted_llm(script, script_tokenizer) as llm:
        output = llm.generate([list(PROMPT)], SamplingParams(n=3, seed=7, temperature=1.0))[0]
    assert [answer.token_ids for answer in output.outputs] == samples


def test_faults_of_a_step_reach_whoever_asked(script_tokenizer: Tokenizer) -> None:
    """A row without an id fails alone; a step that raises ends everybody, and the client knows that it is dead."""
    log = EventLog()

    def fail(step: int) -> None:
        if step == 6:
            raise RuntimeError("the device is on fire")

    async def work() -> None:
        inner = ScriptRunner(follow({PROMPT: [10, 11], (7, 8): [20, 21]}), vocab=script_tokenizer.vocab_size)
        faulty = FailingRunner(inner, before=fail, without_id=lambda step, row: step == 3 and row == 0)
        with scripted_async_llm(faulty, script_tokenizer, sinks=[log]) as client:
            first = asyncio.ensure_future(client.generate([5, 6], params(20))._last())
            second = asyncio.ensure_future(client.generate([7, 8], params(20))._last())
            assert (await first).outputs[0].finish_reason is FinishReason.ERROR
            with pytest.raises(EngineDeadError, match="on fire"):
                await second
            with pytest.raises(EngineDeadError, match="on fire"):
                client.check_health()

    run(work)


def runner(tokenizer: Tokenizer, answer: list[int]) -> ScriptRunner:
    return ScriptRunner(follow({PROMPT: answer}), vocab=tokenizer.vocab_size)
