"""Copies of a model share what was read and converted for the first of them."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged import model_source
from jaxpaged.config import ModelConfig
from jaxpaged.loading.sources import resolve
from jaxpaged.model_source import ModelSource
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax


def test_copies_that_load_one_after_the_other_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path)
    conversions = []

    def convert(*args: object, **options: object) -> dict[str, np.ndarray]:
        conversions.append(args)
        return original(*args, **options)  # type: ignore[arg-type]

    original = model_source.convert_weights
    monkeypatch.setattr(model_source, "convert_weights", convert)
    config = ModelConfig(model=str(tmp_path), max_kept_weights=0)
    source = ModelSource(resolve(config), config, is_gpu=False, num_threads=1)
    copies = [source.load(is_last=number == 2) for number in range(3)]
    assert len(conversions) == 1
    for leaves in zip(*(copy.params for copy in copies), strict=True):
        assert len({np.asarray(leaf).tobytes() for leaf in leaves}) == 1
    # Nothing is kept on the host for a load that comes later.
    source.load()
    assert len(conversions) == 2
