"""Bodies are read whole, up to a limit, before anything looks into them."""

from jaxpaged.errors import BodyTooLargeError, JaxpagedError, UnsupportedMediaTypeError
from server.asgi_types import App, Message, Receive, Scope, Send, header_of
from server.error_body import send_error
from server.ledger import record_of

MAX_NOTED_BYTES = 1000


class BodyLayer:
    """Refuses a body that is too large (413), or compressed (415), and hands on one that is there to its end.

    How long a body may take is the connection's business (`server.body_timeout_s`).

    Args:
        max_body: bytes.
        notes_bodies: the beginning of what asks the model for something goes into the record, and so into the log.
    """

    def __init__(self, app: App, max_body: int, *, notes_bodies: bool = False) -> None:
        self._app, self._max_body, self._notes_bodies = app, max_body, notes_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            body = await self._read(receive)
        except JaxpagedError as error:
            await send_error(scope, send, error)
            return
        if body is None:
            return
        if self._notes_bodies and (record := record_of(scope)).is_generation:
            record.body = body[:MAX_NOTED_BYTES].decode("utf-8", "replace")
        is_handed_on = False

        async def receive_whole() -> Message:
            nonlocal is_handed_on
            if is_handed_on:
                return await receive()
            is_handed_on = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_whole, send)

    def _check_headers(self, scope: Scope) -> None:
        """What can be refused before a byte of the body is read."""
        encoding = header_of(scope, b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            raise UnsupportedMediaTypeError("compressed bodies are not read; send it without content-encoding", param="content-encoding")
        length = header_of(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_body:
            raise self._too_large(f"{int(length)} bytes")

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None when the client has left."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self._max_body:
                raise self._too_large(f"{size} or more")
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self, size: str) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body may have at most {self._max_body} bytes (server.max_body), got {size}")
