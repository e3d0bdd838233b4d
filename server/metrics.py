"""`GET /metrics`."""

import asyncio

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import generate_latest

from server.service import Service

RENDER_INTERVAL_S = 0.5
MEDIA_TYPE = "text/plain; version=0.0.4"
"""The framework adds the character set."""


def metrics_routes(service: Service) -> list[HTTPRouteHandler]:
    """`GET /metrics`, made anew at most twice a second and beside the event loop."""
    text = b""
    made_s = float("-inf")
    lock = asyncio.Lock()

    @get("/metrics", summary="Figures for Prometheus", media_type=MEDIA_TYPE)
    async def metrics() -> Response[bytes]:
        nonlocal text, made_s
        async with lock:
            if service.clocks.monotonic() - made_s >= RENDER_INTERVAL_S:
                text = await asyncio.get_running_loop().run_in_executor(None, _text, service)
                made_s = service.clocks.monotonic()
        return Response(text, media_type=MEDIA_TYPE)

    return [metrics]


def _text(service: Service) -> bytes:
    # The time comes first: that is where texts that were written one after another are told apart.
    return generate_latest(service.machine.registry) + generate_latest(service.metrics.registry)
