"""What any answer of the server must be, whoever asked: bodies by OpenAI's own schemas, errors by ours."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

from tests.openai.validate import errors

GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/score")
HEALTH = ("/health", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready")


class Schemas(NamedTuple):
    """OpenAI's names of what is answered, and of the events of a stream."""

    whole: str
    event: str = ""


SCHEMAS: Mapping[str, Schemas] = {
    r"POST /v1/chat/completions": Schemas("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    r"POST /v1/completions": Schemas("CreateCompletionResponse", "CreateCompletionStreamResponse"),
    r"POST /v1/embeddings": Schemas("CreateEmbeddingResponse"),
    r"GET /v1/models": Schemas("ListModelsResponse"),
    r"GET /v1/models/.+": Schemas("Model"),
    r"POST /v1/responses": Schemas("Response", "ResponseStreamEvent"),
    r"GET /v1/responses/[^/]+": Schemas("Response"),
    r"POST /v1/responses/[^/]+/cancel": Schemas("Response"),
    r"GET /v1/responses/[^/]+/input_items": Schemas("ResponseItemList"),
}
"""Method and path -> the schemas of a 200; what is in no row is not OpenAI's."""

DELETED = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": True}},
    "required": ["id", "object", "deleted"],
    "additionalProperties": False,
}
"""DELETE /v1/responses/{id}: OpenAI's document says nothing of its body, and its reference shows this one."""

HEALTH_BODY = {
    "type": "object",
    "properties": {"status": {"enum": ["starting", "ready", "unready", "draining", "stopped", "dead"]}},
    "required": ["status"],
}
"""What health paths answer, whatever the status."""


def strict_json(content: bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in a body")

    return json.loads(content, parse_constant=refuse)


def data_of(content: bytes) -> list[bytes]:
    """What follows `data: ` in each event."""
    return [line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")]


def faults_of(method: str, path: str, status: int, headers: Mapping[str, str], content: bytes) -> Iterator[str]:
    """What is wrong with an answer.

    Args:
        method, path: of the request; the path with its query or without, empty when it is not known.
        headers: in small letters.
        content: the body; of a stream that was read in part, its whole events.
    """
    path = path.partition("?")[0]
    if not headers.get("x-request-id"):
        yield "no x-request-id"
    if method == "HEAD":
        if content:
            yield "HEAD has a body"
        return
    if path in HEALTH and content[:1] == b"{" and b'"error"' not in content:
        yield from _faults_by(HEALTH_BODY, content)
        return
    if status >= 400:
        yield from _faults_of_error(status, headers, content)
        return
    schemas = next((schemas for pattern, schemas in SCHEMAS.items() if re.fullmatch(pattern, f"{method} {path}")), Schemas(""))
    if headers.get("content-type") == "text/event-stream":
        if b"\r" in content or not content.endswith(b"\n\n"):
            yield "events are not framed by line feeds"
        for data in data_of(content):
            body = {} if data == b"[DONE]" else strict_json(data)
            schema = "ErrorResponse" if "error" in body and "type" not in body else schemas.event
            if body and schema:
                yield from errors(schema, body)
    elif schemas.whole:
        yield from errors(schemas.whole, strict_json(content))
    elif re.fullmatch(r"DELETE /v1/responses/[^/]+", f"{method} {path}"):
        yield from _faults_by(DELETED, content)


def check_answer(method: str, path: str, status: int, headers: Mapping[str, str], content: bytes) -> None:
    """Fails for an answer that has a fault; arguments as `faults_of`."""
    faults = list(faults_of(method, path, status, headers, content))
    assert faults == [], f"{method} {path} {status}: {faults} in {content[:1000]!r}"


def _faults_by(schema: Mapping[str, Any], content: bytes) -> Iterator[str]:
    yield from (error.message for error in Draft202012Validator(schema).iter_errors(strict_json(content)))


def _faults_of_error(status: int, headers: Mapping[str, str], content: bytes) -> Iterator[str]:
    yield from errors("ErrorResponse", strict_json(content))
    text = content.decode()
    if "Traceback" in text or ".py" in text:
        yield "tells of the inside"
    if ("retry-after" in headers) != (status in (429, 503)):
        yield "retry-after is there or not"
    if not 1 <= int(headers.get("retry-after", 1)) <= 30:
        yield "retry-after is out of range"
    if (headers.get("x-should-retry") == "false") != (status >= 500 and status != 503):
        yield "x-should-retry is there or not"
