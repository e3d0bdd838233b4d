"""Marking control tokens in messages and cutting a rendered text at the others."""

from typing import Any

import pytest

from jaxpaged.control_tokens import ControlTokens
from jaxpaged.errors import ChatTemplateError

TOKENS = ControlTokens({"<s>": 1, "</s>": 2, "<s><x>": 3, ">y<": 4, "!": 5})


def test_messages_without_control_tokens_are_left_alone() -> None:
    for content in ("", "hi", "<s", "s>", "! !"):
        assert TOKENS.mark([{"role": "user", "content": content}]) is None


@pytest.mark.parametrize("content", ["<s>", "a<s>b</s>", "<s><x>", "<s>y<", ">y<s>", ["<s>", {"deep": ["</s>"]}], "<<s>s>", ">y<>y<"])
def test_marked_messages_spell_no_control_token(content: Any) -> None:
    """Also where breaking one token uncovers another that began inside it."""
    marked = TOKENS.mark([{"role": "user", "content": content}])
    assert marked is not None
    assert TOKENS.mark(marked.said) is None
    assert repr(marked.said).replace(repr(marked.mark)[1:-1], "") == repr([{"role": "user", "content": content}])


def test_keys_are_marked_too() -> None:
    """Names of tool arguments are the user's words as well."""
    marked = TOKENS.mark([{"role": "user", "content": "x", "arguments": {"</s>": 1}}])
    assert marked is not None
    assert "</s>" not in marked.said[0]["arguments"]


def test_a_rendered_text_is_cut_at_the_templates_own_tokens() -> None:
    marked = TOKENS.mark([{"content": "a</s>b"}])
    assert marked is not None
    said, mark = marked.said[0]["content"], marked.mark
    assert TOKENS.cut(f"<s>user {said}</s><s><x>!", mark) == [1, "user a</s>b", 2, 3, "!"]
    assert TOKENS.cut(said, mark) == ["a</s>b"]
    assert TOKENS.cut("", mark) == []


def test_the_mark_is_a_character_that_nobody_used() -> None:
    used = "".join(chr(code) for code in range(0xF0000, 0xF0005))
    marked = TOKENS.mark([{"content": "<s>" + used}])
    assert marked is not None
    assert marked.mark not in used


def test_a_text_that_leaves_no_mark_is_refused() -> None:
    everything = "".join(chr(code) for code in range(0xF0000, 0x110000))
    with pytest.raises(ChatTemplateError, match="private planes"):
        TOKENS.mark(["<s>", everything])


def test_no_control_tokens_at_all() -> None:
    assert ControlTokens({}).mark([{"content": "<s>"}]) is None
