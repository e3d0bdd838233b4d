"""An engine from a config.json alone."""

from pathlib import Path

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.llm import LLM
from jaxpaged.request import SamplingParams
from tests.tiny_engine import tiny_config
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax


def test_it_answers_without_weights_and_without_tokenizer(tmp_path: Path, programs: Path) -> None:
    """Without a tokenizer a token is a byte; with one, it is the model's."""
    write_tiny_llama(tmp_path, has_tokenizer=False)
    (tmp_path / "model.safetensors").unlink()
    config = tiny_config(tmp_path, programs=programs, load_format="dummy", token_buckets=(64,))
    with LLM(config=config, sinks=[]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        outputs = llm.generate(["Grüße"], params)
        assert outputs[0].prompt_token_ids == [llm.get_tokenizer().encode(letter)[0] for letter in "Gr"] + outputs[0].prompt_token_ids[2:]
        assert len(outputs[0].prompt_token_ids) == len("Grüße".encode())
        assert llm.get_tokenizer().decode(outputs[0].prompt_token_ids) == "Grüße"
        assert len(outputs[0].outputs[0].token_ids) == 9


def test_a_folder_without_tokenizer_is_refused_with_weights(tmp_path: Path, programs: Path) -> None:
    write_tiny_llama(tmp_path, has_tokenizer=False)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        LLM(config=tiny_config(tmp_path, programs=programs), sinks=[])
