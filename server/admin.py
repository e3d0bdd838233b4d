"""Operators' calls over HTTP, with vLLM's names: an app of its own, for a unix socket or a port of this machine, never the public one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Request, get, post

from jaxpaged.engine_client import OperatedEngine
from jaxpaged.errors import BadRequestError, InvalidRequestError
from server.errors import EXCEPTION_HANDLERS
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

    @post("/start_profile", status_code=200)
    async def start_profile(request: Request[Any, Any, Any]) -> DoneBody:
        _query(request)
        folder = service.config.server.profile_dir
        if folder is None:
            raise BadRequestError("this server was started without a folder for traces: start it with --server.profile-dir FOLDER")
        if await request.body():
            raise InvalidRequestError("/start_profile takes no body: traces go into the folder that the server was started with")
        await engine().start_profile(Path(folder).expanduser())
        return DoneBody()

    @post("/stop_profile", status_code=200)
    async def stop_profile(request: Request[Any, Any, Any]) -> DoneBody:
        _query(request)
        await engine().stop_profile()
        return DoneBody()

    return Litestar(
        [reset_prefix_cache, pause, resume, sleep, wake_up, is_paused, is_sleeping, start_profile, stop_profile],
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
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
