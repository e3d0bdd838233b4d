"""Operators' calls over HTTP, with vLLM's names: an app of its own, for a unix socket or a port of this machine, never the public one."""

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, Response, get, post
from litestar.exceptions import HTTPException

from jaxpaged.engine_client import OperatedEngine
from jaxpaged.errors import BadRequestError, InvalidRequestError, JaxpagedError
from server.error_body import error_body, error_headers
from server.service import Service


class DoneBody(msgspec.Struct, frozen=True, kw_only=True):
    """It is done."""

    done: bool = True


class PausedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine is paused."""

    is_paused: bool


class SleepingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine sleeps."""

    is_sleeping: bool


def create_admin_app(service: Service) -> Litestar:
    """The app of one service."""

    def engine() -> OperatedEngine:
        ready = service.ready_engine()
        if not isinstance(ready, OperatedEngine):
            raise BadRequestError("this engine takes no operators' calls")
        return ready

    @post("/reset_prefix_cache", status_code=200)
    async def reset_prefix_cache(request: Request[Any, Any, Any]) -> DoneBody:
        asked = _query(request, "reset_running_requests")
        await engine().reset_prefix_cache(reset_running_requests=_flag("reset_running_requests", asked, default=False))
        return DoneBody()

    @post("/pause", status_code=200)
    async def pause(request: Request[Any, Any, Any]) -> DoneBody:
        asked = _query(request, "mode", "clear_cache")
        mode: Any = asked.get("mode", "abort")
        await engine().pause(mode, clear_cache=_flag("clear_cache", asked, default=True))
        return DoneBody()

    @post("/resume", status_code=200)
    async def resume() -> DoneBody:
        await engine().resume()
        return DoneBody()

    @post("/sleep", status_code=200)
    async def sleep(request: Request[Any, Any, Any]) -> DoneBody:
        asked = _query(request, "level", "mode")
        level, mode = asked.get("level", "1"), asked.get("mode", "abort")
        checked: Any = int(level) if level.isascii() and level.isdigit() and len(level) < 3 else level
        named: Any = mode
        await engine().sleep(checked, named)
        return DoneBody()

    @post("/wake_up", status_code=200)
    async def wake_up(request: Request[Any, Any, Any]) -> DoneBody:
        _query(request, "tags")
        tags: Sequence[str] = request.query_params.getall("tags", [])
        await engine().wake_up(tags or None)
        return DoneBody()

    @get("/is_paused", media_type=MediaType.JSON)
    async def is_paused() -> PausedBody:
        return PausedBody(is_paused=await engine().is_paused())

    @get("/is_sleeping", media_type=MediaType.JSON)
    async def is_sleeping() -> SleepingBody:
        return SleepingBody(is_sleeping=await engine().is_sleeping())

    return Litestar(
        [reset_prefix_cache, pause, resume, sleep, wake_up, is_paused, is_sleeping],
        exception_handlers={JaxpagedError: _told, HTTPException: _told_http},
        openapi_config=None,
        logging_config=None,
    )


def _query(request: Request[Any, Any, Any], *names: str) -> dict[str, str]:
    """The query by name. Raises InvalidRequestError for a name that the call does not have."""
    asked = dict(request.query_params)
    for name in asked:
        if name not in names:
            raise InvalidRequestError(f"{request.url.path} takes {' and '.join(names) or 'nothing'}, got {name!r:.40}", param=name[:40])
    return asked


def _flag(name: str, asked: dict[str, str], *, default: bool) -> bool:
    word = asked.get(name)
    if word is None:
        return default
    if word.lower() not in ("true", "false"):
        raise InvalidRequestError(f"{name} is true or false, got {word!r:.40}", param=name)
    return word.lower() == "true"


def _told(_: Request[Any, Any, Any], error: JaxpagedError) -> Response[bytes]:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), status_code=error.http_status, headers=headers, media_type=MediaType.JSON)


def _told_http(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    told = BadRequestError(error.detail)
    return Response(error_body(told), status_code=error.status_code, media_type=MediaType.JSON)
