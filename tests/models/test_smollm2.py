"""SmolLM2's logits, from the GGUF file through the paged model, against Hugging Face transformers on the same weights."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged.layers.rope_frequencies import make_rope_table
from jaxpaged.step_program import LoadedModel
from tests.models.paged_model import PagedModel, load, with_config
from tests.smollm2_golden import Golden, read_golden

pytestmark = [pytest.mark.jax, pytest.mark.real]

BUCKET = 160
NUM_NEAR = 2
"""Far positions that lie within the bucket, beside the prompts."""


@pytest.fixture(scope="module")
def golden() -> Golden:
    return read_golden()


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load(smollm2_path, "float32")


def texts(golden: Golden) -> list[list[int]]:
    """The prompts whose first logits are kept, and the near part of the long text: together one step."""
    near = golden.far_text[: golden.far_positions[NUM_NEAR - 1] + 1]
    return [*(golden.prompts[name].prompt_token_ids for name in golden.logit_prompts), near]


def run(model: LoadedModel, golden: Golden) -> list[np.ndarray]:
    """Logits [tokens, vocab] of each text."""
    prompts = texts(golden)
    paged = PagedModel(model, context=max(map(len, prompts)), num_pages=32, seed=1)
    return paged.feed([(paged.start(token_ids), len(token_ids)) for token_ids in prompts], BUCKET)


@pytest.fixture(scope="module")
def logits(model: LoadedModel, golden: Golden) -> list[np.ndarray]:
    return run(model, golden)


def test_logits_after_prompts_equal_golden(logits: list[np.ndarray], golden: Golden) -> None:
    assert golden.logit_error(np.stack([own[-1] for own in logits[:-1]]), "first") < 1e-3


def test_o52_logits_at_near_positions_equal_golden(logits: list[np.ndarray], golden: Golden) -> None:
    assert golden.thetas["theta"] == 100_000
    near = slice(NUM_NEAR)
    assert golden.logit_error(logits[-1][golden.far_positions[near]], "theta", near) < 1e-3


@pytest.mark.tier("long", area="models")
@pytest.mark.parametrize("key", ["theta", "other_theta"])
def test_o52_logits_far_into_a_text_equal_golden(model: LoadedModel, golden: Golden, key: str) -> None:
    """With the file's rotary base and with the one that a config without any stands for."""
    config = model.config
    table = make_rope_table(None, theta=golden.thetas[key], dims=config.head_dim, max_positions=config.max_positions)
    turned = config._replace(rope=config.rope._replace(tables=(table,)))
    paged = PagedModel(with_config(model, turned), context=len(golden.far_text))
    sequence, rows = paged.start(golden.far_text), []
    while left := sequence.num_uncomputed_tokens:
        first = sequence.num_computed_tokens
        (logits,) = paged.feed([(sequence, min(BUCKET, left))], BUCKET)
        rows += [logits[position - first] for position in golden.far_positions if first <= position < first + BUCKET]
    assert golden.logit_error(np.stack(rows), key) < 1e-3


ROUNDING = 2**-8 * 3**-0.5 * (3 / (8 * np.log(2))) ** 0.5
"""Root mean square of what rounding to bfloat16 changes a number by, of the number: an error spread evenly over half a spacing, 2**-8 of
the leading power of two, for mantissas spread evenly in their logarithm."""

ROUNDINGS_A_LAYER = 7 + 19
"""Matrices, and intermediate results: 2 x 2 of the norms, q, k, v, 2 of rope, the softmax, what attention sums, o, gate, silu, up, their
product, down, 2 residual sums."""


def test_bfloat16_errs_no_more_than_its_roundings_and_keeps_the_first_choice(
    smollm2_path: Path, logits: list[np.ndarray], golden: Golden
) -> None:
    """Independent errors add up as squares: relative to the spread of a row's logits, at most roundings ** 0.5 times the error of one.

    Measured: half of that, as what a branch rounds is less than the residual stream it is added to. The first choice can change only where
    the margin is no larger than the error of a difference of two logits, of which four standard deviations are allowed.
    """
    narrow = load(smollm2_path, "bfloat16")
    assert {str(leaf.dtype) for leaf in narrow.params} == {"bfloat16"}
    exact, rounded = np.concatenate(logits), np.concatenate(run(narrow, golden))
    error = rounded - exact
    spread = exact.std(axis=1)
    expected = ROUNDING * (narrow.config.layers * ROUNDINGS_A_LAYER) ** 0.5
    assert (np.mean(error.std(axis=1) ** 2) / np.mean(spread**2)) ** 0.5 < expected

    second, first = np.sort(exact, axis=1)[:, -2:].T
    is_clear = first - second > 4 * 2**0.5 * expected * spread
    assert is_clear.mean() > 0.5
    np.testing.assert_array_equal(exact.argmax(axis=1)[is_clear], rounded.argmax(axis=1)[is_clear])
