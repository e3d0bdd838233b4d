"""O-54 from end to end: a tiny GGUF file answers as the Hugging Face folder of the same weights does."""

from pathlib import Path

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import ChatTemplateError
from tests.tiny_engine import tiny_config
from tests.tiny_model import write_tiny_gguf, write_tiny_llama

pytestmark = pytest.mark.jax

PROMPT = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def start(path: Path, programs: Path) -> LLM:
    return LLM(config=tiny_config(path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16), sinks=[])


def test_o54_a_gguf_file_answers_as_the_folder_and_refuses_chat_without_a_template(tmp_path: Path, programs: Path) -> None:
    write_tiny_llama(tmp_path / "folder")
    write_tiny_gguf(tmp_path / "tiny.gguf", rope_freqs=np.ones(8), chat_template=None)
    with start(tmp_path / "folder", programs) as folder, start(tmp_path / "tiny.gguf", programs) as gguf:
        (expected,), (answer,) = (llm.generate(PROMPT, GREEDY, use_tqdm=False) for llm in (folder, gguf))
        assert answer.prompt_token_ids == expected.prompt_token_ids
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        assert answer.outputs[0].text == expected.outputs[0].text
        assert len(folder.chat(MESSAGES, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24
        with pytest.raises(ChatTemplateError, match="chat template"):
            gguf.chat(MESSAGES, GREEDY, use_tqdm=False)
        assert gguf.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text == expected.outputs[0].text
