"""Biases and penalties on the device against a few lines of numpy, and what a slot remembers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import slot_rows
from jaxpaged.batch import MAX_BANNED_IDS, SamplingRows
from jaxpaged.logit_shaping import SlotRows, count_ids, shape_logits
from jaxpaged.request import Request, SamplingParams
from jaxpaged.sequence import Sequence
from jaxpaged.slot_rows import ends_of_bad_words, needs_slot_row, slot_row

pytestmark = pytest.mark.jax

ROWS, SLOTS, VOCAB = 16, 24, 300
run_shape, run_count = jax.jit(shape_logits), jax.jit(count_ids)


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Each kind of shaping in every other row."""

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.5 else off

    ids = rng.choice(VOCAB, 40, replace=False).tolist()
    return SamplingParams(
        temperature=0.0,
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), None),
        logit_bias=maybe({int(i): float(rng.uniform(-100, 100)) for i in ids[:5]}, None),
        allowed_token_ids=maybe(ids, None),
    )


def random_sequence(rng: np.random.Generator, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()) -> Sequence:
    prompt = rng.integers(0, VOCAB, rng.integers(1, 50)).tolist()
    sequence = Sequence(Request(request_id="x", prompt_token_ids=prompt, params=params, seed=0, arrival_s=0.0, bad_words_ids=bad_words))
    sequence.token_ids += rng.integers(0, VOCAB // 4, rng.integers(0, 50)).tolist()
    return sequence


def shaped_by_hand(logits: np.ndarray, sequence: Sequence) -> np.ndarray:
    """vLLM's order: allowed ids, bad words of one token, biases; then repetition, frequency, presence."""
    params, out = sequence.request.params, logits.astype(np.float64)
    prompt, answer = sequence.token_ids[: sequence.num_prompt_tokens], sequence.token_ids[sequence.num_prompt_tokens :]
    for token_id in range(VOCAB):
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            out[token_id] = -np.inf
        if (token_id,) in sequence.request.bad_words_ids:
            out[token_id] = -np.inf
        out[token_id] += (params.logit_bias or {}).get(token_id, 0.0)
        if token_id in prompt or token_id in answer:
            repetition = params.repetition_penalty or 1.0
            out[token_id] = out[token_id] / repetition if out[token_id] > 0 else out[token_id] * repetition
        out[token_id] -= params.frequency_penalty * answer.count(token_id)
        out[token_id] -= params.presence_penalty * (token_id in answer)
    return out


def device_rows(sequences: list[Sequence], slots: list[int]) -> tuple[SamplingRows, SlotRows]:
    """Rows of a batch, and slots in which everything that nobody owns is spoiled."""
    state = SlotRows(np.full((SLOTS, VOCAB), 999, np.int32), np.full((SLOTS, VOCAB), np.nan, np.float32))
    for sequence, slot in zip(sequences, slots, strict=True):
        state.counts[slot], state.bias[slot] = slot_row(sequence, VOCAB)
    params = [sequence.request.params for sequence in sequences]

    def column(name: str, none: float) -> jax.Array:
        values = [getattr(each, name) for each in params]
        return jnp.asarray([none if value is None else value for value in values], jnp.float32)

    zeros = jnp.zeros(len(sequences), jnp.float32)
    rows = SamplingRows(
        temperature=zeros,
        top_k=jnp.zeros(len(sequences), jnp.int32),
        top_p=zeros,
        min_p=zeros,
        presence_penalty=column("presence_penalty", 0.0),
        frequency_penalty=column("frequency_penalty", 0.0),
        repetition_penalty=column("repetition_penalty", 1.0),
        has_bias=jnp.asarray([slot_rows.has_bias(sequence.request) for sequence in sequences], jnp.int32),
        num_logprobs=jnp.full(len(sequences), -1, jnp.int32),
        seed=jnp.zeros((len(sequences), 2), jnp.uint32),
        position=jnp.zeros(len(sequences), jnp.int32),
        banned_ids=jnp.full((len(sequences), MAX_BANNED_IDS), VOCAB, jnp.int32),
    )
    return rows, SlotRows(jnp.asarray(state.counts), jnp.asarray(state.bias))


@pytest.mark.parametrize("seed", range(12))
def test_shaped_as_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = [tuple((int(i),) for i in rng.choice(VOCAB, 3)) if rng.random() < 0.3 else () for _ in range(ROWS)]
    sequences = [random_sequence(rng, random_params(rng), bad_words=own) for own in words]
    slots = rng.permutation(SLOTS)[:ROWS].tolist()
    logits = rng.normal(0, 5, (ROWS, VOCAB)).astype(np.float32)
    rows, state = device_rows(sequences, slots)
    got = np.asarray(run_shape(jnp.asarray(logits), rows, state, jnp.asarray(slots, jnp.int32)))
    for index, sequence in enumerate(sequences):
        np.testing.assert_allclose(got[index], shaped_by_hand(logits[index], sequence), rtol=2e-6, atol=2e-5)
        if not needs_slot_row(sequence.request):
            assert np.array_equal(got[index], logits[index])


def test_rows_that_ask_for_nothing_keep_their_bits_beside_those_that_do() -> None:
    """Also when their slot holds what somebody left there."""
    rng = np.random.default_rng(0)
    plain, shaped = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={3: 5.0})
    sequences = [random_sequence(rng, shaped if index % 2 else plain) for index in range(ROWS)]
    rows, state = device_rows(sequences, list(range(ROWS)))
    state = SlotRows(jnp.full_like(state.counts, 77).at[1::2].set(0), state.bias.at[0:ROWS:2].set(jnp.nan))
    logits = rng.normal(0, 5, (ROWS, VOCAB)).astype(np.float32)
    logits[4, 7] = -np.inf
    got = np.asarray(run_shape(jnp.asarray(logits), rows, state, jnp.arange(ROWS, dtype=jnp.int32)))
    assert np.array_equal(got[::2], logits[::2])
    assert not np.array_equal(got[1::2], logits[1::2])


def test_chosen_ids_are_counted_in_their_slots_only() -> None:
    rng = np.random.default_rng(1)
    plain, penalized = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, frequency_penalty=1.0)
    sequences = [random_sequence(rng, penalized if index < 12 else plain) for index in range(ROWS)]
    slots = rng.permutation(SLOTS)[:ROWS].tolist()
    rows, state = device_rows(sequences, slots)
    ids = rng.integers(0, VOCAB, ROWS)
    ids[0] = -1  # a failed row
    targets = np.array(slots)
    targets[1] = SLOTS  # a row that chooses nothing
    before = np.array(state.counts)
    got = np.asarray(run_count(state, rows, jnp.asarray(targets, jnp.int32), jnp.asarray(ids, jnp.int32)).counts)
    for index in range(2, 12):
        before[slots[index], ids[index]] += 2
    assert np.array_equal(got, before)


def test_a_counted_answer_is_the_row_of_a_sequence_that_comes_back() -> None:
    """What the device has counted is what the host writes after a preemption."""
    rng = np.random.default_rng(2)
    sequence = random_sequence(rng, SamplingParams(temperature=0.0, repetition_penalty=1.5))
    rows, state = device_rows([sequence], [5])
    for token_id in rng.integers(0, VOCAB, 30).tolist():
        state = run_count(state, rows, jnp.asarray([5], jnp.int32), jnp.asarray([token_id], jnp.int32))
        sequence.token_ids.append(token_id)
    assert np.array_equal(np.asarray(state.counts)[5], slot_row(sequence, VOCAB).counts)


def test_ends_of_bad_words() -> None:
    words = ((1, 2), (1, 2, 3), (4,), (9, 9, 9))
    sequence = Sequence(
        Request(request_id="x", prompt_token_ids=[1, 9, 9], params=SamplingParams(), seed=0, arrival_s=0.0, bad_words_ids=words)
    )
    assert sequence.needs_host
    assert ends_of_bad_words(sequence) == []  # what the prompt ends with is not the answer's
    for token_id, ends in ((1, [2]), (2, [3]), (9, []), (9, [9]), (1, [2])):
        sequence.token_ids.append(token_id)
        assert ends_of_bad_words(sequence) == ends
