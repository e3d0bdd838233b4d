"""The outermost layer: every request gets an id and a record, is in the books until it is over, and HEAD works wherever GET does."""

from server.asgi_types import App, Message, Receive, Scope, Send
from server.http_protocol import refusal_of
from server.ledger import GENERATION_PATHS, RECORD_KEY, RequestRecord
from server.phase import Phase
from server.request_ids import RequestIds
from server.service import Service


class AccessLayer:
    """Gives `record_of(scope)` to whoever answers, puts `x-request-id` on every answer and closes the record when it is over."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service
        self._ids = RequestIds(service.config.limits.max_request_id_chars)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service
        method: str = scope["method"]
        refusal = refusal_of(scope)
        refusal.request_id = refusal.request_id or self._ids.name(scope["headers"])
        record = RequestRecord(
            request_id=refusal.request_id,
            method=method,
            path="",
            received_s=service.clocks.monotonic(),
            is_generation=method == "POST" and scope["path"].rstrip("/") in GENERATION_PATHS,
        )
        # The server's own scope keeps HEAD, and sends no body because of it.
        inner: Scope = {**scope, "method": "GET" if method == "HEAD" else method, RECORD_KEY: record}
        is_complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                ours = [(b"x-request-id", record.request_id.encode())]
                if service.phase is Phase.DRAINING:
                    ours.append((b"connection", b"close"))  # the client's next request is for another server
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True
            await send(message)

        service.ledger.begin(record)
        try:
            await self._app(inner, receive, send_with_id)
        finally:
            record.path = inner.get("path_template") or ""
            if refusal.error is not None and record.status == 0:
                record.status, record.code, is_complete = refusal.error.http_status, refusal.error.code, True
            service.ledger.close(record, is_complete=is_complete)
