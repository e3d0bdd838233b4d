"""Limits that are set otherwise than by default, and their page; `test_limits_as_they_are.py` has the defaults."""

from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import Config, LimitsConfig, LogConfig, SamplingConfig, ServerConfig
from jaxpaged.tokenizer import Tokenizer
from server import limits_document
from tests.server.live import LiveServer, live_server
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.jax

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def test_the_document_is_made_from_the_options() -> None:
    path = Path(__file__).parents[2] / "docs" / "limits.md"
    assert path.read_text(encoding="utf-8") == limits_document.document()


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "x"} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    return {**prompt, "max_tokens": 1, "temperature": 0, **fields}


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": ""}] * number


@pytest.fixture(scope="module")
def limited_module_server(chat_tokenizer: Tokenizer) -> Any:
    config = Config(log=LogConfig(level="error"), server=ServerConfig(max_body=200_000))
    with live_server(chat_tokenizer, config=config) as server:
        yield server


@pytest.fixture
def limited(limited_module_server: LiveServer) -> Any:
    yield limited_module_server
    limited_module_server.after_check()


def test_limits_can_be_lowered(chat_tokenizer: Tokenizer) -> None:
    limits = LimitsConfig(max_n=2, max_prompts=3, max_answers=4, max_stop=0, max_stop_token_ids=1, max_logit_bias=0, max_messages=1)
    config = Config(log=LogConfig(level="error"), limits=limits, sampling=SamplingConfig(max_logprobs=1))
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        (TEXT, {"n": 0}, "n"),
        (TEXT, {"n": 2}, None),
        (TEXT, {"n": 3}, "n"),
        (TEXT, {"prompt": ["a"] * 3}, None),
        (TEXT, {"prompt": ["a"] * 4}, "prompt"),
        (TEXT, {"prompt": ["a"] * 2, "n": 2}, None),
        (TEXT, {"prompt": ["a"] * 3, "n": 2}, "n"),
        (TEXT, {"stop": []}, None),
        (TEXT, {"stop": "a"}, "stop"),
        (TEXT, {"stop_token_ids": [4]}, None),
        (TEXT, {"stop_token_ids": [4, 5]}, "stop_token_ids"),
        (CHAT, {"logit_bias": {}}, None),
        (CHAT, {"logit_bias": {"4": 1}}, "logit_bias"),
        (CHAT, {"messages": messages(2)}, "messages"),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, None),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ]
    with live_server(chat_tokenizer, config=config) as server:
        for path, fields, param in cases:
            reply = server.post(path, body_of(path, **fields))
            assert reply.status == (200 if param is None else 400), fields
            assert param is None or reply.error["param"] == param
        assert server.post(TEXT, body_of(TEXT, n=-1)).error["message"] == "n is from 1 to 2 (limits.max_n), got -1"
    with live_server(chat_tokenizer, config=Config(log=LogConfig(level="error"), limits=LimitsConfig(max_stop_chars=7))) as server:
        for stop in ("", ["a", ""]):
            error = server.post(TEXT, body_of(TEXT, stop=stop)).error
            assert error["param"] == "stop"
            assert "is from 1 to 7 (limits.max_stop_chars), got 0" in error["message"]


def test_bodies_at_the_limit_and_over_it(limited: LiveServer) -> None:
    raw = b'{"prompt": "x", "max_tokens": 1, "user": "%s"}'
    for extra, status in ((0, 200), (1, 413)):
        body = raw % (b"u" * (200_000 - len(raw) + 2 + extra))
        assert len(body) == 200_000 + extra
        reply = limited.post(TEXT, body)
        assert reply.status == status
    assert reply.error["code"] == "body_too_large"


def test_parts_of_a_body_at_the_limit_and_over_it(chat_tokenizer: Tokenizer) -> None:
    config = Config(log=LogConfig(level="error"), limits=LimitsConfig(max_body_parts=300))
    with live_server(chat_tokenizer, config=config) as server:
        for more, status in ((0, 200), (1, 400)):
            body = body_of(CHAT)
            body["metadata"] = {f"key{index}": index for index in range(300 - 12 + more)}
            reply = server.post(CHAT, body)
            assert reply.status == status, reply
        assert reply.error["message"].startswith("The body may hold 300 texts")
        assert "limits.max_body_parts" in reply.error["message"]
        assert "301 or more" in reply.error["message"]


def test_request_ids_at_the_limit_and_over_it(limited: LiveServer) -> None:
    for given in ("a" * 128, "A-Za-z0-9._:-"):
        assert limited.request("POST", TEXT, body_of(TEXT), {"x-request-id": given}).headers["x-request-id"] == given
    for given in ("a" * 129, "with space", "ünicode".encode().decode("latin-1"), ""):
        made = limited.request("POST", TEXT, body_of(TEXT), {"x-request-id": given}).headers["x-request-id"]
        assert made != given
        assert made.isascii()


def test_huge_numbers_are_refused_at_once(limited: LiveServer) -> None:
    """O-29: while others are served, and without slowing health down."""
    for n in (0, -1, 65, 10**6, 2**63, 2**64, 10**30, 1.5):
        watch = Stopwatch()
        reply = limited.post(TEXT, body_of(TEXT, n=n, prompt=["x"] * 3))
        assert (reply.status, reply.error["param"]) == (400, "n"), n
        assert limited.get("/livez").status == 200
        assert watch.is_within(0.5)
