"""POST /tokenize and /detokenize, GET /tokenizer_info: for clients that count or tokenize for themselves."""

import asyncio
from typing import Any, Final

from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler

from jaxpaged.errors import InvalidRequestError
from server.generation import unless_client_leaves
from server.operations import BODY_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.fields import DETOKENIZE, TOKENIZE
from server.protocol.models import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse, TokenizerInfo
from server.requests import Reception, check_messages, json_response
from server.routes.chat import conversation_ids
from server.tokenizer_info import tokenizer_info as tokenizer_info_body

TAG: Final = "Tokens"


def token_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handlers of the three paths."""
    service = reception.service
    told = b""
    tokenize_reader, detokenize_reader = BodyReader(TokenizeRequest, TOKENIZE), BodyReader(DetokenizeRequest, DETOKENIZE)
    tokenize_operation = Operation(
        summary="Token ids of a text or a conversation", tag=TAG, body=TokenizeRequest, answer=TokenizeResponse, statuses=BODY_STATUSES
    )
    detokenize_operation = Operation(
        summary="Text of token ids", tag=TAG, body=DetokenizeRequest, answer=DetokenizeResponse, statuses=BODY_STATUSES
    )
    tokenizer_operation = Operation(summary="The tokenizer of the model", tag=TAG, answer=TokenizerInfo, statuses=(503,))

    async def ids_of(body: TokenizeRequest) -> list[int]:
        engine = service.ready_engine()
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if body.messages is None:
            return await engine.prompt_ids(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        check_messages(body.messages, service.config.limits)
        continues = bool(body.continue_final_message)
        opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        ids = await conversation_ids(engine, body.messages, opens, continues, body.chat_template_kwargs)
        return engine.get_tokenizer().with_ends(ids) if body.add_special_tokens else ids

    @post("/tokenize", status_code=200, opt={"operation": tokenize_operation}, name="tokenize")
    async def tokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, tokenize_reader, prefix="")
        ids = await unless_client_leaves(request.receive, ids_of(asked.body))
        engine = service.ready_engine()
        tokenizer = engine.get_tokenizer()
        strings = [tokenizer.spelling(token_id) for token_id in ids] if asked.body.return_token_strs else None
        answer = TokenizeResponse(count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=strings)
        return json_response(answer, asked.headers)

    @post("/detokenize", status_code=200, opt={"operation": detokenize_operation}, name="detokenize")
    async def detokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, detokenize_reader, prefix="")
        engine = service.ready_engine()
        try:
            ids = await engine.prompt_ids(asked.body.tokens)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message.replace("A prompt's token ids", "tokens", 1), param="tokens") from None
        # A body may hold a million of them, which take a second.
        text = await asyncio.to_thread(engine.get_tokenizer().decode, ids, skip_special_tokens=False)
        return json_response(DetokenizeResponse(prompt=text), asked.headers)

    @get("/tokenizer_info", opt={"operation": tokenizer_operation}, name="tokenizer_info")
    async def tokenizer_info() -> Response[bytes]:
        nonlocal told
        engine = service.ready_engine()
        # Made once: the added tokens of some models are thousands.
        told = told or tokenizer_info_body(engine.get_tokenizer(), engine.max_model_len)
        return Response(told, media_type="application/json")

    return [tokenize, detokenize, tokenizer_info]
