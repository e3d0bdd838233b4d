"""Every failure as OpenAI's error body, `{"error": {"message", "type", "param", "code"}}`.

`told_error` is the one place where an exception becomes what a client is told. What is no sentence of ours becomes a 500 that says
nothing of the inside; the log has the rest.
"""

import logging
import re
from typing import Any, Final

import msgspec
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.routes import HTTPRoute
from litestar.types import ExceptionHandlersMap

from jaxpaged.errors import (
    AuthenticationError,
    BodyTooLargeError,
    EngineDeadError,
    InvalidRequestError,
    JaxpagedError,
    MethodNotAllowedError,
    NotFoundError,
    RequestFailedError,
)
from server.error_body import error_body, error_headers
from server.ledger import End, record_of

LOG: Final = logging.getLogger("jaxpaged.server")


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: one sentence, the kind of fault by status, the field at fault, and the kind of error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success, as the OpenAPI document shows it."""

    error: ErrorDetail


class ClientLeftError(Exception):
    """The client closed the connection before its answer was there; nobody reads what is answered."""


def told_error(error: BaseException) -> JaxpagedError:
    """What a client is told of an exception."""
    if isinstance(error, EngineDeadError):  # what it died of is the operator's business
        return EngineDeadError("The engine has stopped and serves no requests until it is started again")
    if isinstance(error, RequestFailedError):
        return RequestFailedError("The model gave no answer to this request that could be used; others go on")
    if isinstance(error, JaxpagedError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:
        match error.status_code:
            case 404:
                return NotFoundError("There is nothing at this path: see /openapi.json for all that there is")
            case 405:
                return MethodNotAllowedError("This path does not take this method: see /openapi.json")
            case 401:
                return AuthenticationError(error.detail)
            case 413:
                return BodyTooLargeError(error.detail)
            case _:
                return InvalidRequestError(error.detail)
    return RequestFailedError("The server failed to answer this request; its log says why")


def error_event(error: BaseException) -> bytes:
    """The error as an event of a stream that has begun."""
    return b"data: " + error_body(told_error(error)) + b"\n\n"


def error_response(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The one exception handler."""
    record = record_of(request.scope)
    if isinstance(error, ClientLeftError):
        record.end = End.ABORTED
        return Response(b"", status_code=499)
    told = told_error(error)
    record.code = told.code
    if told is not error and told.http_status >= 500:
        LOG.error("request %s failed", record.request_id, exc_info=error)
    headers = {name.decode(): value.decode() for name, value in error_headers(told) if name != b"content-type"}
    if isinstance(error, HTTPException):
        headers |= {name.lower(): value for name, value in (error.headers or {}).items()}
    if isinstance(told, MethodNotAllowedError):
        headers["allow"] = ", ".join(allowed_methods(request.app, request.scope["path"]))
    return Response(error_body(told), status_code=told.http_status, headers=headers, media_type="application/json")


def allowed_methods(app: Litestar, path: str) -> list[str]:
    """The methods that a path takes, HEAD where it takes GET."""
    found: set[str] = set()
    for route in app.routes:
        pattern = re.sub(r"\\{\w+:path\\}", ".+", re.escape(route.path).replace("\\:", ":"))
        if isinstance(route, HTTPRoute) and re.fullmatch(re.sub(r"\\{\w+:\w+\\}", "[^/]+", pattern), path.rstrip("/") or "/"):
            found |= set(route.methods)
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


EXCEPTION_HANDLERS: Final[ExceptionHandlersMap] = {HTTPException: error_response, Exception: error_response}
