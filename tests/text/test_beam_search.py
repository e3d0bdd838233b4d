"""Beam search over models that are tables, against another writing of the same rules; the parameters and their limits."""

import math
import random
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxpaged.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, num_logprobs_for
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import LOWEST_LOGPROB, FinishReason, Logprob
from tests.beam_reference import Table, reference_search
from tests.text.vocabularies import byte_level

PROMPT = (5, 9)


def random_table(seed: int, vocab: int, *, peak: float) -> Table:
    """A model whose log-probabilities hang on the whole beginning; `peak`: how sure it is."""

    def table(ids: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([seed, *ids]).normal(size=vocab) * peak
        return logits - np.logaddexp.reduce(logits)

    return table


def search(table: Table, params: BeamSearchParams, ends: Set[int]) -> tuple[BeamSearchOutput, int]:
    """Drives a search; returns what it found, and the number of steps."""
    beams = BeamSearch(PROMPT, params, ends, params.max_tokens)
    num_steps = 0
    while not beams.is_done:
        assert len(beams.histories) <= (params.beam_width if num_steps else 1)
        assert all(history[:2] == list(PROMPT) and len(history) == 2 + num_steps for history in beams.histories)
        beams.advance([likeliest(table(tuple(history[2:])), beams.num_logprobs) for history in beams.histories])
        num_steps += 1
    return beams.output(byte_level()), num_steps


def likeliest(logprobs: np.ndarray, number: int) -> dict[int, Logprob]:
    ids = np.argsort(-logprobs, kind="stable")[:number].tolist()
    return {token_id: Logprob(float(logprobs[token_id]), rank, "", b"") for rank, token_id in enumerate(ids, 1)}


class World(NamedTuple):
    """What came out of a random world."""

    lengths: set[int]
    ended_early: bool


def check(seed: int) -> World:
    """One random world."""
    rng = random.Random(seed)
    width = rng.choice((1, 1, 2, 3, 4, 5, 10))
    ends = set(rng.sample(range(12), rng.choice((0, 1, 1, 2, 3))))
    penalty = rng.choice((1.0, 1.0, 0.0, 0.5, 2.0, -1.0))
    max_tokens = rng.choice((1, 2, 3, 5, 8, 12))
    table = random_table(seed, 40 if width == 10 else 16, peak=rng.choice((0.5, 1.0, 3.0)))
    params = BeamSearchParams(width, max_tokens, length_penalty=penalty)
    expected = reference_search(table, width=width, max_tokens=max_tokens, ends=ends, penalty=penalty)
    found, num_steps = search(table, params, ends)
    assert [tuple(answer.output_token_ids) for answer in found.sequences] == expected.answers
    assert [answer.score for answer in found.sequences] == pytest.approx(expected.scores, abs=1e-9)
    assert num_steps == expected.num_steps
    for answer in found.sequences:
        ids = answer.output_token_ids
        entries = [told[token_id].logprob for told, token_id in zip(answer.logprobs, ids, strict=True)]
        assert answer.cum_logprob == pytest.approx(sum(entries))
        assert answer.score == pytest.approx(answer.cum_logprob / len(ids) ** penalty)
        assert answer.finish_reason is (FinishReason.STOP if ids[-1] in ends else FinishReason.LENGTH)
        assert not set(ids[:-1]) & ends
    return World({len(ids) for ids in expected.answers}, num_steps < max_tokens)


def test_random_models_are_searched_as_the_reference_does() -> None:
    worlds = [check(seed) for seed in range(250)]
    assert sum(len(world.lengths) > 1 for world in worlds) > 40, "hardly any answers of unequal length"
    assert sum(world.ended_early for world in worlds) > 15


@pytest.mark.tier("long", area="sampling")
def test_many_random_models() -> None:
    for seed in range(1000, 21_000):
        check(seed)


def test_ignore_eos_goes_on() -> None:
    table = random_table(1, 16, peak=1.0)
    found, num_steps = search(table, BeamSearchParams(3, 6, ignore_eos=True), ends={0, 1, 2, 3, 4, 5, 6, 7})
    expected = reference_search(table, width=3, max_tokens=6, ends=set(), penalty=1.0)
    assert [tuple(answer.output_token_ids) for answer in found.sequences] == expected.answers
    assert num_steps == 6
    assert {answer.finish_reason for answer in found.sequences} == {FinishReason.LENGTH}


def test_impossible_ids_are_no_answers() -> None:
    """Fewer ids than beams: there are as many answers as there can be."""

    def table(_: tuple[int, ...]) -> np.ndarray:
        return np.array([math.log(0.75), math.log(0.25), LOWEST_LOGPROB, LOWEST_LOGPROB])

    found, _ = search(table, BeamSearchParams(4, 1), ends={3})
    assert [answer.output_token_ids for answer in found.sequences] == [[0], [1]]
    found, _ = search(table, BeamSearchParams(4, 2), ends={3})
    assert [answer.output_token_ids for answer in found.sequences] == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_search_that_is_given_up_gives_what_it_has() -> None:
    def told(history: Sequence[int]) -> dict[int, Logprob]:
        return likeliest(np.log([0.1, 0.2, 0.34, 0.36] if len(history) == 2 else [0.97, 0.01, 0.01, 0.01]), 4)

    beams = BeamSearch(PROMPT, BeamSearchParams(3, 9), frozenset({2}), 9)
    assert beams.output(byte_level(), given_up=FinishReason.ABORT) == BeamSearchOutput(sequences=[])
    beams.advance([told(history) for history in beams.histories])
    beams.advance([told(history) for history in beams.histories])
    found = beams.output(byte_level(), given_up=FinishReason.ABORT, error="too late")
    assert found.error == "too late"
    reasons = [(answer.output_token_ids, str(answer.finish_reason)) for answer in found.sequences]
    assert reasons == [([3, 0], "abort"), ([1, 0], "abort"), ([2], "stop")]


def test_texts_hide_the_end_token_unless_asked() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab")

    def table(beginning: tuple[int, ...]) -> np.ndarray:
        wanted = [*ids, 2][len(beginning)]
        return np.where(np.arange(300) == wanted, -0.01, -8.0 - np.arange(300) / 100)

    for shown, text in ((False, "ab"), (True, "ab" + tokenizer.token_text(2))):
        params = BeamSearchParams(1, 9, include_stop_str_in_output=shown, skip_special_tokens=False)
        (answer,) = search(table, params, {2})[0].sequences
        assert (answer.output_token_ids, answer.output_text) == ([*ids, 2], text)
        assert answer.text == tokenizer.decode(PROMPT, skip_special_tokens=False) + text
        assert (answer.num_prompt_tokens, answer.stop_reason) == (2, None)


def test_ids_to_ask_for() -> None:
    """Twice the width, as in vLLM; more when there are more end tokens than beams."""
    assert [num_logprobs_for(BeamSearchParams(width, 8), {2}) for width in (1, 4, 10)] == [2, 8, 20]
    assert num_logprobs_for(BeamSearchParams(2, 8), {1, 2, 3, 4}) == 6
    assert num_logprobs_for(BeamSearchParams(2, 8, ignore_eos=True), {1, 2, 3, 4}) == 4
    assert num_logprobs_for(BeamSearchParams(10, 8), set(range(16))) == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": None}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"skip_special_tokens": None}, "skip_special_tokens"),
        ({"include_stop_str_in_output": "x"}, "include_stop_str_in_output"),
    ],
)
def test_parameters_that_cannot_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as error:
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **fields})
    assert error.value.param == param
