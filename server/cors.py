"""Calls from web pages of other origins (CORS): off unless origins are named."""

import re
from collections.abc import Sequence

from server.asgi_types import App, Message, Receive, Scope, Send, header_of, send_plain

_HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*")
EXPOSED = b"x-request-id, x-jaxpaged-ignored, retry-after"
MAX_AGE_S = 600


class CorsLayer:
    """Answers a browser's question whether a page may call, and says so on every answer to a page that may.

    Args:
        origins: such as `https://app.example`, or `*` for every page.
    """

    def __init__(self, app: App, origins: Sequence[str]) -> None:
        self._app = app
        self._is_any = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        origin = header_of(scope, b"origin") if scope["type"] == "http" else None
        if origin is None or not (self._is_any or origin in self._origins):
            await self._app(scope, receive, send)
            return
        allow = [(b"access-control-allow-origin", b"*" if self._is_any else origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and header_of(scope, b"access-control-request-method") is not None:
            wanted = header_of(scope, b"access-control-request-headers") or b""
            await send_plain(
                send,
                204,
                [
                    *allow,
                    (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE, OPTIONS"),
                    (b"access-control-allow-headers", wanted if _HEADER_NAMES.fullmatch(wanted) else b"authorization, content-type"),
                    (b"access-control-max-age", str(MAX_AGE_S).encode()),
                ],
            )
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *allow, (b"access-control-expose-headers", EXPOSED)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_allowed)
