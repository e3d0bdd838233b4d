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


@pytest.mark.parametrize("size", [2, 4, 8, 9, 16, 0, -1])
def test_o59_counts_that_nine_heads_do_not_allow_are_refused_with_those_they_do(size: int, folder: Path, tmp_path: Path) -> None:
    """As SmolLM2 has them, with 3 key heads: 1 and 3 devices share them, and 9 where JAX has so many."""
    write_tiny_llama(tmp_path / "nine", heads=9, kv_heads=3, hidden=72, layers=1)
    with pytest.raises(ConfigError) as refused:
        LLM(str(tmp_path / "nine"), tensor_parallel_size=size, sinks=[])
    said = {9: "needs 9 devices and JAX has 1 device; allowed for tensor_parallel_size: 1"}
    said |= {count: f"tensor_parallel_size must be an integer from 1 to 4096; got {count}" for count in (0, -1)}
    assert said.get(size, f"tensor_parallel_size {size} does not divide the model's 9 heads; allowed: 1, 3, 9") in refused.value.message
