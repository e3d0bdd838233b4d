"""POST /v1/chat/completions: what is answered, whole and streamed."""

from typing import Any

import pytest

from tests.server.live import LiveServer

pytestmark = pytest.mark.jax


def test_a_conversation_is_continued(server: LiveServer) -> None:
    reply = server.chat("hello")
    assert reply.status == 200
    body = reply.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "smollm2-135m"
    (choice,) = body["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert (choice["finish_reason"], choice["logprobs"], len(choice["message"]["content"])) == ("length", None, 8)
    usage = body["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["zzzz"]}, {"return_token_ids": True}])
def test_a_stream_says_the_same(server: LiveServer, fields: dict[str, Any]) -> None:
    whole = server.chat("stream", **fields)
    streamed = server.chat("stream", stream=True, stream_options={"include_usage": True}, **fields)
    assert streamed.headers["content-type"] == "text/event-stream"
    assert streamed.data[-1] == b"[DONE]"
    assert streamed.texts == whole.texts
    assert streamed.json[-1]["choices"] == []
    got, expected = streamed.json[-1]["usage"], whole.json["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got[name] == expected[name]
    assert all(chunk["usage"] is None for chunk in streamed.json[:-1])
