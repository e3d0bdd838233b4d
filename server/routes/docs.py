"""GET /openapi.json, and GET /docs, which shows it."""

from typing import Any, Final

import msgspec
from litestar import Litestar, Request, Response, get
from litestar.handlers import HTTPRouteHandler

from server.docs_page import make_page
from server.openapi import make_document
from server.operations import Operation


class OpenAPIDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAPI 3.1 document."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]
    security: list[dict[str, list[str]]]


DOCUMENT: Final = Operation(summary="The OpenAPI document", tag="Documents", answer=OpenAPIDocument)
PAGE: Final = Operation(summary="A page that shows it", tag="Documents", media_type="text/html")


def docs_routes() -> list[HTTPRouteHandler]:
    """The handlers of both paths."""

    made: list[dict[str, Any]] = []

    def document(app: Litestar) -> dict[str, Any]:
        if not made:
            made.append(make_document(app))
        return made[0]

    @get("/openapi.json", opt={"operation": DOCUMENT}, name="openapi_document")
    async def openapi_document(request: Request[Any, Any, Any]) -> Response[bytes]:
        return Response(msgspec.json.encode(document(request.app)), media_type="application/json")

    @get("/docs", opt={"operation": PAGE}, name="docs_page")
    async def docs_page(request: Request[Any, Any, Any]) -> Response[bytes]:
        return Response(make_page(document(request.app)).encode(), media_type="text/html")

    return [openapi_document, docs_page]
