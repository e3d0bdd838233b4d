"""Health, version and load: what supervisors, load balancers and people ask first."""

import msgspec
from litestar import MediaType, Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec

import jaxpaged
from server.health_check import Health, HealthBody, HealthCheck
from server.service import Service

NOT_SERVING = {503: ResponseSpec(HealthBody, description="Not now, and why", generate_examples=False)}


class VersionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the program."""

    version: str


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is to do: `server_load` counts requests that are being answered, the others are the engine's own figures."""

    server_load: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float


def health_routes(service: Service) -> list[HTTPRouteHandler]:
    """The handlers of one service."""
    check = HealthCheck(service)

    @get(["/health", "/readyz", "/v2/health/ready"], summary="Whether requests are served", responses=NOT_SERVING)
    async def ready() -> Response[HealthBody]:
        return _response(await check.ready())

    @get(["/livez", "/v2/health/live"], summary="Whether the process is to be left alone", responses=NOT_SERVING)
    async def live() -> Response[HealthBody]:
        return _response(check.live())

    @get("/version", summary="The program's version", media_type=MediaType.JSON)
    async def version() -> VersionBody:
        return VersionBody(version=jaxpaged.__version__)

    @get("/load", summary="How much there is to do", media_type=MediaType.JSON)
    async def load() -> LoadBody:
        progress = service.progress
        return LoadBody(
            server_load=service.ledger.num_open_generations,
            num_running=progress.num_running,
            num_waiting=progress.num_waiting,
            kv_cache_usage=progress.kv_cache_usage,
        )

    return [ready, live, version, load]


def _response(health: Health) -> Response[HealthBody]:
    return Response(health.body, status_code=health.status, media_type=MediaType.JSON)
