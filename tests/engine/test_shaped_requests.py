"""Penalties, biases, allowed ids and bad words through the whole engine, against logits computed apart and shaped by hand."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Intake
from jaxpaged.request import SamplingParams
from jaxpaged.start import Started
from tests.engine.conftest import tiny_bench
from tests.equality import Oracle
from tests.fakes import Bench

pytestmark = pytest.mark.jax

PROMPT = [30, 31, 32, 30, 40, 50, 60, 30]
NUM_TOKENS = 16
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.6, "presence_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.8},
    "rewarded": {"repetition_penalty": 0.5, "frequency_penalty": -0.5},
    "biased": {"logit_bias": {77: 4.0, "78": 3.0, 80: -100.0}},
    "allowed": {"allowed_token_ids": list(range(100, 140))},
    "all": {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {101: 0.5}, "allowed_token_ids": list(range(100, 180))},
}


@pytest.fixture(scope="module")
def oracle(tiny: Started) -> "RememberedOracle":
    return RememberedOracle(tiny)


class RememberedOracle:
    """Asked the same of several runs, the model is asked once."""

    def __init__(self, tiny: Started) -> None:
        self._oracle = Oracle(tiny.engine.runner, max_tokens=64)  # type: ignore[arg-type]
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, history: list[int]) -> np.ndarray:
        """See `Oracle`."""
        key = tuple(history)
        if key not in self._logits:
            self._logits[key] = self._oracle.logits(history)
        return self._logits[key]


@pytest.fixture(params=[1, 2], ids=["one step in flight", "two steps in flight"])
def bench(request: pytest.FixtureRequest, tiny: Started) -> Iterator[Bench]:
    Bench.default_in_flight = request.param
    yield tiny_bench(tiny)
    Bench.default_in_flight = 1


def shaped_by_hand(logits: np.ndarray, history: list[int], shape: dict[str, Any]) -> np.ndarray:
    out = logits.astype(np.float64)
    if "allowed_token_ids" in shape:
        out[[i for i in range(len(out)) if i not in shape["allowed_token_ids"]]] = -np.inf
    for token_id, value in shape.get("logit_bias", {}).items():
        out[int(token_id)] += value
    answer, repetition = history[len(PROMPT) :], shape.get("repetition_penalty", 1.0)
    for token_id in set(history):
        out[token_id] = out[token_id] / repetition if out[token_id] > 0 else out[token_id] * repetition
    for token_id in set(answer):
        out[token_id] -= shape.get("frequency_penalty", 0.0) * answer.count(token_id) + shape.get("presence_penalty", 0.0)
    return out


def check(oracle: RememberedOracle, token_ids: list[int], shape: dict[str, Any]) -> None:
    assert len(token_ids) == NUM_TOKENS
    for index, chosen in enumerate(token_ids):
        history = PROMPT + token_ids[:index]
        logits = shaped_by_hand(oracle.logits(history), history, shape)
        assert logits.max() - logits[chosen] < 1e-4, f"token {index} is {chosen}, and {int(logits.argmax())} is the likeliest"


def test_each_choice_is_the_likeliest_of_the_shaped_logits(bench: Bench, oracle: RememberedOracle) -> None:
    """All kinds beside each other; then again in slots that others have left, preempted on the way."""
    for is_evicted in (False, True):
        ids = {name: bench.add(PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **shape) for name, shape in SHAPES.items()}
        if is_evicted:
            for _ in range(3):
                for _ in range(3):
                    bench.step()
                bench.evict()
        bench.run()
        for name, shape in SHAPES.items():
            check(oracle, bench.last[ids[name]].outputs[0].token_ids, shape)
        bench.after_check()
    answers = {name: bench.ids(request_id) for name, request_id in ids.items()}
    assert [name for name in answers if answers[name] == answers["plain"]] == ["plain"]


def test_nothing_is_compiled_for_them(bench: Bench, tiny: Started) -> None:
    before = tiny.engine.runner.num_compiled_while_running  # type: ignore[attr-defined]
    for shape in SHAPES.values():
        bench.ask(PROMPT, temperature=0.7, max_tokens=3, **shape)
    assert tiny.engine.runner.num_compiled_while_running == before  # type: ignore[attr-defined]


def test_sampled_answers_stay_within_the_allowed_ids(bench: Bench) -> None:
    allowed = [100, 120, 140]
    answer = bench.ask(PROMPT, temperature=5.0, max_tokens=60, seed=3, ignore_eos=True, allowed_token_ids=allowed).outputs[0]
    assert set(answer.token_ids) == set(allowed)


def test_a_bias_of_100_decides_and_one_of_minus_100_forbids(bench: Bench) -> None:
    assert bench.ask(PROMPT, temperature=1.0, max_tokens=5, ignore_eos=True, logit_bias={99: 100.0}).outputs[0].token_ids == [99] * 5
    usual = bench.ask(PROMPT, temperature=0.0, max_tokens=1).outputs[0].token_ids[0]
    assert bench.ask(PROMPT, temperature=0.0, max_tokens=1, logit_bias={usual: -100.0}).outputs[0].token_ids[0] != usual


def test_bad_words_are_not_written(bench: Bench) -> None:
    """Words of one token and of several; others run on beside them."""
    usual = bench.ask(PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True).outputs[0]
    beside = bench.add(PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True)
    request = bench.intake.request(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), arrival_s=0.0)
    words = (tuple(usual.token_ids[2:4]), tuple(usual.token_ids[5:8]), (usual.token_ids[10],))
    bench.engine.add(msgspec.structs.replace(request, request_id="without", bad_words_ids=words))
    bench.run()
    got = tuple(bench.last["without"].outputs[0].token_ids)
    assert bench.last[beside].outputs[0].token_ids == usual.token_ids
    assert len(got) == 20
    assert got != tuple(usual.token_ids)
    for word in words:
        assert not any(got[start : start + len(word)] == word for start in range(len(got)))


def test_a_word_is_spelled_with_and_without_a_space(tiny: Started) -> None:
    tokenizer = tiny.intake.tokenizer
    request = tiny.intake.request("x", SamplingParams(bad_words=["cat", " dog"]), arrival_s=0.0)
    spelled = [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in request.bad_words_ids]
    assert {text.strip() for text in spelled} == {"cat", "dog"}
    assert "cat" in spelled


def test_the_models_own_penalty_is_the_default(tiny: Started) -> None:
    intake = Intake(
        tiny.intake.tokenizer,
        generation_config={"repetition_penalty": 1.3},
        eos_token_ids=frozenset(),
        vocab=tiny.engine.runner.vocab,
        seed=0,
    )
    assert intake.request("x", SamplingParams(), arrival_s=0.0).params.repetition_penalty == 1.3
    assert intake.request("x", SamplingParams(repetition_penalty=1.0), arrival_s=0.0).params.repetition_penalty == 1.0
    assert tiny.intake.request("x", SamplingParams(), arrival_s=0.0).params.repetition_penalty == 1.0


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("presence_penalty", 2.01, "presence_penalty must be between -2 and 2"),
        ("frequency_penalty", float("nan"), "frequency_penalty must be between -2 and 2"),
        ("frequency_penalty", None, "frequency_penalty must be a number"),
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0 and at most 100"),
        ("repetition_penalty", float("inf"), "repetition_penalty"),
        ("logit_bias", {5: 100.5}, "logit_bias must be between -100 and 100"),
        ("logit_bias", {"five": 1.0}, "logit_bias has token ids for keys, got 'five'"),
        ("logit_bias", {-1: 1.0}, "logit_bias has token ids for keys, got -1"),
        ("logit_bias", {5: None}, "logit_bias of id 5 must be a number"),
        ("logit_bias", dict.fromkeys(range(1025), 0.0), "at most 1024 ids, got 1025"),
        ("logit_bias", [5], "logit_bias must be an object"),
        ("allowed_token_ids", [], "allowed_token_ids must name at least one id"),
        ("allowed_token_ids", [1, -1], "allowed_token_ids must be between 0"),
        ("allowed_token_ids", "5", "allowed_token_ids must be a list of token ids"),
        ("bad_words", "cat", "bad_words must be a list of strings"),
        ("bad_words", [""], "each string of bad_words has 1 to 1024 characters, got 0"),
        ("bad_words", ["  "], "a string of bad_words must not be all spaces, got"),
        ("bad_words", ["x"] * 129, "bad_words takes at most 128 strings, got 129"),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: Any, part: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert part in caught.value.message
    assert caught.value.param == field


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(tiny: Started, name: str) -> None:
    vocab = tiny.engine.runner.vocab
    for token_id, is_fine in ((vocab - 1, True), (vocab, False)):
        params = SamplingParams(**{name: {token_id: 1.0} if name == "logit_bias" else [token_id]})
        if is_fine:
            tiny.intake.request("x", params, arrival_s=0.0)
            continue
        with pytest.raises(InvalidRequestError, match=f"{name} holds {vocab}, and the model has ids 0 to {vocab - 1}"):
            tiny.intake.request("x", params, arrival_s=0.0)


def test_a_request_that_may_choose_nothing_ends_with_a_sentence(bench: Bench) -> None:
    """All that is allowed is forbidden again: an error for this one, and for nobody else."""
    request_id = bench.add(PROMPT, temperature=0.0, max_tokens=3, allowed_token_ids=[100], min_tokens=2, stop_token_ids=[100])
    other = bench.add(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True)
    bench.run()
    assert "every token is forbidden" in str(bench.last[request_id].error)
    assert bench.last[other].error is None
