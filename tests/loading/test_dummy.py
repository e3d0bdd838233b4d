"""Random weights from a config alone: `load_format="dummy"`."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.config import ModelConfig
from jaxpaged.errors import CheckpointError
from jaxpaged.loading.checkpoint import open_checkpoint
from jaxpaged.loading.dummy import draw
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import describe_model, load_model
from jaxpaged.model_source import ModelSource
from jaxpaged.step_program import LoadedModel
from tests.loading.tiny_table import Like
from tests.models.cases import FAMILY_CASES, VARIANT_CASES, Case
from tests.models.paged_model import load

pytestmark = pytest.mark.jax

LLAMA = next(case for case in VARIANT_CASES if case.name == "llama-untied")
CASES = [LLAMA, *FAMILY_CASES[1:], next(case for case in VARIANT_CASES if case.name == "gptoss-mxfp4")]


def config_alone(case: Case, folder: Path) -> Path:
    """A folder with the case's config.json and nothing else."""
    case.write(folder / "whole", **case.options)
    alone = folder / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "whole" / "config.json").read_bytes())
    return alone


def load_dummy(folder: Path, seed: int = 0, dtype: str = "auto") -> LoadedModel:
    config = ModelConfig(model=str(folder), load_format="dummy", dtype=dtype)
    with open_checkpoint(resolve(config), load_format="dummy") as checkpoint:
        return load_model(checkpoint, describe_model(config, checkpoint, is_gpu=False), seed=seed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_family_is_made_from_its_config_alone(case: Case, tmp_path: Path) -> None:
    """The same parameters as with weights, in kind: names, shapes and types."""
    made = load_dummy(config_alone(case, tmp_path), dtype="float32")
    whole = load(tmp_path / "whole")
    assert made.config == whole.config
    assert made.treedef == whole.treedef
    assert [(one.shape, one.dtype) for one in made.params] == [(one.shape, one.dtype) for one in whole.params]


def test_one_seed_gives_the_same_weights_and_another_gives_others(tmp_path: Path) -> None:
    folder = config_alone(LLAMA, tmp_path)
    one, again, other = (load_dummy(folder, seed=seed).params for seed in (3, 3, 4))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, again, strict=True))
    assert sum(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True)) == 3  # norms


def test_weights_already_there_are_not_looked_at(tmp_path: Path) -> None:
    LLAMA.write(tmp_path, **LLAMA.options)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert load_dummy(tmp_path).config.layers == 2


def test_numbers_are_even_draws_as_wide_as_their_inputs_ask_for() -> None:
    made = draw(
        {
            "a.weight": Like((3, 500, 300), np.dtype(np.float32)),
            "b.weight": Like((2000, 1100), np.dtype(ml_dtypes.bfloat16)),
            "c_norm.weight": Like((300,), np.dtype(np.float32)),
            "d.bias": Like((7,), np.dtype(np.float32)),
        },
        seed=0,
    )
    for name, inputs in (("a.weight", 300), ("b.weight", 1100)):
        numbers = made[name].astype(np.float32)
        limit = (3 / inputs) ** 0.5
        assert 0.99 * limit < np.abs(numbers).max() < 1.01 * limit
        assert abs(numbers.mean()) < 0.01 * limit
        assert abs(numbers.std() * inputs**0.5 - 1) < 0.01
    # More numbers than are drawn: rows of the second round are not those of the first.
    rows = made["b.weight"]
    assert len(np.unique(rows.astype(np.float32)[:, :8], axis=0)) == 2000
    assert (made["c_norm.weight"] == 1).all()
    assert (made["d.bias"] == 0).all()


@pytest.mark.parametrize(("named", "dtype"), [("bfloat16", ml_dtypes.bfloat16), (None, np.float32)])
def test_the_type_is_the_one_that_the_config_names(named: str | None, dtype: type, tmp_path: Path) -> None:
    folder = config_alone(LLAMA, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype")
    (folder / "config.json").write_text(json.dumps(config | ({} if named is None else {"dtype": named})))
    assert {param.dtype for param in load_dummy(folder).params} == {np.dtype(dtype)}


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \.gguf file"):
        load_dummy(tmp_path)


def test_nothing_of_it_is_kept_for_another_start(tmp_path: Path) -> None:
    """Neither for another seed nor for the weights that come later."""
    folder = config_alone(LLAMA, tmp_path)

    def start(seed: int | None) -> LoadedModel:
        config = ModelConfig(model=str(folder), load_format="dummy", seed=seed)
        return ModelSource(resolve(config), config, is_gpu=False, num_threads=1).load()

    one, other, unnamed = (start(seed).params for seed in (1, 2, None))
    assert not all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    assert not all(np.array_equal(mine, theirs) for mine, theirs in zip(one, unnamed, strict=True))
