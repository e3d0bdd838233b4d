"""Answers that are sent as they are made: server-sent events with `\\n\\n` between them, comments in silence, and an end in any case.

Who waits for whom: the engine never waits for a client. A client that reads slowly fills the connection's buffer
(`server.send_buffer`, 64 kB); then its events are not made any more, and the answer's deltas are put together in the request's mailbox,
until it reads again or the connection is cut off (`server.slow_client_timeout_s`).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import msgspec
from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from jaxpaged.config import ServerConfig
from server.errors import LOG, error_event, told_error
from server.generation import client_has_left, end_tasks
from server.ledger import End, RequestRecord

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"


def event(content: msgspec.Struct) -> bytes:
    """A Struct as an event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class EventStream(Response[bytes]):
    """An answer made of events.

    Args:
        events: makes them; closed at the end, however it comes.
        record: is told how the request ends.
        config: when to send a comment.
        headers: of the answer.
        release: gives back what the events are made of; called at the end, however it comes.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        record: RequestRecord,
        config: ServerConfig,
        headers: dict[str, str],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(b"", media_type="text/event-stream", headers=headers)
        self._events, self._record, self._release = events, record, release
        self._ping_s = config.ping_interval_s
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._sent_s = 0.0
        self._is_sending = False

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIApp:  # type: ignore[override]
        """See `Response`: an application that sends the events."""
        return self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), *self._headers]
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pump, leaving, ticker = (asyncio.ensure_future(work) for work in (self._pump(send), client_has_left(receive), self._tick(send)))
        try:
            await asyncio.wait((pump, leaving), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await end_tasks(pump, leaving, ticker)
            await self._events.aclose()
            await self._release()

    async def _pump(self, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            told = told_error(error)
            self._record.end, self._record.code = End.FAILED, told.code
            if told is not error:
                LOG.error("request %s failed in its stream", self._record.request_id, exc_info=error)
            await self._send(send, error_event(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_s, self._is_sending = asyncio.get_running_loop().time(), False

    async def _tick(self, send: Send) -> None:
        """Sends a comment whenever nothing was sent for a while, and nothing waits to be."""
        time = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.01, self._sent_s + self._ping_s - time()))
            if not self._is_sending and time() - self._sent_s >= self._ping_s:
                await self._send(send, PING)
            elif self._is_sending:
                await asyncio.sleep(self._ping_s)
