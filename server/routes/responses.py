"""/v1/responses: create (whole and streamed), get, cancel, delete, input items. What is stored is in memory, and bounded."""

import uuid
from collections.abc import Iterable
from typing import Any, Final

from litestar import Request, Response, delete, get, post
from litestar.datastructures import MultiDict
from litestar.handlers import HTTPRouteHandler

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import ChatTemplateError, InvalidRequestError, RequestAbortedError
from jaxpaged.request import SamplingParams
from server.generation import Job, check_length, last_outputs, request_name, unless_client_leaves
from server.operations import GENERATION_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.chat import Message
from server.protocol.fields import RESPONSES
from server.protocol.responses import (
    DeletedResponse,
    InputItem,
    ItemList,
    KeptMessage,
    KeptText,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from server.requests import Asked, Reception, check_logprobs, check_messages, json_response
from server.response_answer import ResponseAnswer
from server.response_store import ResponseStore, StoredResponse
from server.routes.chat import conversation_ids
from server.tally import started_stream

TAG: Final = "OpenAI"
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDES: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What OpenAI can add to an answer; all but the first are parts of what is not served, and have nothing to add."""

CREATE: Final = Operation(
    summary="Answer a text or a conversation",
    tag=TAG,
    body=ResponsesRequest,
    answer=ResponseObject,
    chunk=ResponseEvent,
    statuses=GENERATION_STATUSES,
)
GET: Final = Operation(summary="A response that is stored", tag=TAG, answer=ResponseObject, statuses=(400, 404))
CANCEL: Final = Operation(summary="End a response that is being made", tag=TAG, answer=ResponseObject, statuses=(400, 404))
DELETE: Final = Operation(summary="Forget a response", tag=TAG, answer=DeletedResponse, statuses=(404,))
ITEMS: Final = Operation(summary="The input of a response", tag=TAG, answer=ItemList, statuses=(400, 404))

MAX_ITEMS: Final = 100
MAX_TEMPERATURE: Final = 2.0
"""Answers repeat it, and OpenAI's schema of an answer has no larger one; the other endpoints take what the engine takes."""


def response_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handlers of all paths, over one store."""
    service = reception.service
    store = ResponseStore(service.config.limits)
    reader = BodyReader(ResponsesRequest, RESPONSES)

    @post("/v1/responses", status_code=200, opt={"operation": CREATE}, name="create_response")
    async def create_response(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, reader, prefix="resp_")
        engine = service.ready_engine()
        body = asked.body
        has_logprobs = check_include(body)
        check_logprobs("top_logprobs", body.top_logprobs, service.config)
        before = _conversation_of(store, body.previous_response_id) if body.previous_response_id else []
        items, new = read_input(body.input)
        stored = StoredResponse(_begun(asked), items, [*before, *new])
        check_messages(stored.messages, service.config.limits)
        job = await unless_client_leaves(request.receive, _job(asked, engine, stored.messages, has_logprobs=has_logprobs))
        if stored.response.store:
            store.put(stored)
        answer = ResponseAnswer(asked, job, stored, engine, has_logprobs=has_logprobs)

        def keep() -> None:
            if not store.has(stored):
                return
            if stored.response.status == "in_progress":  # the client left, or it failed: it will not be done any more
                store.remove(stored.response.id)
            else:
                store.put(stored)

        try:
            if body.stream:
                return await started_stream(request, engine, job, asked, answer, service, at_end=keep)
            (output,) = await unless_client_leaves(request.receive, last_outputs(engine, job))
        except BaseException as error:
            if stored.is_cancelled and isinstance(error, RequestAbortedError):
                return json_response(answer.cancelled(), asked.headers)
            if store.has(stored):
                store.remove(stored.response.id)
            raise
        response = answer.cancelled() if stored.is_cancelled else answer.whole(output)
        keep()
        return json_response(response, asked.headers)

    @get("/v1/responses/{response_id:str}", opt={"operation": GET}, name="retrieve_response")
    async def retrieve_response(request: Request[Any, Any, Any]) -> Response[bytes]:
        check_query(request.query_params)
        return json_response(store.get(id_in(request)).response)

    @delete("/v1/responses/{response_id:str}", status_code=200, opt={"operation": DELETE}, name="delete_response")
    async def delete_response(request: Request[Any, Any, Any]) -> Response[bytes]:
        response_id = id_in(request)
        store.remove(response_id)
        return json_response(DeletedResponse(id=response_id))

    @post("/v1/responses/{response_id:str}/cancel", status_code=200, opt={"operation": CANCEL}, name="cancel_response")
    async def cancel_response(request: Request[Any, Any, Any]) -> Response[bytes]:
        response_id = id_in(request)
        stored = store.get(response_id)
        if stored.response.status != "in_progress":
            raise InvalidRequestError(f"The response is {stored.response.status} and cannot be cancelled any more", param="response_id")
        engine = service.open_engine()
        stored.cancel()
        engine.abort(request_name(response_id, 0))
        return json_response(stored.response)

    @get("/v1/responses/{response_id:str}/input_items", opt={"operation": ITEMS}, name="list_input_items")
    async def list_input_items(request: Request[Any, Any, Any]) -> Response[bytes]:
        check_includes(request.query_params.getall("include", []) + request.query_params.getall("include[]", []))
        return json_response(page_of(store.get(id_in(request)).items, request.query_params))

    return [create_response, retrieve_response, delete_response, cancel_response, list_input_items]


def _conversation_of(store: ResponseStore, response_id: str) -> list[Any]:
    """What a response ended with. Raises InvalidRequestError for one that has no end, or none to go on from."""
    before = store.get(response_id, param="previous_response_id")
    if before.response.status not in ("completed", "incomplete"):
        raise InvalidRequestError(
            f"The response {response_id} is {before.response.status}: there is no answer to go on from", param="previous_response_id"
        )
    return before.conversation


def id_in(request: Request[Any, Any, Any]) -> str:
    """The id in the path."""
    return str(request.path_params["response_id"])


def check_include(body: ResponsesRequest) -> bool:
    """Whether log-probabilities are wanted. Raises InvalidRequestError for what nobody can include."""
    check_includes(body.include or ())
    return LOGPROBS in (body.include or ())


def check_includes(names: Iterable[str]) -> None:
    """Raises InvalidRequestError for what nobody can include."""
    for name in names:
        if name not in INCLUDES:
            raise InvalidRequestError(f"include holds {name[:60]!r}, which is none of {', '.join(INCLUDES)}", param="include")


def check_query(query: MultiDict[str]) -> None:
    """What is asked of a stored response besides itself. Raises InvalidRequestError for what is not served."""
    check_includes(query.getall("include", []) + query.getall("include[]", []))
    if query.get("stream", "false").lower() not in ("", "false", "0"):
        raise InvalidRequestError(
            "A stored response cannot be streamed, since none is made in the background: leave stream out, or give stream: true when you "
            "create it",
            param="stream",
        )
    if "starting_after" in query:
        raise InvalidRequestError("starting_after is a place in a stream, and stored responses are not streamed", param="starting_after")


def read_input(given: str | list[InputItem]) -> tuple[list[KeptMessage], list[Message]]:
    """The input as it is kept, and as messages. Raises InvalidRequestError for items that are no messages of text."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise InvalidRequestError("input is an empty list: give at least one message", param="input")
    items: list[KeptMessage] = []
    messages: list[Message] = []
    for index, item in enumerate(given):
        if item.type != "message" or item.role is None:
            raise InvalidRequestError(
                f"input[{index}] is an item of type {item.type[:40]!r}; only messages are served", param=f"input[{index}]"
            )
        text = _text_of(item, f"input[{index}].content")
        messages.append(Message(role=item.role, content=text))
        item_id = item.id or f"msg_{uuid.uuid4().hex}"
        kept = KeptText(type="input_text", text=text)
        if item.role == "assistant":
            kept = KeptText(type="output_text", text=text, annotations=[], logprobs=[])
        items.append(KeptMessage(id=item_id, role=item.role, content=[kept]))
    return items, messages


def _text_of(item: InputItem, where: str) -> str:
    if item.content is None:
        raise InvalidRequestError(f"{where} is missing", param=where)
    if isinstance(item.content, str):
        return item.content
    texts = []
    for index, part in enumerate(item.content):
        text = {"input_text": part.text, "output_text": part.text, "text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            raise InvalidRequestError(
                f"{where}[{index}] is a part of type {part.type[:40]!r} without text: this model takes text parts only",
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)


def page_of(items: list[KeptMessage], query: Any) -> ItemList:
    """A page of a list. Raises InvalidRequestError for an order, a limit or a place that there is not."""
    order, limit_text, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is asc or desc, got {order[:20]!r}", param="order")
    limit = int(limit_text) if limit_text.isascii() and limit_text.isdigit() and len(limit_text) < 9 else 0
    if not 1 <= limit <= MAX_ITEMS:
        raise InvalidRequestError(f"limit is from 1 to {MAX_ITEMS}, got {limit_text[:20]!r}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item.id == after]
        if not places:
            raise InvalidRequestError("after names no item of this response", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return ItemList(data=page, first_id=page[0].id if page else "", last_id=page[-1].id if page else "", has_more=len(ordered) > len(page))


def _begun(asked: Asked[ResponsesRequest]) -> ResponseObject:
    body = asked.body
    return ResponseObject(
        id=asked.name,
        created_at=asked.created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=asked.model,
        previous_response_id=body.previous_response_id,
        store=body.store is not False,
        temperature=body.temperature,
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
    )


async def _job(asked: Asked[ResponsesRequest], engine: EngineClient, messages: list[Message], *, has_logprobs: bool) -> Job:
    body = asked.body
    if body.temperature is not None and body.temperature > MAX_TEMPERATURE:
        raise InvalidRequestError(
            f"temperature must be between 0 and {MAX_TEMPERATURE:g} in /v1/responses, whose answers tell it, got {body.temperature:g}",
            param="temperature",
        )
    try:
        params = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if has_logprobs else None,
        )
    except InvalidRequestError as error:
        param = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}.get(error.param or "", error.param)
        raise InvalidRequestError(error.message.replace(error.param or "", param or "", 1), param=param) from None
    first = [Message(role="system", content=body.instructions)] if body.instructions else []
    try:
        ids = await conversation_ids(engine, [*first, *messages], True, False, None)
    except ChatTemplateError as error:
        raise ChatTemplateError(error.message, param="input") from None
    check_length("input", [ids], "max_output_tokens", body.max_output_tokens, engine.max_model_len)
    return Job(request_id=asked.name, prompts=[ids], params=params, priority=body.priority or 0, cache_salt=body.cache_salt)
