"""The encoder against transformers, and what no company changes."""

import functools
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpaged.batch import BatchLayout, unpack
from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.scheduler import ScheduledRow
from jaxpaged.step_packer import pack_alone
from jaxpaged.step_program import LoadedModel
from tests.models.encoder_cases import GOLDEN_HIDDEN, LENGTHS, VOCAB, prompt_of, told
from tests.models.paged_model import PagedModel, load
from tests.tiny_families import write_tiny_bert
from tests.tiny_model import save_safetensors

pytestmark = pytest.mark.jax

BUCKET = 256
ATOL = 1e-4


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("bert")
    write_tiny_bert(folder, vocab_size=VOCAB)
    return load(folder)


@functools.cache
def hidden_program(graphdef: Any, treedef: Any, layout: BatchLayout) -> Any:
    """Jitted (params, cache, blob) -> hidden states of every token."""
    return jax.jit(lambda params, cache, blob: nnx.merge(graphdef, jax.tree.unflatten(treedef, params))(cache, unpack(blob, layout))[0])


def hidden_of(loaded: LoadedModel, prompts: Seq[Seq[int]], seed: int | None = None) -> list[np.ndarray]:
    """Hidden states [tokens, embed] of each prompt, all in one step over a pool of NaN."""
    model = PagedModel(loaded, context=128, num_pages=40, seed=seed)
    layout = model.layout(BUCKET)
    rows = [
        ScheduledRow(model.start(prompt), len(prompt), 0, samples=True, slot=index, takes_from_slot=False, epoch=0)
        for index, prompt in enumerate(prompts)
    ]
    blob = pack_alone(rows, layout, loaded.config.vocab)
    hidden = hidden_program(loaded.graphdef, loaded.treedef, layout)(loaded.params, model.cache, blob)
    return np.split(np.asarray(hidden), np.cumsum([len(prompt) for prompt in prompts]))[: len(prompts)]


def test_hidden_states_are_those_of_transformers(encoder: LoadedModel) -> None:
    """To 1e-4; and the mean, which is the embedding, to a cosine of 0.9999 and far above."""
    with np.load(GOLDEN_HIDDEN) as golden:
        for length in LENGTHS:
            (hidden,) = hidden_of(encoder, [prompt_of(length)])
            expected = golden[str(length)]
            np.testing.assert_allclose(told(hidden), expected, atol=ATOL)
            mean, theirs = told(hidden)[-1], expected[-1]
            assert mean @ theirs / np.linalg.norm(mean) / np.linalg.norm(theirs) > 1 - 1e-6


def test_company_and_the_order_of_pages_do_not_show(encoder: LoadedModel) -> None:
    prompts = [prompt_of(length) for length in (2, 127, 1, 17, 64)]
    together = hidden_of(encoder, prompts, seed=3)
    for prompt, hidden in zip(prompts, together, strict=True):
        np.testing.assert_allclose(hidden, hidden_of(encoder, [prompt])[0], atol=ATOL)


def test_the_first_token_sees_the_last(encoder: LoadedModel) -> None:
    prompt = prompt_of(64)
    one, other = hidden_of(encoder, [prompt, [*prompt[:-1], (prompt[-1] + 1) % VOCAB]])
    assert np.abs(one[0] - other[0]).max() > 0.01


def test_missing_extra_and_misshapen_tensors_are_refused_together(tmp_path: Path) -> None:
    tensors = write_tiny_bert(tmp_path, vocab_size=VOCAB)
    tensors["extra.weight"] = tensors.pop("encoder.layer.1.output.dense.bias")
    tensors["embeddings.LayerNorm.bias"] = tensors["embeddings.LayerNorm.bias"][1:]
    save_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    for name in ("extra.weight", "encoder.layer.1.output.dense.bias", "embeddings.LayerNorm.bias"):
        assert name in str(refused.value)


def test_the_pooler_may_be_missing_and_positions_be_there(tmp_path: Path) -> None:
    """As older savers write them: constants, and integers."""
    tensors = write_tiny_bert(tmp_path, vocab_size=VOCAB)
    tensors["embeddings.position_ids"] = np.arange(128, dtype=np.int64)[None]
    save_safetensors(tmp_path / "model.safetensors", {name: array for name, array in tensors.items() if "pooler" not in name})
    assert load(tmp_path).config.layers == 3


@pytest.mark.parametrize("change", [{"position_embedding_type": "relative_key"}, {"is_decoder": True}, {"hidden_act": "relu"}])
def test_variants_that_are_not_run_are_refused_by_name(change: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_bert(tmp_path, vocab_size=VOCAB, config=change)
    name, value = next(iter(change.items()))
    with pytest.raises(UnsupportedModelError, match=value if isinstance(value, str) else name):
        load(tmp_path)
