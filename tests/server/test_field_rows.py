"""Rows of the table of fields, asked of a live server: what it calls without effect has none, and what it calls served has one."""

from typing import Any

import pytest

from server.protocol.fields import TABLES, Field, Use
from tests.server.live import LiveServer

pytestmark = pytest.mark.jax

TEXT, CHAT, RESPONSES, EMBEDDINGS, SCORE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score"

PLAIN: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hello two words", "temperature": 0, "max_tokens": 12},
    CHAT: {"messages": [{"role": "user", "content": "hello two words"}], "temperature": 0, "max_tokens": 12},
    RESPONSES: {"input": "hello two words", "temperature": 0, "max_output_tokens": 12},
    EMBEDDINGS: {"input": "hello two words"},
    SCORE: {"prompt": "hello", "continuation": " two words"},
}

IDLE = [(path, field) for path in PLAIN for field in TABLES[path] if field.use is Use.NO_EFFECT]

UNUSUAL = ("low", {"type": "content", "content": "something else altogether"})


def told(path: str, body: Any) -> Any:
    """What an answer says, without names, times and what the cache had."""
    if path in (TEXT, CHAT):
        return body["choices"]
    if path == RESPONSES:
        return [part["text"] for item in body["output"] for part in item["content"]]
    return body["data"]


@pytest.mark.parametrize(("path", "field"), IDLE, ids=lambda value: value if isinstance(value, str) else value.name)
def test_what_is_called_without_effect_has_none(server: LiveServer, path: str, field: Field) -> None:
    expected = told(path, server.post(path, PLAIN[path]).json)
    for value in UNUSUAL:
        reply = server.post(path, {**PLAIN[path], field.name: value})
        assert (reply.status, told(path, reply.json)) == (200, expected)
        assert "x-jaxpaged-ignored" not in reply.headers


EFFECTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_tokens": 3}),
    (CHAT, {"max_completion_tokens": 3, "max_tokens": None}),
    (CHAT, {"stop": "e"}),
    (CHAT, {"logit_bias": {"70": 100}}),
    (CHAT, {"allowed_token_ids": [70]}),
    (CHAT, {"n": 2}),
    (CHAT, {"add_generation_prompt": False}),
    (CHAT, {"continue_final_message": True}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"return_token_ids": True}),
    (CHAT, {"truncate_prompt_tokens": 2}),
    (CHAT, {"use_beam_search": True, "n": 2}),
    (TEXT, {"max_tokens": 3}),
    (TEXT, {"echo": True}),
    (TEXT, {"logprobs": 1}),
    (TEXT, {"prompt_logprobs": 1}),
    (TEXT, {"logprobs": 1, "return_tokens_as_token_ids": True}),
    (TEXT, {"bad_words": ["e", "a", "i", "o", "u"]}),
    (TEXT, {"truncate_prompt_tokens": 1}),
    (RESPONSES, {"instructions": "be brief"}),
    (RESPONSES, {"max_output_tokens": 3}),
    (EMBEDDINGS, {"encoding_format": "base64"}),
    (EMBEDDINGS, {"truncate_prompt_tokens": 1}),
    (SCORE, {"continuation": [" two", " world"]}),
]


@pytest.mark.parametrize(("path", "fields"), EFFECTS, ids=[f"{path}-{'+'.join(fields)}" for path, fields in EFFECTS])
def test_what_is_called_served_has_an_effect(server: LiveServer, path: str, fields: dict[str, Any]) -> None:
    plain = server.post(path, PLAIN[path])
    other = server.post(path, {**PLAIN[path], **fields})
    assert other.status == 200
    assert "x-jaxpaged-ignored" not in other.headers
    assert told(path, other.json) != told(path, plain.json)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"max_tokens": 5}, "max_tokens"),
        (RESPONSES, {"n": 2}, "n"),
        (RESPONSES, {"stop_token_ids": [5]}, "stop_token_ids"),
        (CHAT, {"max_output_tokens": 5}, "max_output_tokens"),
        (CHAT, {"instructions": "x"}, "instructions"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (TEXT, {"max_completion_tokens": 5}, "max_completion_tokens"),
        (TEXT, {"top_logprobs": 5}, "top_logprobs"),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
def test_fields_of_another_endpoint_are_refused_by_name(server: LiveServer, path: str, fields: dict[str, Any], param: str) -> None:
    reply = server.post(path, {**PLAIN[path], **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
