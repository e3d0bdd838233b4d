"""Every limit on what a request may ask for: served at the limit, refused one over it, at once, with field, number and limit."""

import time
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


SMALL = LimitsConfig(max_messages=20, max_answers=100)
"""As by default, but for what would not fit in the context of the test's engine or take seconds."""

CASES = [
    (TEXT, "n", 64, 65, "limits.max_n", lambda number: {"n": number}),
    (CHAT, "n", 64, 65, "limits.max_n", lambda number: {"n": number}),
    (TEXT, "prompt", 100, 257, "limits.max_prompts", lambda number: {"prompt": ["x"] * number}),
    (TEXT, "n", 50, 51, "limits.max_answers", lambda number: {"prompt": ["x"] * number, "n": 2}),
    (CHAT, "messages", 20, 21, "limits.max_messages", lambda number: {"messages": messages(number)}),
    (TEXT, "stop", 16, 17, "limits.max_stop", lambda number: {"stop": ["zz"] * number}),
    (CHAT, "stop", 512, 513, "limits.max_stop_chars", lambda number: {"stop": "z" * number}),
    (TEXT, "stop_token_ids", 128, 129, "limits.max_stop_token_ids", lambda number: {"stop_token_ids": list(range(number))}),
    (CHAT, "logit_bias", 303, 1025, "limits.max_logit_bias", lambda number: {"logit_bias": {str(i): 0 for i in range(number)}}),
    (TEXT, "logprobs", 20, 21, "sampling.max_logprobs", lambda number: {"logprobs": number}),
    (CHAT, "top_logprobs", 20, 21, "sampling.max_logprobs", lambda number: {"logprobs": True, "top_logprobs": number}),
]


@pytest.fixture(scope="module")
def limited_module_server(chat_tokenizer: Tokenizer) -> Any:
    config = Config(log=LogConfig(level="error"), limits=SMALL, server=ServerConfig(max_body=200_000))
    with live_server(chat_tokenizer, config=config) as server:
        yield server


@pytest.fixture
def limited(limited_module_server: LiveServer) -> Any:
    yield limited_module_server
    limited_module_server.after_check()


@pytest.mark.parametrize(("path", "field", "at", "over", "option", "make"), CASES, ids=[f"{case[4]}-{case[0]}" for case in CASES])
def test_at_the_limit_and_over_it(limited: LiveServer, path: str, field: str, at: int, over: int, option: str, make: Any) -> None:
    assert limited.post(path, body_of(path, **make(at))).status == 200
    cheapest_s = 1.0
    for _ in range(3):
        begun_s = time.process_time()
        reply = limited.post(path, body_of(path, **make(over)))
        cheapest_s = min(cheapest_s, time.process_time() - begun_s)
        assert reply.status == 400
        assert reply.error["param"] == field
        assert option in reply.error["message"]
        assert any(str(number) in reply.error["message"] for number in (over, 2 * over))
    assert cheapest_s < 0.05, "seconds of the processor, which others cannot take away; the client's are among them"


def test_limits_can_be_lowered(chat_tokenizer: Tokenizer) -> None:
    limits = LimitsConfig(max_n=2, max_prompts=3, max_answers=4, max_stop=0, max_stop_token_ids=1, max_logit_bias=0, max_messages=1)
    config = Config(log=LogConfig(level="error"), limits=limits, sampling=SamplingConfig(max_logprobs=1))
    cases: list[tuple[str, dict[str, Any], str | None]] = [
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
