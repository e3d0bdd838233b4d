"""Beam search and embeddings of SmolLM2 in float32, against Hugging Face transformers (`scripts/make_golden.py --only searches`)."""

import json
from typing import Any

import numpy as np
import pytest

from jaxpaged import LLM, BeamSearchParams
from tests.equality import TIE_MARGIN
from tests.smollm2_golden import FOLDER, read_golden

pytestmark = [pytest.mark.jax, pytest.mark.real]

FEW = ("chat",)
"""All its answers end by themselves, after 8 to 22 tokens; the others are left for the long run."""


def prompt_ids() -> dict[str, list[int]]:
    return {name: prompt.prompt_token_ids for name, prompt in read_golden().prompts.items()}


@pytest.fixture(scope="module")
def golden_beams() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "smollm2_beams.json").read_text(encoding="utf-8"))
    return content


def check_beams(llm: LLM, golden: dict[str, Any], names: tuple[str, ...]) -> None:
    """All answers of the beams, their order and their scores. A search that hung on a tie may end elsewhere."""
    ids = prompt_ids()
    wanted = [prompt for prompt in golden["prompts"] if prompt["name"] in names]
    assert len(wanted) == len(names)
    params = BeamSearchParams(beam_width=golden["beam_width"], max_tokens=golden["max_tokens"])
    outputs = llm.beam_search([ids[prompt["name"]] for prompt in wanted], params)
    ties = []
    for prompt, output in zip(wanted, outputs, strict=True):
        found = [answer.output_token_ids for answer in output.sequences]
        if found == [answer["token_ids"] for answer in prompt["answers"]]:
            scores = [answer["score"] for answer in prompt["answers"]]
            assert [answer.score for answer in output.sequences] == pytest.approx(scores, abs=1e-4)
        else:
            assert prompt["margin"] < TIE_MARGIN, f"{prompt['name']}: {found}"
            ties.append(prompt["name"])
    assert len(ties) <= len(names) // 10, ties


def test_beams_equal_transformers(real_llm: LLM, golden_beams: dict[str, Any]) -> None:
    assert real_llm._intake.eos_token_ids == {golden_beams["eos_token_id"]}
    check_beams(real_llm, golden_beams, FEW)


@pytest.mark.tier("long", area="sampling")
@pytest.mark.timeout(1800)
def test_all_beams_equal_transformers(real_llm: LLM, golden_beams: dict[str, Any]) -> None:
    """Ten prompts, four beams, 32 tokens."""
    names = tuple(prompt["name"] for prompt in golden_beams["prompts"])
    assert len(names) == 10
    check_beams(real_llm, golden_beams, names)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_transformers(real_llm: LLM, pooling: Any) -> None:
    """In one batch, the longest prompt in chunks; in direction, and as they are."""
    ids = prompt_ids()
    with np.load(FOLDER / "smollm2_embeddings.npz") as file:
        expected = {key.removesuffix(f".{pooling}"): array for key, array in file.items() if key.endswith(f".{pooling}")}
    assert len(expected) == 6
    assert max(len(ids[name]) for name in expected) > real_llm.engine.runner.limits.max_num_batched_tokens
    outputs = real_llm.embed([ids[name] for name in expected], pooling=pooling, use_tqdm=False)
    plain = real_llm.embed([ids[name] for name in expected], pooling=pooling, normalize=False, use_tqdm=False)
    for (name, vector), output, raw in zip(expected.items(), outputs, plain, strict=True):
        cosine = float(np.dot(output.outputs.embedding, vector) / np.linalg.norm(vector))
        assert cosine >= 0.9999, name
        assert np.abs(raw.outputs.embedding - vector).max() < 1e-3 * np.abs(vector).max(), name
