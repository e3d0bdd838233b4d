"""Answers that are sent as they are made: server-sent events with `\\n\\n` between them, comments in silence, and an end in any case.

Who waits for whom: the engine never waits for a client. A client that reads slowly fills the system's buffer (`server.send_buffer`,
64 kB) and then ours (`server.max_unsent`, 256 kB, or `server.max_unsent_events`, 1,000); then its events are not made any more, and the
answer's deltas are put together in the request's mailbox, until it reads again or the connection is cut off
(`server.slow_client_timeout_s`).
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from jaxpaged.config import ServerConfig
from server.errors import LOG, error_event, told_error
from server.generation import Outputs, client_has_left, end_tasks
from server.http_protocol import ChunkWriter, chunk_writer
from server.ledger import End, RequestRecord

PING: Final = b": ping\n\n"
DONE: Final = b"data: [DONE]\n\n"

encode: Final = msgspec.json.Encoder().encode


def event(content: msgspec.Struct) -> bytes:
    """A Struct as an event."""
    return b"data: " + encode(content) + b"\n\n"


class TextEvent:
    """An event of which nothing changes but one text, made from one of its kind: its bytes around the text are made once.

    Args:
        make: gives the event with a text in it.
    """

    def __init__(self, make: Callable[[str], bytes]) -> None:
        mark = f"mark-{uuid.uuid4().hex}"
        self._before, self._after = make(mark).split(encode(mark))

    def with_text(self, text: str) -> bytes:
        """The event that says this."""
        return b"%b%b%b" % (self._before, encode(text), self._after)


class Telling(Protocol):
    """Makes the events of one answer, in order; each method may have nothing to tell."""

    def opening(self) -> bytes:
        """Before anything is there."""

    def news(self, outputs: Outputs) -> bytes:
        """What came at the same time."""

    def closing(self) -> bytes:
        """All of it was told."""

    def failure(self, error: Exception) -> bytes:
        """In place of the rest; writes into the books how it ended."""


def tell_failure(record: RequestRecord, error: Exception) -> bytes:
    """The error as the last event of a stream, into the books, and, if it is none of ours, into the log."""
    told = told_error(error)
    record.end, record.code = End.FAILED, told.code
    if told is not error:
        LOG.error("request %s failed in its stream", record.request_id, exc_info=error)
    return error_event(error)


class EventStream(Response[bytes]):
    """An answer made of events.

    Args:
        telling: makes them.
        outputs: what they are made of.
        config: when to send a comment.
        headers: of the answer.
        release: gives back what the events are made of; called at the end, however it comes.
    """

    def __init__(
        self,
        telling: Telling,
        outputs: AsyncIterator[Outputs],
        config: ServerConfig,
        headers: dict[str, str],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(b"", media_type="text/event-stream", headers=headers)
        self._telling, self._outputs, self._release = telling, outputs, release
        self._ping_s = config.ping_interval_s
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._time = asyncio.get_running_loop().time
        self._sent_s = 0.0
        self._is_sending = False
        self._writer: ChunkWriter | None = None

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIApp:  # type: ignore[override]
        """See `Response`: an application that sends the events."""
        return self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), *self._headers]
        self._sent_s, self._writer = self._time(), chunk_writer(scope)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pump, leaving, ticker = (asyncio.ensure_future(work) for work in (self._pump(send), client_has_left(receive), self._tick(send)))
        try:
            await asyncio.wait((pump, leaving), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await end_tasks(pump, leaving, ticker)
            await self._release()

    async def _pump(self, send: Send) -> None:
        telling, writer, time = self._telling, self._writer, self._time
        try:
            await self._send(send, telling.opening())
            async for outputs in self._outputs:
                data = telling.news(outputs)
                if writer is None or writer.is_paused:
                    await self._send(send, data)
                elif data:
                    writer.write(data)
                    self._sent_s = time()
            await self._send(send, telling.closing())
        except Exception as error:
            await self._send(send, telling.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        """Waits for a client that does not read."""
        if data:
            self._is_sending = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_s, self._is_sending = self._time(), False

    async def _tick(self, send: Send) -> None:
        """Sends a comment whenever nothing was sent for a while, and nothing waits to be."""
        time = self._time
        while True:
            await asyncio.sleep(max(0.01, self._sent_s + self._ping_s - time()))
            if not self._is_sending and time() - self._sent_s >= self._ping_s:
                await self._send(send, PING)
            elif self._is_sending:
                await asyncio.sleep(self._ping_s)
