"""The OpenAPI document, made from the routes themselves: what has no `Operation` is a mistake that is found at the start."""

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from server.errors import ErrorBody
from server.operations import Operation
from server.requests import FINGERPRINT

STATUSES: Final[Mapping[int, str]] = {
    400: "A field is missing, of the wrong type, out of range or not served",
    401: "No API key, or an unknown one",
    404: "No such path, model or id",
    405: "The path does not take the method",
    408: "The request did not come in time",
    413: "The body is too large",
    415: "The body is no JSON in UTF-8, or is compressed",
    429: "Too much waits already",
    431: "The headers are too many or too large",
    500: "The request failed",
    503: "The server starts, stops, or has no engine; or the request waited too long",
    504: "The request took too long",
}

ANY_STATUSES: Final = (401, 405, 408, 413, 431, 500, 503)
"""What any path may answer."""

EVENT_STREAM: Final = "text/event-stream"


def make_document(app: Litestar) -> dict[str, Any]:
    """The document of all that the app serves.

    Raises:
        ValueError: a handler that says nothing of its answer.
    """
    operations = list(_operations(app))
    structs = [ErrorBody]
    for _, _, _, operation in operations:
        kinds = (operation.body, operation.answer, operation.chunk, *operation.other_bodies.values())
        structs += [kind for kind in kinds if kind is not None and kind not in structs]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for path, method, name, operation in operations:
        paths.setdefault(path, {})[method] = _describe(path, name, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxpaged",
            "version": FINGERPRINT.removeprefix("jaxpaged-"),
            "description": "OpenAI's endpoints over a JAX engine. Fields that are not served are refused by name; unknown ones are "
            "ignored and named in the header x-jaxpaged-ignored.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operations(app: Litestar) -> Any:
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            raise ValueError(f"{route.path} is no HTTP route")
        path = re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", route.path_format)
        for handler in route.route_handlers:
            if handler.include_in_schema is False:  # the live page's own
                continue
            methods = sorted(set(handler.http_methods) - {"OPTIONS"})
            for method in methods:
                yield path, method.lower(), handler.name or f"{handler.fn.__name__}{path.replace('/', '_')}", _operation_of(handler)


def _operation_of(handler: HTTPRouteHandler) -> Operation:
    """What a handler carries, or what its annotations say."""
    operation = handler.opt.get("operation")
    if isinstance(operation, Operation):
        return operation
    returned = handler.parsed_fn_signature.return_type.annotation
    answer = next(iter(get_args(returned)), returned)
    is_struct = isinstance(answer, type) and issubclass(answer, msgspec.Struct)
    if not handler.summary or (not is_struct and not isinstance(handler.media_type, str)):
        raise ValueError(f"the handler {handler.fn.__name__} says nothing of its answer")
    return Operation(
        summary=handler.summary,
        tag="Operators",
        answer=answer if is_struct else None,
        media_type="application/json" if is_struct else str(handler.media_type).partition(";")[0],
        other_bodies={status: spec.data_container for status, spec in (handler.responses or {}).items()},
    )


def _describe(path: str, name: str, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "operationId": name, "tags": [operation.tag]}
    if parameters := re.findall(r"\{(\w+)\}", path):
        described["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}} for parameter in parameters
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.body)}}}
    statuses = sorted({*operation.statuses, *ANY_STATUSES})
    failures = {str(status): _failure(status, operation.other_bodies.get(status, ErrorBody)) for status in statuses}
    described["responses"] = {"200": _success(operation), **failures}
    return described


def _success(operation: Operation) -> dict[str, Any]:
    schema = {"type": "string"} if operation.answer is None else _ref(operation.answer)
    content = {operation.media_type: {"schema": schema}}
    if operation.chunk is not None:
        content[EVENT_STREAM] = {"schema": _ref(operation.chunk)}
    return {"description": "The answer", "content": content}


def _failure(status: int, body: type) -> dict[str, Any]:
    failure: dict[str, Any] = {"description": STATUSES[status], "content": {"application/json": {"schema": _ref(body)}}}
    if status in (429, 503) and body is ErrorBody:
        schema = {"type": "integer", "minimum": 1, "maximum": 30}
        failure["headers"] = {"Retry-After": {"description": "Seconds to wait before asking again", "schema": schema}}
    return failure


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
