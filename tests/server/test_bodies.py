"""Bodies before and while they are read: how much of them there may be, and which names in them nobody knows."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.errors import InvalidRequestError
from server.protocol.bodies import MAX_IGNORED_NAMES, BodyReader, check_num_parts
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import TABLES
from server.protocol.responses import ResponsesRequest

TEXTS = st.text(st.sampled_from('"\\[]{}:,a\u00e9\n'), max_size=6)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


def num_parts(value: Any) -> int:
    """As the limit counts, of what was parsed."""
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(num_parts, value))
        case dict():
            return 1 + sum(1 + num_parts(inner) for inner in value.values())
        case _:
            return 0


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_parts_are_counted_without_parsing(value: Any, indent: int | None, is_ascii: bool) -> None:
    number, body = num_parts(value), json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode()
    check_num_parts(body, number)
    if number:
        with pytest.raises(InvalidRequestError, match=rf"may hold {number - 1} texts.*limits.max_body_parts.*got \d+ or more"):
            check_num_parts(body, number - 1)


def test_a_body_of_too_many_parts_is_never_parsed() -> None:
    """Parsing it would hold up the event loop for a quarter of a second, whichever thread did it."""
    reader = BodyReader(CompletionRequest, TABLES["/v1/completions"])

    class Parser:
        def decode(self, _: bytes) -> None:
            pytest.fail("it was parsed")

    reader._keys = reader._decoder = Parser()  # type: ignore[assignment]
    for many in (
        ",".join(f'"{index:x}":1' for index in range(330_000)),
        '"metadata":[' + ",".join(["[]"] * 330_000) + "]",
        '"stop":[' + ",".join(['"a"'] * 330_000) + "]",
    ):
        with pytest.raises(InvalidRequestError, match="limits.max_body_parts"):
            reader.read(f'{{"prompt":"x",{many}}}'.encode(), 65_536)


def test_texts_and_numbers_are_no_parts() -> None:
    reader = BodyReader(CompletionRequest, TABLES["/v1/completions"])
    read = reader.read(msgspec.json.encode({"prompt": '[{"\\' * 50_000}), 3)
    assert len(read.content.prompt) == 200_000
    assert reader.read(msgspec.json.encode({"prompt": [[7] * 100_000]}), 4).content.prompt == [[7] * 100_000]


MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
NESTED: list[tuple[str, type[msgspec.Struct], dict[str, Any], tuple[str, ...]]] = [
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE, {**MESSAGE, "odd": 1}, {**MESSAGE, "odd": 2}]}, ("messages.odd",)),
    ("/v1/chat/completions", ChatRequest, {"messages": [{**MESSAGE, "content": [{**PART, "odd": {}}]}]}, ("messages.content.odd",)),
    ("/v1/chat/completions", ChatRequest, {"top": 1, "messages": [{**MESSAGE, "b": 1, "a": 2}]}, ("top", "messages.b", "messages.a")),
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE], "stream_options": {"odd": 1}}, ("stream_options.odd",)),
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE], "chat_template_kwargs": {"any": {"odd": 1}}}, ()),
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE], "metadata": {"any": "x"}, "logit_bias": {"5": 1}}, ()),
    ("/v1/chat/completions", ChatRequest, {"messages": [{**MESSAGE, "tool_calls": [{"any": {"odd": 1}}]}]}, ()),
    ("/v1/completions", CompletionRequest, {"prompt": "x", "stream_options": {"odd": 1}}, ("stream_options.odd",)),
    ("/v1/embeddings", EmbeddingRequest, {"input": "x", "odd": 1}, ("odd",)),
    ("/v1/responses", ResponsesRequest, {"input": [{**ITEM, "odd": 1}]}, ("input.odd",)),
    ("/v1/responses", ResponsesRequest, {"input": [{**ITEM, "content": [{**PART, "odd": 1}]}]}, ("input.content.odd",)),
    ("/v1/responses", ResponsesRequest, {"input": "x", "metadata": {"any": "x"}}, ()),
]


@pytest.mark.parametrize(("path", "kind", "body", "ignored"), NESTED)
def test_unknown_names_are_told_wherever_they_are(
    path: str, kind: type[msgspec.Struct], body: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    assert BodyReader(kind, TABLES[path]).read(msgspec.json.encode(body), 100).ignored == ignored


def test_names_inside_of_objects_are_bounded_like_others() -> None:
    reader = BodyReader(ChatRequest, TABLES["/v1/chat/completions"])
    names = ["a b", "\u00e9", "x" * 64, *(f"n{index}" for index in range(20))]
    body = {"z": 1, "messages": [{**MESSAGE, **dict.fromkeys(names, 1)}]}
    assert reader.read(msgspec.json.encode(body), 100).ignored == ("z", *(f"messages.n{index}" for index in range(MAX_IGNORED_NAMES - 1)))
