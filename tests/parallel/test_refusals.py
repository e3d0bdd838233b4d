"""Counts that cannot be are refused by the engine before it looks at a weight."""

from pathlib import Path

import msgspec
import pytest

from jaxpaged.config import ParallelConfig
from jaxpaged.errors import ConfigError
from jaxpaged.llm import LLM
from jaxpaged.model_source import ModelSource
from jaxpaged.start import start_engine
from tests.tiny_engine import tiny_config
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def read(*_: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(ModelSource, "read_ahead", read)
    monkeypatch.setattr(ModelSource, "load", read)
    write_tiny_llama(tmp_path / "model", heads=4, layers=1)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (ParallelConfig(tensor_parallel_size=3), "tensor_parallel_size 3 does not divide the model's 4 heads; allowed: 1, 2, 4"),
        (ParallelConfig(tensor_parallel_size=4), "tensor_parallel_size 4 needs 4 devices and JAX has 1 device"),
        (
            ParallelConfig(mesh="configs/meshes/expert-4.yaml"),
            "the mesh axis expert is 4, and the model is no mixture of experts; allowed: 1",
        ),
        (ParallelConfig(mesh="no.yaml"), "cannot read the config file no.yaml"),
    ],
)
def test_counts_are_refused_before_weights_are_read(folder: Path, parallel: ParallelConfig, sentence: str) -> None:
    config = msgspec.structs.replace(tiny_config(folder, programs=Path()), parallel=parallel)
    with pytest.raises(ConfigError) as refused:
        start_engine(config, [])
    assert sentence in refused.value.message


def test_vllms_argument_is_taken(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 8 does not divide"):
        LLM(str(folder), tensor_parallel_size=8, sinks=[])
