"""Chat templates of seventy models against transformers' own renderer, and tokenizers against llama.cpp's recorded ids."""

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.chat_template import ChatTemplate
from jaxpaged.errors import ChatTemplateError
from jaxpaged.tokenizer import Tokenizer
from tests.text import llama_cpp_sdist

pytestmark = pytest.mark.tier("long", area="sampling")

MIN_TEMPLATES, MIN_VOCABULARIES, MIN_TEXTS = 60, 15, 650
SEPARATOR = "\n__ggml_vocab_test__\n"
BOS, EOS = "<s>", "</s>"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "which"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}}],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"sky": "clear"}'}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([user("Hi <b> é 東京")], None),
    "system": ([system("Be brief."), user("Hi")], None),
    "turns": ([system("s"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")], None),
    "thoughts": ([user("a"), assistant("<think>x</think>b"), user("c")], None),
    "two systems": ([system("s"), system("t"), user("a")], None),
    "assistant first": ([assistant("x"), user("y")], None),
    "tools": ([user("weather?")], TOOLS),
    "call": ([user("weather?"), CALL, RESULT], TOOLS),
    "call and on": ([system("x"), user("weather?"), CALL, RESULT, assistant("clear"), user("and?")], TOOLS),
}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_cpp_sdist.fetch(tmp_path_factory.mktemp("llama_cpp"))


def without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def test_templates_show_what_transformers_shows(vectors: Path) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    templates = sorted(vectors.glob("*.jinja"))
    assert len(templates) >= MIN_TEMPLATES
    differ, num_shown = [], 0
    for path in templates:
        source = path.read_text(encoding="utf-8")
        theirs, ours = _compile_jinja_template(source), ChatTemplate(source, BOS, EOS, timeout_s=20.0)
        for name, (messages, tools) in CONVERSATIONS.items():
            for opens in (False, True):
                variables = {"tools": tools, "documents": None, "bos_token": BOS, "eos_token": EOS, "add_generation_prompt": opens}
                want: str | None
                got: str | None
                try:
                    want = theirs.render(messages=[without_nulls(message) for message in messages], **variables)
                except Exception:  # a template refuses what its model cannot take
                    want = None
                try:
                    got = ours.render(messages, add_generation_prompt=opens, tools=tools)
                except ChatTemplateError:
                    got = None
                num_shown += want is not None
                if got != want:
                    differ.append((path.name, name, opens))
    assert differ == []
    assert num_shown > 15 * MIN_TEMPLATES


def test_tokenizers_give_the_recorded_ids(vectors: Path, tmp_path: Path) -> None:
    differ, read, num_texts = [], [], 0
    for path in sorted(vectors.glob("*.gguf")):
        inputs, outputs = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
        if not inputs.exists():
            continue
        tokenizer = Tokenizer.from_gguf(path, tmp_path)
        read.append(path.name)
        texts = inputs.read_text(encoding="utf-8").removesuffix(SEPARATOR).split(SEPARATOR)
        lines = outputs.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for text, line in zip(texts, lines, strict=True):
            # Qwen's own tokenizer composes characters first, which llama.cpp leaves out.
            if "qwen" in path.name and not unicodedata.is_normalized("NFC", text):
                continue
            num_texts += 1
            if tokenizer.encode(text, add_special_tokens=False) != [int(number) for number in line.split()]:
                differ.append((path.name, text[:40]))
    assert differ == []
    assert len(read) >= MIN_VOCABULARIES
    assert num_texts >= MIN_TEXTS
