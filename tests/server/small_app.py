"""A small app to put behind the front: health, metrics, one route that streams and one that does not."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.response import Stream

from jaxpaged.errors import JaxpagedError
from jaxpaged.request import SamplingParams
from server.asgi_types import App
from server.error_body import error_body, error_headers
from server.ledger import End, record_of
from server.metrics import metrics_routes
from server.routes.health import health_routes
from server.service import Service


def small_app(service: Service) -> App:
    """POST /v1/completions with {"max_tokens": N, "stream": bool}; GET /big?size=N, /drip?size=N, /slow?seconds=S; POST /echo."""

    @post("/v1/completions", status_code=200)
    async def completions(request: Request[Any, Any, Any]) -> Response[Any]:
        asked, record = await request.json(), record_of(request.scope)
        engine = service.ready_engine()
        params = SamplingParams(temperature=0, max_tokens=asked.get("max_tokens", 4))
        outputs = engine.stream("hello", params, record.request_id)
        if not asked.get("stream"):
            text = ""
            async for output in outputs:
                text += output.outputs[0].text
            record.end = End(str(output.outputs[0].finish_reason))
            return Response({"text": text}, media_type="application/json")

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for output in outputs:
                    record.num_output_tokens += len(output.outputs[0].token_ids)
                    yield b"data: " + output.outputs[0].text.encode() + b"\n\n"
                record.end = End.LENGTH
                yield b"data: [DONE]\n\n"
            except JaxpagedError as error:
                record.end, record.code = End.FAILED, error.code
                yield b"data: " + error_body(error) + b"\n\n"
            finally:
                await outputs.aclose()  # type: ignore[attr-defined]

        return Stream(pieces, media_type="text/event-stream")

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

    def told(_: Request[Any, Any, Any], error: JaxpagedError) -> Response[bytes]:
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return Response(error_body(error), status_code=error.http_status, headers=headers, media_type="application/json")

    app: Any = Litestar(
        [completions, big, drip, slow, echo, *health_routes(service), *metrics_routes(service)],
        exception_handlers={JaxpagedError: told},
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
    )
    return app  # type: ignore[no-any-return]
