"""One HTTP connection: uvicorn's, with limits on what a client may send and on how long it may take, for sending as for reading."""

import asyncio
import http
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from jaxpaged.config import ServerConfig
from jaxpaged.errors import (
    BadRequestError,
    HeadersTooLargeError,
    JaxpagedError,
    SlowRequestError,
    TooManyConnectionsError,
    UnknownMethodError,
)
from server.error_body import error_body, error_headers
from server.ledger import Ledger
from server.request_ids import RequestIds

LINGER_S = 1.0
"""After a refusal the client is read from for so long: a connection closed at once may lose what was written to it."""
MAX_PIPELINED = 16
_CHUNKS: Final = "jaxpaged.chunks"
_REFUSAL: Final = "jaxpaged.refusal"

NOT_HTTP: Final = BadRequestError("what came is no HTTP request that can be read")
_METHOD: Final = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]{1,40}) [!-~]+ HTTP/1\.[01]\r\n")
_KNOWN_METHODS: Final = frozenset(method.value.encode() for method in http.HTTPMethod)


def _unknown_method(data: bytes) -> JaxpagedError | None:
    """What is told of a request that is whole but for a method that nobody knows; None: it is no request."""
    found = _METHOD.match(data)
    if found is None or found[1] in _KNOWN_METHODS:
        return None
    return UnknownMethodError(f"there is no method {found[1].decode()}: see /openapi.json for the methods of each path")


class ChunkWriter:
    """Writes parts of one answer's body straight to the connection, past all layers; its beginning and its end go through them.

    A stream so takes a third of the time for each event. Only for an answer without a length, and when its head was sent.

    Args:
        cycle: whose answer.
        max_unsent: parts that may wait for a client that does not keep up.
        is_framed: with the length of each part before it, as HTTP/1.1 has it.
    """

    def __init__(self, cycle: RequestResponseCycle, max_unsent: int, *, is_framed: bool) -> None:
        self._is_framed = is_framed
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport
        self._max_unsent, self._num_unsent = max_unsent, 0

    @property
    def is_paused(self) -> bool:
        """The client does not keep up: the next part has to go through the layers, which wait."""
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Sends a part that is not empty."""
        if self._cycle.disconnected:
            return
        transport = self._transport
        self._num_unsent = self._num_unsent + 1 if transport.get_write_buffer_size() else 0
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_framed else data)
        if self._num_unsent >= self._max_unsent:
            transport.set_write_buffer_limits(high=0)  # pauses at once, until all of it is sent


def _answer_in_one_piece(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks, and no 100 Continue: an answer without a length ends with its connection. uvicorn sends chunks."""
    cycle.chunked_encoding, cycle.waiting_for_100_continue = False, False
    send = cycle.send

    async def send_unframed(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]


def chunk_writer(scope: Mapping[str, Any]) -> ChunkWriter | None:
    """Of the answer to a request with this ASGI scope; None: another server than ours runs the app."""
    found = scope.get("extensions", {}).get(_CHUNKS)
    return found if isinstance(found, ChunkWriter) else None


class Refusal:
    """What connection and app tell each other of a request that may be refused while its body is on the way.

    Attributes:
        request_id: set by whichever of the two names the request first.
        error: what the connection answered with, while the app was still waiting for the body; None: nothing.
    """

    def __init__(self) -> None:
        self.request_id = ""
        self.error: JaxpagedError | None = None


def refusal_of(scope: Mapping[str, Any]) -> Refusal:
    """Of the request with this ASGI scope; of another server than ours, one of its own."""
    found = scope.get("extensions", {}).get(_REFUSAL)
    return found if isinstance(found, Refusal) else Refusal()


class HttpProtocol(HttpToolsProtocol):
    """A connection. Who sends too much is told so and closed; who takes too long, too; who does not read is cut off.

    Args:
        options: the limits.
        ids: names requests that are refused here.
        ledger: told of them; None: nobody is.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        options: ServerConfig,
        ids: RequestIds,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state)
        self._options, self._ids, self._ledger = options, ids, ledger
        self._deadline: asyncio.TimerHandle | None = None
        """When the head, or the body, must be there."""
        self._patience: asyncio.TimerHandle | None = None
        """When a client that does not read is cut off."""
        self._is_in_head, self._head_bytes = True, 0
        self._head_begun_s = 0.0
        self.url = b""
        self._is_refused = False
        self._refusal: JaxpagedError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._options.max_unsent)
        self._head_begun_s = self.loop.time()
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._options.send_buffer)
        limit = self._options.max_connections
        error = TooManyConnectionsError(f"{limit} connections are open, and more are not served; try again a little later")
        if len(self.connections) > 2 * limit:
            self._is_refused = True
            self._note(self._ids.name(()), error, is_told=False)
            transport.abort()
        elif len(self.connections) > limit:
            self._refuse(error)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        for timer in (self._deadline, self._patience, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._is_refused = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._deadline is None:
                self._expect_head()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserInvalidMethodError:
            self._refuse(_unknown_method(data) or NOT_HTTP)
        except httptools.HttpParserError:
            self._refuse(self._refusal or NOT_HTTP)
        except httptools.HttpParserUpgrade:
            pass  # answered as a plain request: nothing else is spoken here
        if self._is_in_head and self._head_bytes > self._options.max_header_size and not self._is_refused:
            self._refuse(self._head_too_large(f"{self._head_bytes} or more"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is there."""
        super().on_header(name, value)
        if len(self.headers) > self._options.max_headers:
            self._refusal = HeadersTooLargeError(
                f"a request may have {self._options.max_headers} headers at most (server.max_headers), got {len(self.headers)} or more"
            )
            raise self._refusal

    def on_headers_complete(self) -> None:
        """The head is there to its end."""
        size = len(self.parser.get_method()) + len(self.url) + len(" HTTP/1.1\r\n") + 1 + len("\r\n")
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if size > self._options.max_header_size:
            self._refusal = self._head_too_large(f"{size} bytes")
            raise self._refusal
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = BadRequestError(f"{MAX_PIPELINED} requests wait on this connection, and more are not taken")
            raise self._refusal
        self._is_in_head = False
        self._arm(self._options.body_timeout_s)
        super().on_headers_complete()
        is_framed = self.parser.get_http_version() != "1.0"
        if not is_framed:
            _answer_in_one_piece(self.cycle)
        chunks = ChunkWriter(self.cycle, self._options.max_unsent_events, is_framed=is_framed)
        self.scope["extensions"] = {_CHUNKS: chunks, _REFUSAL: Refusal()}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """The request is there to its end."""
        self._is_in_head, self._head_bytes = True, 0
        self._disarm()
        super().on_message_complete()
        self.headers = []  # the next request's, which may be refused before it has any

    def on_response_complete(self) -> None:
        """The answer is written to its end."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_off_later()

    def send_400_response(self, msg: str) -> None:
        """Overrides uvicorn's plain text."""
        self._refuse(BadRequestError(msg))

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        super().pause_writing()
        if self._patience is None:
            self._patience = self.loop.call_later(self._options.slow_client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self.transport.set_write_buffer_limits(high=self._options.max_unsent)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """No request has come for a while."""
        if not self.transport.is_closing():
            self.close()

    def shutdown(self) -> None:
        """The server ends: a connection without a request is closed, another one after its answer."""
        super().shutdown()
        if self.transport.is_closing():
            self._cut_off_later()

    def close(self) -> None:
        """Closes once all that was written is read, and does not wait for ever for that."""
        self.transport.close()
        self._cut_off_later()

    @property
    def _has_answer_to_give(self) -> bool:
        """Whether a request that came whole is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _cut_off_later(self) -> None:
        if self.transport.get_write_buffer_size() and self._patience is None:
            self._patience = self.loop.call_later(self._options.slow_client_timeout_s, self.transport.abort)

    def _expect_head(self) -> None:
        self._head_begun_s = self.loop.time()
        self._arm(self._options.header_timeout_s)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._is_in_head and self._has_answer_to_give:
            self._expect_head()  # whoever waits for an answer may take its time with the next request
        elif self._is_in_head and not self._head_bytes:
            self.close()
        else:
            part, seconds = ("headers", self._options.header_timeout_s) if self._is_in_head else ("body", self._options.body_timeout_s)
            self._refuse(SlowRequestError(f"the {part} of the request did not come within {seconds:g} seconds"))

    def _head_too_large(self, size: str) -> HeadersTooLargeError:
        limit = self._options.max_header_size
        return HeadersTooLargeError(
            f"the first line and the headers of a request may have {limit} bytes (server.max_header_size), got {size}"
        )

    def _refuse(self, error: JaxpagedError) -> None:
        """Takes nothing more from this client. An answer that is owed to an earlier request is written first, and then it is closed."""
        self._is_refused = True
        self._disarm()
        self._unset_keepalive_if_required()
        cycle = self.cycle
        if self._has_answer_to_give:
            self._note(self._ids.name(self.headers or ()), error, is_told=False)
            self.parser = None  # type: ignore[assignment]
            cycle.keep_alive = False
            return
        if cycle is not None and cycle.more_body:
            cycle.waiting_for_100_continue = False  # whoever waits for the body would write that it is welcome
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.parser = None  # type: ignore[assignment]
                self.close()
                return
            refusal = refusal_of(self.scope)
            refusal.error = error
            request_id = refusal.request_id = refusal.request_id or self._ids.name(self.headers)
        else:
            request_id = self._ids.name(self.headers or ())
            self._note(request_id, error)
        self.parser = None  # type: ignore[assignment]
        status, body = error.http_status, error_body(error)
        lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()]
        headers = (*self.server_state.default_headers, *error_headers(error), (b"x-request-id", request_id.encode()))
        lines += [name + b": " + value + b"\r\n" for name, value in headers]
        lines += [b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body), body]
        self.transport.write(b"".join(lines))
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._patience = self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.close()

    def _note(self, request_id: str, error: JaxpagedError, *, is_told: bool = True) -> None:
        """A line for a request that no route will have. What it asks for is known once its first line is there."""
        if self._ledger is not None:
            method = self.parser.get_method().decode() if self._is_in_head and self.url else ""
            self._ledger.turn_away(request_id, error, method=method, seconds=self.loop.time() - self._head_begun_s, is_told=is_told)
