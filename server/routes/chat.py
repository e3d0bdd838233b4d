"""POST /v1/chat/completions."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from msgspec import UNSET

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import ChatTemplateError, InvalidRequestError
from jaxpaged.request import CompletionOutput, SamplingParams
from server.choices import TokenNames, chat_logprobs, finish_reason, prompt_logprobs
from server.conversation import template_messages
from server.generation import Job, Outputs, check_length, cut_prompt, end_of, last_outputs, unless_client_leaves
from server.operations import GENERATION_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.chat import AnswerMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatRequest, ChatResponse, Delta, Message
from server.protocol.fields import CHAT
from server.protocol.generation import make_timings
from server.requests import (
    FINGERPRINT,
    Asked,
    Reception,
    check_limits,
    check_logprobs,
    check_messages,
    check_prompt_logprobs,
    json_response,
    sampling_params,
)
from server.streaming import DONE, event
from server.tally import Tally, started_stream

OPERATION: Final = Operation(
    summary="Continue a conversation",
    tag="OpenAI",
    body=ChatRequest,
    answer=ChatResponse,
    chunk=ChatChunk,
    statuses=GENERATION_STATUSES,
)


def chat_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handler of the path."""
    reader = BodyReader(ChatRequest, CHAT)

    @post("/v1/chat/completions", status_code=200, opt={"operation": OPERATION}, name="create_chat_completion")
    async def create_chat_completion(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, reader, prefix="chatcmpl-")
        engine = reception.service.ready_engine()
        job = await unless_client_leaves(request.receive, chat_job(asked, engine, reception))
        answer = _Answer(asked, job, engine)
        if asked.body.stream:
            return await started_stream(request, engine, job, asked, answer.events, reception.service)
        outputs = await unless_client_leaves(request.receive, last_outputs(engine, job))
        return json_response(answer.whole(outputs[0]), asked.headers)

    return [create_chat_completion]


async def chat_job(asked: Asked[ChatRequest], engine: EngineClient, reception: Reception) -> Job:
    """What the engine is asked for. Raises JaxpagedError for what it cannot be."""
    body, limits = asked.body, reception.service.config.limits
    check_messages(body.messages, limits)
    check_limits(body, 1, limits)
    check_logprobs("top_logprobs", body.top_logprobs, reception.service.config)
    check_prompt_logprobs(body, reception.service.config)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and body.max_tokens != max_tokens:
        raise InvalidRequestError(f"max_tokens is {body.max_tokens} and max_completion_tokens {max_tokens}: give one of them", param=name)
    params = _params(asked, name, max_tokens)
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    ids = await conversation_ids(engine, body.messages, opens, continues, body.chat_template_kwargs)
    ids = cut_prompt(ids, body.truncate_prompt_tokens, engine.max_model_len - (max_tokens or 1))
    check_length("messages", [ids], name, max_tokens, engine.max_model_len)
    return Job(request_id=asked.name, prompts=[ids], params=params, priority=body.priority or 0, cache_salt=body.cache_salt)


async def conversation_ids(
    engine: EngineClient, messages: Sequence[Message], opens: bool, continues: bool, variables: dict[str, Any] | None
) -> list[int]:
    """Token ids of a conversation; where the template takes only one system message, those at its beginning are one.

    Args:
        opens: the assistant's turn is opened.
        continues: the last message is to be continued.
        variables: of the template.

    Raises:
        ChatTemplateError: it refuses them.
    """

    async def ids_of(is_joined: bool) -> list[int]:
        return await engine.chat_prompt(
            template_messages(messages, is_joined=is_joined),
            add_generation_prompt=opens,
            continue_final_message=continues,
            variables=variables,
        )

    try:
        return await ids_of(False)
    except ChatTemplateError:
        if [message.role in ("system", "developer") for message in messages[:2]] != [True, True]:
            raise
    return await ids_of(True)


def _params(asked: Asked[ChatRequest], name: str, max_tokens: int | None) -> SamplingParams:
    body = asked.body
    try:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    except InvalidRequestError as error:
        # The engine's names of two fields are others.
        param = {"max_tokens": name, "logprobs": "top_logprobs"}.get(error.param or "", error.param)
        raise InvalidRequestError(error.message.replace(error.param or "", param or "", 1), param=param) from None


class _Answer:
    """Makes the bodies of one answer."""

    def __init__(self, asked: Asked[ChatRequest], job: Job, engine: EngineClient) -> None:
        self._asked, self._body, self._job = asked, asked.body, job
        special = engine.get_tokenizer().special_ids if job.params.skip_special_tokens else frozenset[int]()
        self._names = TokenNames(special, bool(asked.body.return_tokens_as_token_ids))
        self._num_top = asked.body.top_logprobs or 0
        self._is_begun = [False] * job.params.n

    def whole(self, output: Any) -> ChatResponse:
        """The answer at once."""
        asked, body = self._asked, self._body
        tally = Tally(asked.record, self._job)
        tally.take([(0, output)])
        tally.finish(end_of([output]))
        return ChatResponse(
            id=asked.name,
            created=asked.created,
            model=asked.model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=tally.usage(),
            system_fingerprint=FINGERPRINT,
            prompt_token_ids=self._job.prompts[0] if body.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs) or UNSET,
            timings=make_timings(*tally.timing_values()) if body.timings else UNSET,
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=AnswerMessage(content=completion.text),
            logprobs=chat_logprobs(completion, self._num_top, self._names),
            finish_reason=finish_reason(completion),  # type: ignore[arg-type]
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else UNSET,
        )

    async def events(self, outputs: AsyncIterator[Outputs]) -> AsyncGenerator[bytes]:
        """The answer as a stream."""
        body, options = self._body, self._body.stream_options
        has_usage = bool(options and options.include_usage)
        has_running_usage = bool(options and options.continuous_usage_stats)
        tally = Tally(self._asked.record, self._job)
        blank = ChatChunk(
            id=self._asked.name,
            created=self._asked.created,
            model=self._asked.model,
            choices=[],
            system_fingerprint=FINGERPRINT,
            usage=None if has_usage else UNSET,
        )
        prompt_ids = self._job.prompts[0] if body.return_token_ids else UNSET
        async for batch in outputs:
            tally.take(batch)
            ((_, output),) = batch
            choices = [choice for completion in output.outputs if (choice := self._chunk_choice(completion)) is not None]
            if choices or output.finished:
                usage = tally.usage() if has_running_usage else blank.usage
                timings = make_timings(*tally.timing_values()) if body.timings and output.finished and not has_usage else UNSET
                yield event(msgspec.structs.replace(blank, choices=choices, usage=usage, prompt_token_ids=prompt_ids, timings=timings))
                prompt_ids = UNSET
        if has_usage:
            timings = make_timings(*tally.timing_values()) if body.timings else UNSET
            yield event(msgspec.structs.replace(blank, usage=tally.usage(), timings=timings))
        tally.finish()
        yield DONE

    def _chunk_choice(self, completion: CompletionOutput) -> ChatChunkChoice | None:
        """What is new of an answer; None if that is nothing to tell."""
        is_first = not self._is_begun[completion.index]
        reason = finish_reason(completion)
        logprobs = chat_logprobs(completion, self._num_top, self._names)
        is_last = reason is not None
        if not (is_first or is_last or completion.text or logprobs or self._body.return_token_ids):
            return None
        self._is_begun[completion.index] = True
        return ChatChunkChoice(
            index=completion.index,
            delta=Delta(role="assistant", content=completion.text, refusal=None) if is_first else Delta(content=completion.text),
            logprobs=logprobs,
            finish_reason=reason,  # type: ignore[arg-type]
            stop_reason=completion.stop_reason if is_last else UNSET,
            token_ids=completion.token_ids if self._body.return_token_ids else UNSET,
        )
