"""A small app to put behind the front: health, metrics, completions, and routes that answer as slowly and as much as wished."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.response import Stream

from server.asgi_types import App
from server.errors import EXCEPTION_HANDLERS
from server.metrics import metrics_routes
from server.requests import Reception
from server.routes.completions import completion_routes
from server.routes.health import health_routes
from server.service import Service


def small_app(service: Service) -> App:
    """POST /v1/completions; GET /big?size=N, /drip?size=N, /slow?seconds=S; POST /echo."""

    @get("/big")
    async def big(request: Request[Any, Any, Any]) -> Response[bytes]:
        return Response(b"x" * int(request.query_params["size"]), media_type="text/plain")

    @get("/drip")
    async def drip(request: Request[Any, Any, Any]) -> Stream:
        size = int(request.query_params["size"])

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(size // 1000):
                yield b"x" * 1000
                await asyncio.sleep(0)

        return Stream(pieces, media_type="text/plain")

    @get("/slow")
    async def slow(request: Request[Any, Any, Any]) -> Response[bytes]:
        await asyncio.sleep(float(request.query_params["seconds"]))
        return Response(b"done", media_type="text/plain")

    @post("/echo", status_code=200)
    async def echo(request: Request[Any, Any, Any]) -> Response[bytes]:
        return Response(await request.body(), media_type="application/octet-stream")

    app: Any = Litestar(
        [*completion_routes(Reception(service)), big, drip, slow, echo, *health_routes(service), *metrics_routes(service)],
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
    )
    return app  # type: ignore[no-any-return]
