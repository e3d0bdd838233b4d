"""GET /v1/models and /v1/models/{name}, whose names may have slashes."""

import time
from typing import Any, Final

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from server.operations import Operation
from server.protocol.models import ModelCard, ModelList
from server.requests import Reception, check_model, json_response

LIST: Final = Operation(summary="The models that are served", tag="OpenAI", answer=ModelList, statuses=(503,))
ONE: Final = Operation(summary="One of the models that are served", tag="OpenAI", answer=ModelCard, statuses=(404, 503))


def model_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handlers of both paths."""
    service, created = reception.service, int(time.time())

    def card(name: str) -> ModelCard:
        return ModelCard(id=name, created=created, root=service.config.model.model, max_model_len=service.ready_engine().max_model_len)

    @get("/v1/models", opt={"operation": LIST}, name="list_models")
    async def list_models() -> Response[bytes]:
        return json_response(ModelList(data=[card(name) for name in service.served_names]))

    @get("/v1/models/{model_name:path}", opt={"operation": ONE}, name="retrieve_model")
    async def retrieve_model(request: Request[Any, Any, Any]) -> Response[bytes]:
        # The path parameter has a slash before it, and is compared with names only.
        return json_response(card(check_model(service, str(request.path_params["model_name"]).removeprefix("/"))))

    return [list_models, retrieve_model]
