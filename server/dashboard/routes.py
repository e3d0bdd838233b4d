"""GET /dashboard, its files, and GET /dashboard/events, which is the stream that it draws."""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from jaxpaged.errors import NotFoundError
from server.dashboard.files import FILES, FOLDER, HEADERS, MEDIA_TYPES, PAGE_PATH
from server.dashboard.viewers import Viewer, Viewers
from server.generation import client_has_left, end_tasks
from server.operations import Operation

if TYPE_CHECKING:
    from server.service import Service

PAGE: Final = Operation(summary="The live page", tag="Operators", media_type="text/html")


class FrameStream(Response[bytes]):
    """Frames for one viewer, until one of both leaves."""

    def __init__(self, viewers: Viewers, viewer: Viewer) -> None:
        super().__init__(b"", media_type="text/event-stream")
        self._viewers, self._viewer = viewers, viewer

    def to_asgi_response(self, *_: Any, **__: Any) -> ASGIApp:  # type: ignore[override]
        """See `Response`."""
        return self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        pump = leaving = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            pump, leaving = asyncio.ensure_future(self._pump(send)), asyncio.ensure_future(client_has_left(receive))
            await asyncio.wait((pump, leaving), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self._viewers.leave(self._viewer)
            await end_tasks(*(task for task in (pump, leaving) if task is not None))

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": await self._viewers.history(), "more_body": True})
        async for frame in self._viewer.frames():
            # Waits for a viewer that does not read; frames are forgotten meanwhile.
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def dashboard_routes(service: "Service") -> list[HTTPRouteHandler]:
    """The handlers of one service."""
    viewers = Viewers(service)
    contents = {name: (FOLDER / name).read_bytes() for name in ("index.html", *FILES)}

    def answer(name: str) -> Response[bytes]:
        return Response(contents[name], media_type=MEDIA_TYPES[f".{name.rpartition('.')[2]}"], headers=dict(HEADERS))

    @get(PAGE_PATH, opt={"operation": PAGE}, name="dashboard_page", sync_to_thread=False)
    def page() -> Response[bytes]:
        return answer("index.html")

    @get(f"{PAGE_PATH}/events", include_in_schema=False, name="dashboard_events")
    async def stream() -> Response[bytes]:
        return FrameStream(viewers, viewers.join())

    @get(f"{PAGE_PATH}/{{name:str}}", include_in_schema=False, name="dashboard_file", sync_to_thread=False)
    def file(request: Request[Any, Any, Any]) -> Response[bytes]:
        name: str = request.path_params["name"]
        if name not in contents:
            raise NotFoundError("the live page has no such file")
        return answer(name)

    return [page, stream, file]
