"""An encoder behind the engine: vectors of whole prompts, and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.beam_search import BeamSearchParams
from jaxpaged.errors import ConfigError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from jaxpaged.llm import LLM
from tests.models.encoder_cases import GOLDEN_HIDDEN, LENGTHS, VOCAB, prompt_of
from tests.tiny_engine import tiny_config
from tests.tiny_families import write_tiny_bert
from tests.tiny_model import write_tiny_tokenizer

pytestmark = pytest.mark.jax

SIZES = {"max_num_batched_tokens": 128, "token_buckets": (32, 128)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_tiny_bert(folder, vocab_size=VOCAB)
    write_tiny_tokenizer(folder, vocab_size=300, chat_template=None)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path, programs: Path) -> Iterator[LLM]:
    with LLM(config=tiny_config(folder, programs=programs, **SIZES), sinks=[]) as llm:
        yield llm


def test_embeddings_are_those_of_transformers(llm: LLM) -> None:
    """Many at once, more than fit into a step, so that prompts wait for a step that holds them whole."""
    lengths = [length for length in LENGTHS for _ in range(3)]
    outputs = llm.embed([{"prompt_token_ids": prompt_of(length)} for length in lengths])
    with np.load(GOLDEN_HIDDEN) as golden:
        for length, output in zip(lengths, outputs, strict=True):
            mean = golden[str(length)][-1]
            assert np.dot(output.outputs.embedding, mean / np.linalg.norm(mean)) > 1 - 1e-6
            assert output.num_cached_tokens == 0
    assert llm.engine.pages.num_in_use == 0


def test_a_prompt_is_as_long_as_there_are_positions_at_most(llm: LLM) -> None:
    assert len(llm.embed({"prompt_token_ids": [5] * 128})[0].outputs.embedding) == 84
    with pytest.raises(ContextLengthError):
        llm.embed({"prompt_token_ids": [5] * 129})


def test_what_is_no_embedding_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="encoder: it makes embeddings"):
        llm.generate({"prompt_token_ids": [5]})
    with pytest.raises(InvalidRequestError, match="encoder"):
        llm.score({"prompt_token_ids": [5]}, [6])
    with pytest.raises(InvalidRequestError, match="encoder"):
        llm.beam_search({"prompt_token_ids": [5]}, BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_step_that_is_shorter_than_a_prompt_may_be_is_refused(folder: Path, programs: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens 64 is less than the 128 tokens"):
        LLM(config=tiny_config(folder, programs=programs), sinks=[])


def test_another_pooling_is_refused_by_name(folder: Path, programs: Path, tmp_path: Path) -> None:
    write_tiny_bert(tmp_path, vocab_size=VOCAB)
    write_tiny_tokenizer(tmp_path, vocab_size=300, chat_template=None)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(UnsupportedModelError, match="pooling_mode_cls_token is not supported"):
        LLM(config=tiny_config(tmp_path, programs=programs, **SIZES), sinks=[])
