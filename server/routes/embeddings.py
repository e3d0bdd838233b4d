"""POST /v1/embeddings: texts as vectors."""

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any, Final

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler

from jaxpaged.embeddings import EmbeddingRequestOutput
from jaxpaged.errors import InvalidRequestError
from jaxpaged.queue_group import QueueGroup
from server.generation import all_or_none, check_length, cut_prompt, request_name, unless_client_leaves
from server.ledger import End
from server.operations import GENERATION_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.embeddings import EmbeddingItem, EmbeddingRequest, EmbeddingResponse, InputUsage
from server.protocol.fields import EMBEDDINGS
from server.requests import Asked, Reception, check_num_inputs, json_response
from server.routes.completions import split_prompts

OPERATION: Final = Operation(
    summary="Texts as vectors",
    tag="OpenAI",
    body=EmbeddingRequest,
    answer=EmbeddingResponse,
    statuses=GENERATION_STATUSES,
)


def embedding_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handler of the path."""
    reader = BodyReader(EmbeddingRequest, EMBEDDINGS)

    @post("/v1/embeddings", status_code=200, opt={"operation": OPERATION}, name="create_embedding")
    async def create_embedding(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, reader, prefix="embd-")
        engine = reception.service.ready_engine()
        prompts = split_prompts(asked.body.input, "input")
        check_num_inputs(len(prompts), reception.service.config.limits)

        async def work() -> tuple[list[list[int]], list[EmbeddingRequestOutput]]:
            limit = asked.body.truncate_prompt_tokens
            many = await asyncio.gather(*map(engine.prompt_ids, prompts))
            many = [cut_prompt(ids, limit, engine.max_model_len - 1) for ids in many]
            if not all(many):
                raise InvalidRequestError("input holds a text without a token: give at least one", param="input")
            check_length("input", many, "", None, engine.max_model_len)
            group, priority = QueueGroup(), asked.body.priority or 0
            salt = {} if asked.body.cache_salt is None else {"cache_salt": asked.body.cache_salt}
            asking = [
                engine.embed({"prompt_token_ids": ids, **salt}, request_id=request_name(asked.name, index), priority=priority, group=group)
                for index, ids in enumerate(many)
            ]
            return many, await all_or_none(asking)

        many, outputs = await unless_client_leaves(request.receive, work())
        return json_response(_answer(asked, many, [output.outputs.embedding for output in outputs]), asked.headers)

    return [create_embedding]


def _answer(asked: Asked[EmbeddingRequest], many: list[list[int]], vectors: list[Sequence[float]]) -> EmbeddingResponse:
    is_packed = asked.body.encoding_format == "base64"
    data = [EmbeddingItem(index=index, embedding=_packed(vector) if is_packed else list(vector)) for index, vector in enumerate(vectors)]
    num_tokens = sum(map(len, many))
    asked.record.num_prompt_tokens, asked.record.end = num_tokens, End.STOP
    return EmbeddingResponse(data=data, model=asked.model, usage=InputUsage(prompt_tokens=num_tokens, total_tokens=num_tokens))


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
