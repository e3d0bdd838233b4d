"""What is wrong with an answer is found, wherever a test asks: the checks of all fixtures, on answers that are wrong on purpose."""

import json
from typing import Any

import pytest

from tests.server.conformity import faults_of
from tests.server.door_server import Answer, ClientCounts

GOOD: dict[str, Any] = {"x-request-id": "a", "content-type": "application/json"}
MODEL = {"id": "m", "object": "model", "created": 1, "owned_by": "me"}
NO_ITEMS = {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}
ERROR = {"error": {"message": "m", "type": "t", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("method", "path", "status", "headers", "body", "is_good"),
    [
        ("GET", "/v1/models/org/m", 200, {}, MODEL, True),
        ("GET", "/v1/models/org/m", 200, {}, {"id": "m"}, False),
        ("GET", "/v1/models", 200, {}, {"object": "list", "data": [MODEL]}, True),
        ("GET", "/v1/models", 200, {}, {"object": "list", "data": [{}]}, False),
        ("DELETE", "/v1/responses/r", 200, {}, {"id": "r", "object": "response", "deleted": True}, True),
        ("DELETE", "/v1/responses/r", 200, {}, {"id": "r", "object": "response.deleted", "deleted": True}, False),
        ("GET", "/v1/responses/r?x=1", 200, {}, {}, False),
        ("POST", "/v1/responses/r/cancel", 200, {}, {}, False),
        (
            "GET",
            "/v1/responses/r/input_items",
            200,
            {},
            {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False},
            True,
        ),
        ("GET", "/v1/responses/r/input_items", 200, {}, {"object": "list", "data": []}, False),
        ("POST", "/v1/completions", 200, {}, {"text": "x"}, False),
        ("POST", "/v1/embeddings", 200, {}, {"data": []}, False),
        ("GET", "/health", 503, {}, {"status": "draining"}, True),
        ("GET", "/health", 503, {}, {"status": "odd"}, False),
        ("GET", "/x", 404, {}, ERROR, True),
        ("GET", "/x", 404, {"x-request-id": ""}, ERROR, False),
        ("GET", "/x", 404, {}, {"error": {"message": "m"}}, False),
        ("GET", "/x", 404, {}, {"error": {**ERROR["error"], "message": "in server/app.py"}}, False),
        ("GET", "/x", 429, {}, ERROR, False),
        ("GET", "/x", 429, {"retry-after": "31"}, ERROR, False),
        ("GET", "/x", 429, {"retry-after": "30"}, ERROR, True),
        ("GET", "/x", 500, {}, ERROR, False),
        ("GET", "/x", 500, {"x-should-retry": "false"}, ERROR, True),
        ("HEAD", "/health", 200, {}, {}, False),
    ],
)
def test_a_wrong_answer_is_found(method: str, path: str, status: int, headers: dict[str, str], body: Any, is_good: bool) -> None:
    found = list(faults_of(method, path, status, GOOD | headers, json.dumps(body).encode()))
    assert (found == []) == is_good, found


@pytest.mark.parametrize(
    ("content", "is_good"),
    [
        (b"data: [DONE]\n\n", True),
        (b": ping\n\ndata: " + json.dumps(ERROR).encode() + b"\n\n", True),
        (b"data: {}\r\n\r\n", False),
        (b'data: {"error": 5}\n\n', False),
        (b'data: {"id": "x"}\n\n', False),
    ],
)
def test_a_wrong_event_is_found(content: bytes, is_good: bool) -> None:
    headers = GOOD | {"content-type": "text/event-stream"}
    found = list(faults_of("POST", "/v1/chat/completions", 200, headers, content))
    assert (found == []) == is_good, found


@pytest.mark.parametrize(
    ("told", "is_good"),
    [
        ({"length": 1, "rejected": 1}, True),
        ({"length": 1, "rejected": 1, "aborted": 1}, True),
        ({"length": 2, "rejected": 1}, True),
        ({"length": 1}, False),
        ({"stop": 1, "rejected": 1}, False),
        ({"length": 1, "rejected": 1, "aborted": 2}, False),
    ],
)
def test_books_that_do_not_agree_are_found(told: dict[str, int], is_good: bool) -> None:
    """Three requests: an answer of some length, one that was refused, and one that nobody read."""
    counts = ClientCounts()
    counts.num_begun = 3
    counts.take("POST", "/v1/completions", Answer(200, {}, b'{"choices":[{"finish_reason":"length"}]}'))
    counts.take("POST", "/v1/completions", Answer(400, {}, b"{}"))
    counts.take("GET", "/v1/models", Answer(200, {}, b"{}"))
    if is_good:
        counts.check(told)
    else:
        with pytest.raises(AssertionError):
            counts.check(told)
