"""POST /v1/score: how likely the model finds given continuations of a prompt, as harnesses that choose between answers ask."""

from typing import Any, Final

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler

from jaxpaged.errors import InvalidRequestError
from jaxpaged.queue_group import QueueGroup
from server.generation import all_or_none, request_name, unless_client_leaves
from server.ledger import End
from server.operations import GENERATION_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.embeddings import InputUsage, ScoreItem, ScoreRequest, ScoreResponse
from server.protocol.fields import SCORE
from server.requests import Reception, check_num_prompts, json_response
from server.routes.completions import split_prompts

OPERATION: Final = Operation(
    summary="How likely continuations of a prompt are",
    tag="Tokens",
    body=ScoreRequest,
    answer=ScoreResponse,
    statuses=GENERATION_STATUSES,
)


def score_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handlers of both spellings of the path."""
    reader = BodyReader(ScoreRequest, SCORE)

    @post(["/v1/score", "/score"], status_code=200, opt={"operation": OPERATION})
    async def score(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, reader, prefix="score-")
        body, engine = asked.body, reception.service.ready_engine()
        continuations = split_prompts(body.continuation, "continuation")
        check_num_prompts("continuation", len(continuations), reception.service.config.limits)
        prompt: dict[str, Any] = {"prompt" if isinstance(body.prompt, str) else "prompt_token_ids": body.prompt}
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        group, priority = QueueGroup(), body.priority or 0
        asking = [
            engine.score(prompt, continuation, request_name(asked.name, index), priority=priority, group=group)  # type: ignore[arg-type]
            for index, continuation in enumerate(continuations)
        ]
        try:
            scores = await unless_client_leaves(request.receive, all_or_none(asking))
        except InvalidRequestError as error:
            raise type(error)(error.message, param="continuation" if error.param == "continuations" else error.param) from None
        data = [
            ScoreItem(
                index=index,
                score=one.logprob,
                is_greedy=one.is_greedy,
                token_ids=one.token_ids,
                token_logprobs=one.token_logprobs,
            )
            for index, one in enumerate(scores)
        ]
        num_tokens = sum(one.num_prompt_tokens + len(one.token_ids) for one in scores)
        asked.record.num_prompt_tokens, asked.record.end = num_tokens, End.STOP
        usage = InputUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return json_response(ScoreResponse(id=asked.name, created=asked.created, model=asked.model, data=data, usage=usage), asked.headers)

    return [score]
