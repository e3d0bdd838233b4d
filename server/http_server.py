"""uvicorn's server with our sockets, connections and end: it handles no signals, and its end is decided by whoever runs it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence

import uvicorn

from jaxpaged.config import LimitsConfig, ServerConfig
from server.asgi_types import App
from server.http_protocol import HttpProtocol
from server.ledger import Ledger
from server.listeners import BACKLOG
from server.request_ids import RequestIds

CLOSE_TIMEOUT_S = 0.5
"""Time for connections to be closed, and then again for what still answers to end."""


class HttpServer(uvicorn.Server):
    """Serves an app on sockets that listen already, until `should_exit`.

    Args:
        app: ASGI.
        options: limits of connections.
        sockets: closed at the end.
        tls: None: plain HTTP.
        ids: names requests that are refused before the app has them.
        ledger: told of them; None: nobody is.
    """

    def __init__(
        self,
        app: App,
        options: ServerConfig,
        sockets: Sequence[socket.socket],
        tls: ssl.SSLContext | None = None,
        ids: RequestIds | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=options.keep_alive_s,  # type: ignore[arg-type]
            )
        )
        self._options, self._sockets, self._tls = options, sockets, tls
        self._ids = ids or RequestIds(LimitsConfig().max_request_id_chars)
        self._ledger = ledger
        self.is_listening = asyncio.Event()
        """The app's own start is done, and connections are taken."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them to the program."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the app did not start; the log has the reason")
        loop = asyncio.get_running_loop()
        timeout_s = None if self._tls is None else self._options.header_timeout_s
        self.servers = [
            await loop.create_server(self._connection, sock=listener, ssl=self._tls, ssl_handshake_timeout=timeout_s)
            for listener in self._sockets
        ]
        # The loop has just said 100, and of a burst of more connections the rest would be lost in the system. What it is told itself
        # is also how often it tries to accept at a time, out of descriptors as well.
        for listener in self._sockets:
            listener.listen(BACKLOG)
        self.started = True
        self.is_listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes everything; what is still being answered is cut off after `CLOSE_TIMEOUT_S`."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CLOSE_TIMEOUT_S
        while self.server_state.connections and loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            _, late = await asyncio.wait(self.server_state.tasks, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()
        await self.lifespan.shutdown()

    def _connection(self) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, self.lifespan.state, self._options, self._ids, self._ledger)
