"""Log-probabilities of answers, against logits that were computed apart, and how they reach whoever asked."""

import functools
import math
from typing import Any

import numpy as np
import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Intake
from jaxpaged.mailbox import merge_deltas
from jaxpaged.output import Answer, TokenLogprobs
from jaxpaged.request import LOWEST_LOGPROB, CompletionOutput, Request, RequestOutputKind, SamplingParams
from jaxpaged.sequence import Sequence
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from tests.engine.conftest import tiny_bench
from tests.equality import Oracle
from tests.fakes import Bench

pytestmark = pytest.mark.jax

PROMPT = [30, 31, 32, 30, 40, 50, 60, 30]
WANTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 5},
    "chosen alone": {"temperature": 0.0, "logprobs": 0},
    "sampled": {"temperature": 1.5, "seed": 3, "logprobs": 20},
    "shaped": {"temperature": 0.7, "seed": 4, "top_k": 3, "logit_bias": {77: 90.0}, "frequency_penalty": 1.0, "logprobs": 2},
}


@pytest.fixture(scope="module")
def oracle(tiny: Started) -> Oracle:
    return Oracle(tiny.engine.runner, max_tokens=64)  # type: ignore[arg-type]


@pytest.fixture(params=[1, 2], ids=["one step in flight", "two steps in flight"])
def bench(request: pytest.FixtureRequest, tiny: Started, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(Bench, "default_in_flight", request.param)
    return tiny_bench(tiny)


def check(oracle: Oracle, bench: Bench, answer: CompletionOutput, num_top: int, num_ids: int) -> None:
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    total = 0.0
    for index, (chosen, told) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        logits = oracle.logits(PROMPT + answer.token_ids[:index]).astype(np.float64)[:num_ids]
        expected = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        assert next(iter(told)) == chosen
        likeliest = np.argsort(-expected, kind="stable")[:num_top].tolist()
        assert set(told) == {chosen, *likeliest}
        for token_id, entry in told.items():
            assert abs(entry.logprob - expected[token_id]) < 1e-4
            assert abs(entry.rank - 1 - (expected > expected[token_id]).sum()) <= (np.abs(expected - expected[token_id]) < 1e-5).sum() - 1
            assert entry.decoded_token == bench.tokenizer.token_text(token_id)
            assert entry.token_bytes == bench.tokenizer.token_bytes[token_id]
        total += told[chosen].logprob
    assert answer.cumulative_logprob == pytest.approx(total)


def test_they_are_the_models_own_whatever_was_asked_for_beside(bench: Bench, oracle: Oracle) -> None:
    """Raw: bias, penalties, temperature and top_k change what is chosen and not what is told; a preemption changes nothing."""
    ids = {name: bench.add(PROMPT, max_tokens=9, ignore_eos=True, **wanted) for name, wanted in WANTED.items()}
    plain = bench.add(PROMPT, max_tokens=9, ignore_eos=True)
    for _ in range(4):
        bench.step()
    bench.evict()
    bench.run()
    num_ids = min(bench.tokenizer.vocab_size, bench.runner.vocab)
    for name, wanted in WANTED.items():
        check(oracle, bench, bench.last[ids[name]].outputs[0], wanted["logprobs"], num_ids)
    answer = bench.last[plain].outputs[0]
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)
    assert answer.token_ids == bench.last[ids["greedy"]].outputs[0].token_ids
    assert bench.engine.runner.inner.num_compiled_while_running == 0  # type: ignore[attr-defined]


def test_deltas_joined_are_the_whole(bench: Bench) -> None:
    whole = bench.ask(PROMPT, temperature=0.0, max_tokens=7, logprobs=2, stream_interval=2).outputs[0]
    request_id = bench.add(PROMPT, temperature=0.0, max_tokens=7, logprobs=2, stream_interval=2, output_kind=RequestOutputKind.DELTA)
    bench.run()
    deltas = [output.outputs[0] for output in bench.outputs[request_id]]
    assert len(deltas) > 2
    assert [entry for delta in deltas for entry in delta.logprobs or ()] == whole.logprobs
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
    assert deltas[-1].cumulative_logprob == whole.cumulative_logprob


def test_an_impossible_id_is_told_as_a_number_that_json_can_write(script_tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    sequence = Sequence(Request(request_id="x", prompt_token_ids=[5], params=params, seed=0, arrival_s=0.0))
    answer = Answer(sequence, 0, script_tokenizer)
    sequence.token_ids.append(7)
    answer.take_token(TokenLogprobs(-0.5, 1, [7, 9, 11], [-0.5, -math.inf, -math.inf]))
    (told,) = answer.completion().logprobs or ()
    assert {token_id: entry.logprob for token_id, entry in told.items()} == {7: -0.5, 9: LOWEST_LOGPROB}


def test_every_sample_has_its_own(bench: Bench) -> None:
    output = bench.ask(PROMPT, temperature=1.0, seed=5, n=3, max_tokens=4, ignore_eos=True, logprobs=1)
    for answer in output.outputs:
        assert [next(iter(told)) for told in answer.logprobs or ()] == answer.token_ids


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("value", "part"), [(21, "logprobs must be between 0 and 20"), (-1, "between 0 and 20"), (True, "an integer")])
def test_numbers_that_cannot_be(value: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        SamplingParams(logprobs=value)


def test_the_engines_own_limit(tiny: Started) -> None:
    vocab = tiny.engine.runner.vocab
    intake = Intake(tiny.intake.tokenizer, generation_config={}, eos_token_ids=frozenset(), vocab=vocab, seed=0, max_logprobs=3)
    assert intake.request("a", SamplingParams(logprobs=3), arrival_s=0.0).params.logprobs == 3
    with pytest.raises(InvalidRequestError, match="logprobs 4 is over the limit of this engine, 3"):
        intake.request("a", SamplingParams(logprobs=4), arrival_s=0.0)


def test_deltas_that_nobody_has_read_yet_are_put_together(bench: Bench) -> None:
    request_id = bench.add(PROMPT, temperature=0.0, max_tokens=3, logprobs=1, output_kind=RequestOutputKind.DELTA)
    bench.run()
    whole = bench.ask(PROMPT, temperature=0.0, max_tokens=3, logprobs=1).outputs[0]
    merged = functools.reduce(merge_deltas, bench.outputs[request_id]).outputs[0]
    assert (merged.token_ids, merged.logprobs, merged.cumulative_logprob) == (whole.token_ids, whole.logprobs, whole.cumulative_logprob)
