"""The body of an error, as OpenAI's clients expect it."""

import msgspec

from jaxpaged.errors import JaxpagedError
from server.asgi_types import Scope, Send, send_plain
from server.ledger import record_of

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: JaxpagedError) -> bytes:
    """`{"error": {message, type, param, code}}` as JSON."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


def error_headers(error: JaxpagedError) -> list[tuple[bytes, bytes]]:
    """Headers of an answer that is an error, its length apart: when to come again, or that coming again is of no use."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(min(30, max(1, error.retry_after_s))).encode()))
    elif error.http_status >= 500:
        headers.append((b"x-should-retry", b"false"))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


async def send_error(scope: Scope, send: Send, error: JaxpagedError) -> None:
    """Answers with an error, and notes its code in the request's record."""
    record_of(scope).code = error.code
    await send_plain(send, error.http_status, error_headers(error), error_body(error))
