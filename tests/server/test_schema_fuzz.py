"""B2: bodies drawn from our own OpenAPI document, right and wrong ones: no answer 5xx, none that the document does not declare.

Schemathesis draws the bodies and compares the answers with the document; the books are checked by `LiveServer` as everywhere.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck
from litestar import Litestar, Response, get, post
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from jaxpaged.config import Config, LimitsConfig, LogConfig
from jaxpaged.tokenizer import Tokenizer
from server.app import create_app
from server.openapi import make_document
from server.operations import Operation
from server.protocol.models import TokenizeRequest, TokenizeResponse
from server.service import Service
from tests.server.door_server import door_server
from tests.server.live import LiveServer, Reply, live_server, talker

pytestmark = pytest.mark.jax

CHECKS = [schemathesis.checks.not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

DOCUMENT: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(make_document(create_app(Service(Config())))))

OPERATIONS = [f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods]


def operation_of(document: dict[str, Any], name: str) -> Any:
    """One operation of a document, as Schemathesis knows it."""
    load_all_checks()
    method, _, path = name.partition(" ")
    schema = schemathesis.openapi.from_dict(document)
    # It reads no more events of a stream than this, and would leave before the end.
    schema.config.max_stream_events = 100_000
    return schema[path][method]


def fuzz(operation: Any, port: int, number: int, then: Callable[[Any, Any], None] = lambda case, response: None) -> None:
    """Asks so many times with right and so many times with wrong bodies; what is answered must be as the document says."""
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        if mode is GenerationMode.NEGATIVE and operation.definition.raw.get("requestBody") is None:
            continue

        @hypothesis.seed(0)
        @hypothesis.settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @hypothesis.given(case=operation.as_strategy(mode))
        def ask(case: Any) -> None:
            response = case.call(base_url=f"http://127.0.0.1:{port}")
            then(case, response)
            if response.headers.get("content-type", [""])[0] != "text/event-stream":
                case.validate_response(response, checks=CHECKS)

        ask()


@pytest.fixture(scope="module")
def small_server(chat_tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """Contexts of 64 tokens, so that an answer without a limit is short, and four samples at most."""
    config = Config(log=LogConfig(level="error"), limits=LimitsConfig(max_n=4, max_answers=16))
    with live_server(chat_tokenizer, talker(chat_tokenizer, max_model_len=64), config) as server:
        yield server


@pytest.mark.parametrize("number", [20, pytest.param(500, marks=[pytest.mark.tier("long", area="server"), pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_declared(small_server: LiveServer, name: str, number: int) -> None:
    """B2, O-34."""
    statuses: set[int] = set()

    def then(case: Any, response: Any) -> None:
        headers = {key.lower(): values[0] for key, values in response.headers.items()}
        reply = Reply(response.status_code, headers, response.content)
        n = case.body.get("n") if isinstance(case.body, dict) else None
        small_server.take(case.method, case.formatted_path, reply, n if isinstance(n, int) and n > 0 else 1)
        statuses.add(reply.status)

    fuzz(operation_of(DOCUMENT, name), small_server.port, number, then)
    small_server.after_check()
    if name.startswith("POST"):
        assert statuses & {400, 404}, "no wrong body was wrong"


ANSWER = Operation(summary="Planted", tag="x", body=TokenizeRequest, answer=TokenizeResponse, statuses=(400,))


@post("/planted/nothing", status_code=200, opt={"operation": ANSWER}, name="nothing")
async def nothing() -> Response[bytes]:
    """Answers without what it declares."""
    return Response(b"{}", media_type="application/json")


@post("/planted/teapot", status_code=200, opt={"operation": ANSWER}, name="teapot")
async def teapot() -> Response[bytes]:
    """Answers with a status that it does not declare."""
    return Response(b'{"error":{"message":"","type":"","param":null,"code":null}}', status_code=418, media_type="application/json")


@post("/planted/broken", status_code=200, opt={"operation": ANSWER}, name="broken")
async def broken() -> Response[bytes]:
    """Declares 500, and must not answer it."""
    return Response(b'{"error":{"message":"","type":"","param":null,"code":null}}', status_code=500, media_type="application/json")


@get("/planted/text", opt={"operation": ANSWER}, name="text")
async def text() -> Response[str]:
    """Another type than it declares."""
    return Response("x", media_type="text/plain")


@pytest.mark.parametrize("name", ["POST /planted/nothing", "POST /planted/teapot", "POST /planted/broken", "GET /planted/text"])
def test_planted_faults_are_found(name: str) -> None:
    app = Litestar([nothing, teapot, broken, text], openapi_config=None, logging_config=None)
    document = msgspec.json.decode(msgspec.json.encode(make_document(app)))
    with door_server(create_app=lambda _: app) as server:  # type: ignore[arg-type, return-value]
        with pytest.raises(FailureGroup):
            fuzz(operation_of(document, name), server.port, 3)
