"""Qwen 1's tokenizer against what the package `tiktoken` makes of the same file."""

import base64
import json
from pathlib import Path

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.tiktoken_files import QWEN_TIKTOKEN
from jaxpaged.tokenizer import Tokenizer
from tests.text.tiktoken_texts import TEXTS, TIKTOKEN_IDS, TINY_TIKTOKEN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / QWEN_TIKTOKEN).write_bytes(TINY_TIKTOKEN.read_bytes())
    return tmp_path


def test_ids_are_those_of_tiktoken(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    golden = json.loads(TIKTOKEN_IDS.read_text())
    assert set(golden) == set(TEXTS)
    for text, ids in golden.items():
        assert tokenizer.encode(text) == ids, text


def test_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text in ("Grüße aus Köln, 你好世界", "<|im_start|>user\nhi<|im_end|>\n", "x = [1, 2]\n\n\tif y:\r\n 😀"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_control_tokens_follow_the_ranks(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|><|extra_0|><|extra_204|>") == [400, 401, 402, 403, 607]
    assert tokenizer.vocab_size == 608
    assert tokenizer.eos_token_ids == (402, 400)
    assert tokenizer.chat_template is None


def test_chat_models_lay_conversations_out_as_their_own_code_does(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    expected = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [*lines[:300], b"!!! 300", *lines[301:]], "line 301: a token in base64"),
        (lambda lines: [*lines[:300], lines[300].replace(b" 300", b" x"), *lines[301:]], "line 301: a token in base64"),
        (lambda lines: [*lines[:300], *lines[301:]], "line 301: token 300 is due"),
        (lambda lines: [*lines, lines[7].split()[0] + b" 400"], "line 401: token 400 is due, new"),
        (lambda lines: [*lines, base64.b64encode(b"x" * 2000) + b" 400"], "line 401: token 400 is due"),
        (lambda lines: lines[:200], "no token for 56 of the 256 bytes"),
    ],
)
def test_malformed_files_are_refused_by_line(change, complaint: str, folder: Path) -> None:
    path = folder / QWEN_TIKTOKEN
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(CheckpointError, match=complaint):
        Tokenizer.from_folder(folder)
