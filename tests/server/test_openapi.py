"""GET /openapi.json is right, and GET /docs shows it without anything from elsewhere."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from litestar import Litestar, Response, get

from jaxpaged.config import Config
from server.app import create_app
from server.openapi import make_document
from server.operations import Operation
from server.service import Service
from tests.server.live import LiveServer

pytestmark = pytest.mark.jax

HEALTH = {"/health", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready"}
STREAMS = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(make_document(create_app(Service(Config())))))


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema


def faults(document: dict[str, Any]) -> list[str]:
    """What is wrong with a document."""
    found = []
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        for status, response in operation["responses"].items():
            for media_type, content in response["content"].items():
                schema = resolve(document, content["schema"])
                if status == "200" and media_type == "application/json" and not schema.get("properties"):
                    found.append(f"{where}: a 200 without properties")
                body = "HealthBody" if path in HEALTH and status == "503" else "ErrorBody"
                if int(status) >= 400 and content["schema"] != {"$ref": f"#/components/schemas/{body}"}:
                    found.append(f"{where}: {status} is not {body}")
                if body == "ErrorBody" and ("Retry-After" in response.get("headers", {})) != (status in ("429", "503")):
                    found.append(f"{where}: {status} says when to come again, or not")
        if not {"401", "405", "413", "431", "500", "503"} <= set(operation["responses"]):
            found.append(f"{where}: a status is missing")
        if (path in STREAMS and method == "post") != ("text/event-stream" in operation["responses"]["200"]["content"]):
            found.append(f"{where}: streams or not")
    found += [f"{name}: {path}" for name, schema in document["components"]["schemas"].items() for path in empty_schemas(schema)]
    return found


def empty_schemas(schema: Any, path: str = "") -> Iterator[str]:
    """Places of schemas that say nothing."""
    if isinstance(schema, dict):
        for name, part in schema.get("properties", {}).items():
            if part == {}:
                yield f"{path}/{name}"
        for name, part in schema.items():
            yield from empty_schemas(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from empty_schemas(part, path)


def test_the_document_has_no_fault(document: dict[str, Any]) -> None:
    assert faults(document) == []
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_name}", "/tokenize", "/health", "/metrics"} <= set(
        document["paths"]
    )


def test_its_schemas_are_schemas(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert schema.get("description") or "enum" in schema, name
    references = re.findall(r'"#/components/schemas/(\w+)"', msgspec.json.encode(document).decode())
    assert set(references) <= set(document["components"]["schemas"])


class Nothing(msgspec.Struct):
    """Planted: says nothing."""


def test_a_planted_answer_without_properties_is_found() -> None:
    @get("/planted", opt={"operation": Operation(summary="x", tag="x", answer=Nothing)}, name="planted")
    async def planted() -> Response[bytes]:
        return Response(b"{}")

    found = faults(make_document(Litestar([planted], openapi_config=None, logging_config=None)))
    assert found == ["get /planted: a 200 without properties"]


@pytest.mark.parametrize(("path", "status"), [("/health", "503"), ("/livez", "503"), ("/health", "408"), ("/v1/models", "503")])
def test_a_planted_body_of_an_error_is_found(document: dict[str, Any], path: str, status: str) -> None:
    planted = msgspec.json.decode(msgspec.json.encode(document))
    schema = planted["paths"][path]["get"]["responses"][status]["content"]["application/json"]["schema"]
    schema["$ref"] = schema["$ref"].replace("HealthBody", "VersionBody").replace("ErrorBody", "HealthBody")
    assert [fault for fault in faults(planted) if fault.startswith(f"get {path}: {status}")]


def test_a_planted_route_that_says_nothing_is_found() -> None:
    @get("/planted")
    async def planted() -> dict[str, str]:
        return {}

    with pytest.raises(ValueError, match="planted says nothing"):
        make_document(Litestar([planted], openapi_config=None, logging_config=None))


def test_answers_are_as_the_document_says(server: LiveServer) -> None:
    document = server.get("/openapi.json").json
    replies = {
        ("/v1/chat/completions", "post"): server.chat("x", logprobs=True, timings=True, return_token_ids=True),
        ("/v1/completions", "post"): server.complete("x", logprobs=1, timings=True),
        ("/v1/models", "get"): server.get("/v1/models"),
        ("/v1/models/{model_name}", "get"): server.get("/v1/models/smollm2-135m"),
        ("/tokenize", "post"): server.post("/tokenize", {"prompt": "x"}),
        ("/detokenize", "post"): server.post("/detokenize", {"tokens": [5]}),
        ("/tokenizer_info", "get"): server.get("/tokenizer_info"),
        ("/openapi.json", "get"): server.get("/openapi.json"),
        ("/version", "get"): server.get("/version"),
        ("/load", "get"): server.get("/load"),
        ("/health", "get"): server.get("/health"),
    }
    for (path, method), reply in replies.items():
        schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": document["components"]})
        assert [error.message for error in validator.iter_errors(reply.json)] == [], path
    for path, method, operation in operations(document):
        if path in STREAMS and method == "post":
            schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
            validator = Draft202012Validator({**schema, "components": document["components"]})
            reply = server.chat("x", stream=True) if "chat" in path else server.complete("x", stream=True)
            if path != "/v1/responses":
                assert [error.message for body in reply.json for error in validator.iter_errors(body)] == []


def test_the_page_needs_nothing_from_elsewhere(server: LiveServer) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    text = page.content.decode()
    assert not re.findall(r"(?:src|href)=\"(?!openapi\.json)", text)
    assert "<script" not in text
    for path in server.get("/openapi.json").json["paths"]:
        assert f"<code>{path}</code>" in text
    for field in ("max_completion_tokens", "cache_salt", "prompt"):
        assert f"<code>{field}</code>" in text
