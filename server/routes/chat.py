"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from msgspec import UNSET, UnsetType

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import ChatTemplateError, InvalidRequestError
from jaxpaged.request import CompletionOutput, SamplingParams
from server.beams import beam_outputs, beam_params
from server.choices import TokenNames, chat_logprobs, finish_reason, prompt_logprobs
from server.conversation import template_messages
from server.generation import Job, Outputs, check_length, cut_prompt, end_of, last_outputs, unless_client_leaves
from server.operations import GENERATION_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.chat import AnswerMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatRequest, ChatResponse, Delta, Message
from server.protocol.fields import CHAT
from server.protocol.generation import Timings, make_timings
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
from server.streaming import DONE, TextEvent, event, tell_failure
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
        search = beam_params(asked.body, job.params.max_tokens, engine, num_logprobs=asked.body.top_logprobs, name="top_logprobs")
        if search is not None:
            outputs = await unless_client_leaves(request.receive, beam_outputs(engine, job, search))
            return json_response(_Answer(asked, job, engine).whole(outputs[0]), asked.headers)
        if asked.body.stream:
            return await started_stream(request, engine, job, asked, _Stream(asked, job, engine), reception.service)
        outputs = await unless_client_leaves(request.receive, last_outputs(engine, job))
        return json_response(_Answer(asked, job, engine).whole(outputs[0]), asked.headers)

    return [create_chat_completion]


async def chat_job(asked: Asked[ChatRequest], engine: EngineClient, reception: Reception) -> Job:
    """What the engine is asked for. Raises JaxpagedError for what it cannot be."""
    body, limits = asked.body, reception.service.config.limits
    check_messages(body.messages, limits)
    check_limits(body, 1, limits)
    check_logprobs("top_logprobs", body.top_logprobs, reception.service.config)
    check_prompt_logprobs(body, reception.service.config)
    if body.top_logprobs and not body.logprobs:
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


def token_names(asked: Asked[ChatRequest], job: Job, engine: EngineClient) -> TokenNames:
    """How log-probabilities name tokens."""
    special = engine.get_tokenizer().special_ids if job.params.skip_special_tokens else frozenset[int]()
    return TokenNames(special, bool(asked.body.return_tokens_as_token_ids))


class _Answer:
    """The answer at once."""

    def __init__(self, asked: Asked[ChatRequest], job: Job, engine: EngineClient) -> None:
        self._asked, self._body, self._job = asked, asked.body, job
        self._names = token_names(asked, job, engine)
        self._num_top = asked.body.top_logprobs or 0

    def whole(self, output: Any) -> ChatResponse:
        """The answer at once."""
        asked, body = self._asked, self._body
        tally = Tally(asked.record, self._job, is_streamed=False)
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


class _Stream:
    """The answer as a stream; see `Telling`."""

    def __init__(self, asked: Asked[ChatRequest], job: Job, engine: EngineClient) -> None:
        body, options = asked.body, asked.body.stream_options
        self._asked, self._body = asked, body
        self._names = token_names(asked, job, engine)
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = bool(options and options.continuous_usage_stats)
        self._tally = Tally(asked.record, job, is_streamed=True)
        self._blank = ChatChunk(
            id=asked.name,
            created=asked.created,
            model=asked.model,
            choices=[],
            system_fingerprint=FINGERPRINT,
            usage=None if self._has_usage else UNSET,
        )
        self._prompt_ids = job.prompts[0] if body.return_token_ids else UNSET
        self._is_begun = [False] * job.params.n
        self._is_plain = job.params.n == 1 and not (body.logprobs or body.return_token_ids or self._has_running_usage)
        """Between the first event and the last one, nothing changes but a text."""
        self._text_event: TextEvent | None = None

    def opening(self) -> bytes:
        return b""

    def news(self, outputs: Outputs) -> bytes:
        self._tally.take(outputs)
        output = outputs[0][1]
        if self._text_event is not None and not output.finished:
            text = output.outputs[0].text
            return self._text_event.with_text(text) if text else b""
        choices = [choice for completion in output.outputs if (choice := self._choice(completion)) is not None]
        if not (choices or output.finished):
            return b""
        if self._is_plain and self._text_event is None:
            self._text_event = TextEvent(self._event_of)
        usage = self._tally.usage() if self._has_running_usage else self._blank.usage
        timings = self._timings() if output.finished and not self._has_usage else UNSET
        prompt_ids, self._prompt_ids = self._prompt_ids, UNSET
        return event(msgspec.structs.replace(self._blank, choices=choices, usage=usage, prompt_token_ids=prompt_ids, timings=timings))

    def closing(self) -> bytes:
        self._tally.finish()
        if not self._has_usage:
            return DONE
        return event(msgspec.structs.replace(self._blank, usage=self._tally.usage(), timings=self._timings())) + DONE

    def failure(self, error: Exception) -> bytes:
        return tell_failure(self._asked.record, error)

    def _event_of(self, text: str) -> bytes:
        choice = ChatChunkChoice(index=0, delta=Delta(content=text))
        return event(msgspec.structs.replace(self._blank, choices=[choice]))

    def _timings(self) -> Timings | UnsetType:
        return make_timings(*self._tally.timing_values()) if self._body.timings else UNSET

    def _choice(self, completion: CompletionOutput) -> ChatChunkChoice | None:
        """What is new of an answer; None if that is nothing to tell."""
        is_first = not self._is_begun[completion.index]
        reason = finish_reason(completion)
        logprobs = chat_logprobs(completion, self._body.top_logprobs or 0, self._names)
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
