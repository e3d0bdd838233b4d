"""Log-probabilities as the device computes them, against numpy in float64: blocks of prompt tokens, modes, ties, impossible ids."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.batch import MAX_BANNED_IDS, SamplingRows, ScoredTokens
from jaxpaged.config import LogprobsMode
from jaxpaged.logprobs import SCORE_BLOCK, answer_logprobs, prompt_logprobs
from jaxpaged.request import MAX_LOGPROBS
from jaxpaged.told_logprobs import ToldRows

pytestmark = pytest.mark.jax

VOCAB, NUM_IDS, EMBED = 301, 290, 24
"""Ids from 290 on are rows of the head that no token stands for."""


def rows_of(temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float]) -> SamplingRows:
    """Rows without penalties, of which id 17 is banned in the second."""
    count = len(temperature)
    banned = np.full((count, MAX_BANNED_IDS), VOCAB, np.int32)
    banned[1, 3] = 17
    zeros, floats = jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.float32)
    return SamplingRows(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
        presence_penalty=floats,
        frequency_penalty=floats,
        repetition_penalty=floats + 1,
        has_bias=zeros,
        num_logprobs=zeros,
        seed=jnp.zeros((count, 2), jnp.uint32),
        position=zeros,
        banned_ids=jnp.asarray(banned),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))


def check_rows(got: ToldRows, values: np.ndarray, ids: np.ndarray, *, has_top: bool = True) -> None:
    """Compares rows with float64 values [rows, vocab], -inf for what is impossible."""
    chosen, rank, top_ids, top = map(np.asarray, got)
    for row, (own, token_id) in enumerate(zip(values, ids, strict=True)):
        order = np.argsort(-own, kind="stable")  # of equal ones the smaller id first
        assert chosen[row] == pytest.approx(own[token_id], abs=1e-5)
        assert rank[row] == order.tolist().index(token_id) + 1
        if has_top:
            assert top_ids[row].tolist() == order[:MAX_LOGPROBS].tolist()
            np.testing.assert_allclose(top[row], own[order[:MAX_LOGPROBS]], atol=1e-5)
        else:
            assert not top_ids[row].any()


@functools.partial(jax.jit, static_argnums=3)
def run_prompt(hidden: Any, head: Any, scored: Any, mode: LogprobsMode) -> jax.Array:
    return prompt_logprobs(hidden, scored, lambda x: x @ head.T, NUM_IDS, mode)


class Prompts:
    """Random hidden states and a head whose logits are multiples of 1/8, so that many of them are equal."""

    def __init__(self, num_tokens: int, num_scored: int, num_top: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.hidden = rng.integers(-2, 3, (num_tokens, EMBED)).astype(np.float32)
        self.head = (rng.integers(-2, 3, (VOCAB, EMBED)) / 8).astype(np.float32)
        self.at = rng.permutation(num_tokens)[:num_scored]
        self.ids = rng.integers(0, NUM_IDS, num_scored)
        filler = num_tokens - num_scored
        self.scored = ScoredTokens(
            jnp.asarray(np.pad(self.at, (0, filler)), jnp.int32),
            jnp.asarray(np.pad(self.ids, (0, filler)), jnp.int32),
            jnp.asarray(np.pad(num_top, (0, filler), constant_values=-1), jnp.int32),
        )
        logits = self.hidden[self.at] @ self.head.T
        logits[:, NUM_IDS:] = -np.inf
        self.logits = logits

    def run(self, mode: LogprobsMode = "raw_logprobs") -> ToldRows:
        return ToldRows.of(np.asarray(run_prompt(jnp.asarray(self.hidden), jnp.asarray(self.head), self.scored, mode)))


@pytest.mark.parametrize(("num_tokens", "num_scored"), [(2, 1), (48, 33), (100, 32), (100, 64), (100, 97), (100, 100)])
def test_prompt_tokens_equal_numpy_around_every_block_edge(num_tokens: int, num_scored: int) -> None:
    prompts = Prompts(num_tokens, num_scored, [20] * num_scored, seed=num_tokens + num_scored)
    got = prompts.run()
    assert got.chosen.shape[0] == -(-num_tokens // min(SCORE_BLOCK, num_tokens)) * min(SCORE_BLOCK, num_tokens)
    check_rows(got, log_softmax(prompts.logits), prompts.ids)
    padding = np.asarray(got.rank)[-(-num_scored // SCORE_BLOCK) * SCORE_BLOCK :]
    assert not padding.any(), "a block that nobody wants was computed"


def test_likeliest_ids_are_looked_for_only_in_blocks_that_want_them() -> None:
    prompts = Prompts(100, 90, [0] * 32 + [0] * 31 + [1] + [0] * 26, seed=1)
    got = prompts.run()
    values = log_softmax(prompts.logits)
    for start, has_top in ((0, False), (32, True), (64, False)):
        part = ToldRows(*(array[start:] for array in got))
        check_rows(part, values[start : start + 32], prompts.ids[start : start + 32], has_top=has_top)


def test_nobody_asks_and_nothing_is_computed() -> None:
    prompts = Prompts(100, 0, [], seed=2)
    prompts.hidden.fill(np.nan)
    assert not any(np.asarray(array).any() for array in prompts.run())


def test_logits_of_prompts() -> None:
    prompts = Prompts(48, 40, [20] * 40, seed=3)
    check_rows(prompts.run("raw_logits"), prompts.logits.astype(np.float64), prompts.ids)


def test_an_impossible_next_id_has_no_probability_and_the_last_rank() -> None:
    prompts = Prompts(100, 3, [20] * 3, seed=4)
    prompts.scored = prompts.scored._replace(next_ids=prompts.scored.next_ids.at[:3].set(jnp.asarray([NUM_IDS, VOCAB - 1, 5])))
    check_rows(prompts.run(), log_softmax(prompts.logits), np.array([NUM_IDS, VOCAB - 1, 5]))


@functools.partial(jax.jit, static_argnums=5)
def run_answers(raw: Any, shaped: Any, ids: Any, rows: Any, wanted: Any, mode: LogprobsMode) -> jax.Array:
    return answer_logprobs(raw, shaped, ids, rows, wanted, NUM_IDS, mode)


def six_rows() -> SamplingRows:
    """Greedy, and sampled in five ways."""
    return rows_of(
        temperature=[0.0, 1.0, 0.3, 2.0, 1.0, 0.7],
        top_k=[0, 0, 25, 200, 0, 1],
        top_p=[1.0, 1.0, 1.0, 0.8, 0.9, 1.0],
        min_p=[0.0, 0.1, 0.0, 0.0, 0.0, 0.0],
    )


def processed(shaped: np.ndarray, rows: SamplingRows) -> np.ndarray:
    """What rows draw from, in plain numpy: temperature, min_p, top_k, top_p; float64 logits, -inf for what is dropped."""
    out = np.full(shaped.shape, -np.inf)
    for index, logits in enumerate(shaped.astype(np.float64)):
        logits = logits.copy()
        logits[NUM_IDS:] = -np.inf
        logits[[token for token in np.asarray(rows.banned_ids[index]).tolist() if token < VOCAB]] = -np.inf
        if (temperature := float(rows.temperature[index])) >= 1e-5:
            logits /= temperature
        weights = np.exp(logits - logits.max())
        kept = weights >= float(rows.min_p[index])
        if 0 < (top_k := int(rows.top_k[index])) < VOCAB:
            kept &= weights >= np.sort(weights)[-top_k]
        if (top_p := float(rows.top_p[index])) < 1:
            order = np.argsort(-np.where(kept, weights, 0), kind="stable")
            mass = np.cumsum(np.where(kept, weights, 0)[order])
            kept &= weights >= weights[order[np.argmax(mass >= top_p * mass[-1])]]
        out[index, kept] = logits[kept]
    return out


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_what_answers_are_told_in_each_mode(mode: LogprobsMode) -> None:
    rng = np.random.default_rng(5)
    rows = six_rows()
    raw = rng.standard_normal((6, VOCAB)).astype(np.float32) * 3
    shaped = raw + rng.standard_normal((6, VOCAB)).astype(np.float32)
    values = np.where(np.arange(VOCAB) < NUM_IDS, raw, -np.inf).astype(np.float64)
    if mode.startswith("processed"):
        values = processed(shaped, rows)
    ids = np.array([np.flatnonzero(np.isfinite(own))[-1] for own in values])
    wanted = jnp.asarray([True] + [False] * 5)
    columns = run_answers(jnp.asarray(raw), jnp.asarray(shaped), jnp.asarray(ids, jnp.int32), rows, wanted, mode)
    got = ToldRows.of(np.asarray(columns))
    check_rows(got, log_softmax(values) if mode.endswith("logprobs") else values, ids)


def test_no_answer_wants_any() -> None:
    nan = jnp.full((6, VOCAB), jnp.nan)
    got = run_answers(nan, nan, jnp.zeros(6, jnp.int32), six_rows(), jnp.zeros(6, bool), "raw_logprobs")
    assert not np.asarray(got).any()
