"""Every failure as OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`, with the headers that tell a client whether to retry.

`to_failure` is the one place where an exception becomes a status and a body. What is no sentence of ours becomes a 500 that says
nothing of the inside; the log has the rest.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from jaxpaged.errors import JaxpagedError

LOG: Final = logging.getLogger("jaxpaged.server")

RETRY_AFTER_S: Final[Mapping[str, int]] = {"queue_full": 1, "queue_timeout": 2}
DEFAULT_RETRY_AFTER_S: Final = 5
"""Seconds that a client should wait after 429 and 503, by error code; from 1 to 30."""

CODES: Final[Mapping[int, str]] = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "too_many_requests",
    500: "internal_error",
    503: "unavailable",
}
"""Codes of errors that come from the framework, by status."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong.

    Attributes:
        message: one sentence with what was given, the limit and the way out.
        type: the kind of fault, by status.
        param: the field at fault, if one is.
        code: the kind of error.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success."""

    error: ErrorDetail


class Failure(NamedTuple):
    """An error on its way to a client."""

    status: int
    body: ErrorBody
    headers: dict[str, str]


def error_type(status: int) -> str:
    """OpenAI's name of the kind of fault that a status stands for."""
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


def make_failure(status: int, message: str, code: str | None, param: str | None = None, headers: Mapping[str, str] | None = None) -> Failure:
    """A failure with its headers: `Retry-After` where waiting helps, `x-should-retry: false` where the same request would fail again."""
    told = dict(headers or {})
    if status in (429, 503):
        told["retry-after"] = str(RETRY_AFTER_S.get(code or "", DEFAULT_RETRY_AFTER_S))
    elif status >= 500:
        told["x-should-retry"] = "false"
    return Failure(status, ErrorBody(error=ErrorDetail(message=message, type=error_type(status), param=param, code=code)), told)


def to_failure(error: BaseException) -> Failure:
    """What a client is told of an exception."""
    if isinstance(error, JaxpagedError) and type(error) is not JaxpagedError:
        return make_failure(error.http_status, error.message, error.code, error.param)
    if isinstance(error, HTTPException) and error.status_code < 500:
        status = error.status_code
        return make_failure(status, _sentence(error), CODES.get(status), headers=dict(error.headers or {}))
    return make_failure(500, "The server failed to answer this request; its log says why", CODES[500])


def error_event(error: BaseException) -> bytes:
    """The error as an event of a stream that has begun."""
    return b"data: " + msgspec.json.encode(to_failure(error).body) + b"\n\n"


def error_response(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The one exception handler."""
    failure = to_failure(error)
    if failure.status == 500:
        LOG.error("%s %s failed", request.method, request.scope["path"].encode("unicode_escape").decode()[:128], exc_info=error)
    return Response(
        msgspec.json.encode(failure.body), status_code=failure.status, headers=failure.headers, media_type="application/json"
    )


EXCEPTION_HANDLERS: Final[ExceptionHandlersMap] = {HTTPException: error_response, Exception: error_response}


def _sentence(error: HTTPException) -> str:
    named = {
        404: "There is nothing at this path: see /openapi.json for all that there are",
        405: "This path does not take this method: see /openapi.json",
    }
    return named.get(error.status_code, error.detail)
