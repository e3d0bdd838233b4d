"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from msgspec import UNSET, UnsetType

from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Prompt
from jaxpaged.request import CompletionOutput, Logprob, RequestOutput
from server.beams import beam_outputs, beam_params
from server.choices import LegacyLogprobs, TokenNames, finish_reason, prompt_logprobs
from server.generation import Job, Outputs, check_length, cut_prompt, end_of, last_outputs, unless_client_leaves
from server.operations import GENERATION_STATUSES, Operation
from server.protocol.bodies import BodyReader
from server.protocol.completions import CompletionChoice, CompletionRequest, CompletionResponse
from server.protocol.fields import COMPLETIONS
from server.protocol.generation import Timings, make_timings
from server.requests import (
    FINGERPRINT,
    Asked,
    Reception,
    check_limits,
    check_logprobs,
    check_prompt_logprobs,
    json_response,
    sampling_params,
)
from server.streaming import DONE, TextEvent, event, tell_failure
from server.tally import Tally, started_stream

DEFAULT_MAX_TOKENS: Final = 16

OPERATION: Final = Operation(
    summary="Continue one prompt or several",
    tag="OpenAI",
    body=CompletionRequest,
    answer=CompletionResponse,
    chunk=CompletionResponse,
    statuses=GENERATION_STATUSES,
)


def completion_routes(reception: Reception) -> list[HTTPRouteHandler]:
    """The handler of the path."""
    reader = BodyReader(CompletionRequest, COMPLETIONS)

    @post("/v1/completions", status_code=200, opt={"operation": OPERATION}, name="create_completion")
    async def create_completion(request: Request[Any, Any, Any]) -> Response[bytes]:
        asked = await reception.read(request, reader, prefix="cmpl-")
        engine = reception.service.ready_engine()
        job = await unless_client_leaves(request.receive, completion_job(asked, engine, reception))
        answer = _Answer(asked, job, engine)
        search = beam_params(asked.body, job.params.max_tokens, engine, num_logprobs=asked.body.logprobs, name="logprobs")
        if search is not None:
            if asked.body.echo:
                raise InvalidRequestError("echo cannot be given with use_beam_search: leave it out", param="echo")
            outputs = await unless_client_leaves(request.receive, beam_outputs(engine, job, search))
            return json_response(answer.whole(outputs), asked.headers)
        if asked.body.stream:
            return await started_stream(request, engine, job, asked, _Stream(answer, asked, job), reception.service)
        outputs = await unless_client_leaves(request.receive, last_outputs(engine, job))
        return json_response(answer.whole(outputs), asked.headers)

    return [create_completion]


async def completion_job(asked: Asked[CompletionRequest], engine: EngineClient, reception: Reception) -> Job:
    """What the engine is asked for. Raises JaxpagedError for what it cannot be."""
    body = asked.body
    prompts = split_prompts(body.prompt)
    config = reception.service.config
    check_limits(body, len(prompts), config.limits)
    check_logprobs("logprobs", body.logprobs, config)
    check_prompt_logprobs(body, config)
    params = sampling_params(
        body,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_num_prompt_logprobs(body),
    )
    adds_special = body.add_special_tokens is not False
    many = await asyncio.gather(*(engine.prompt_ids(prompt, add_special_tokens=adds_special) for prompt in prompts))
    most = engine.max_model_len - (body.max_tokens or 1)
    many = [cut_prompt(ids, body.truncate_prompt_tokens, most) for ids in many]
    for index, ids in enumerate(many):
        if not ids:
            at = f" {index}" if len(many) > 1 else ""
            raise InvalidRequestError(f"The prompt{at} is empty: give at least one token", param="prompt")
    check_length("prompt", many, "max_tokens", body.max_tokens, engine.max_model_len)
    return Job(request_id=asked.name, prompts=many, params=params, priority=body.priority or 0, cache_salt=body.cache_salt)


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many likeliest tokens are to be told of each token of the prompt: an echo has log-probabilities as the answer has.

    The engine reads a prompt without going on from it only for these; an echo alone tells none of them.
    """
    is_echo_alone = bool(body.echo) and body.max_tokens == 0
    echoed = (body.logprobs or 0) if is_echo_alone else body.logprobs if body.echo else None
    asked = [number for number in (body.prompt_logprobs, echoed) if number is not None]
    return max(asked, default=None)


def split_prompts(prompt: str | list[str | int | list[int]], field: str = "prompt") -> list[Prompt]:
    """One prompt or many, as a list: a list of integers is one. Raises InvalidRequestError for an empty or a mixed list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError(f"{field} is an empty list: give at least one", param=field)
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError(
            f"{field} is a text, a list of texts, a list of token ids or a list of such lists, not a mixture", param=field
        )
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


class _Answer:
    """Makes the bodies of one answer. The answers of prompt `i` have the indices `i * n` to `i * n + n - 1`."""

    def __init__(self, asked: Asked[CompletionRequest], job: Job, engine: EngineClient) -> None:
        body = asked.body
        self._asked, self._body, self._job = asked, body, job
        tokenizer = engine.get_tokenizer()
        skips = job.params.skip_special_tokens
        self._echoes = [tokenizer.decode(ids, skip_special_tokens=skips) if body.echo else "" for ids in job.prompts]
        names = TokenNames(tokenizer.special_ids if skips else frozenset[int](), bool(body.return_tokens_as_token_ids))
        # An echo's own tokens are told first, from the beginning of the text on.
        offsets = [0 if body.logprobs is not None else len(echo) for echo in self._echoes]
        self._logprobs = [LegacyLogprobs(body.logprobs or 0, names, tokenizer, offset) for offset in offsets for _ in range(job.params.n)]
        self._prompt_logprobs: list[list[dict[int, Logprob] | None] | None] = [None] * len(job.prompts)
        self._is_begun = [False] * len(self._logprobs)

    def whole(self, outputs: list[RequestOutput]) -> CompletionResponse:
        """The answer at once."""
        asked = self._asked
        tally = Tally(asked.record, self._job, is_streamed=False)
        tally.take(list(enumerate(outputs)))
        tally.finish(end_of(outputs))
        self._prompt_logprobs = [output.prompt_logprobs for output in outputs]
        choices = [self.choice(index, completion) for index, output in enumerate(outputs) for completion in output.outputs]
        timings = make_timings(*tally.timing_values()) if self._body.timings else UNSET
        return msgspec.structs.replace(self.blank(), choices=choices, usage=tally.usage(), timings=timings)

    def blank(self) -> CompletionResponse:
        """An answer that says nothing yet."""
        asked = self._asked
        return CompletionResponse(id=asked.name, created=asked.created, model=asked.model, choices=[], system_fingerprint=FINGERPRINT)

    def take_prompt(self, index: int, output: RequestOutput) -> None:
        """Keeps what came of a prompt, for the first event of its answers."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs

    def is_worth_telling(self, prompt_index: int, completion: CompletionOutput) -> bool:
        """Whether an event is due."""
        is_first = not self._is_begun[self._index(prompt_index, completion)]
        has_more = bool(completion.text or completion.logprobs or self._body.return_token_ids)
        return has_more or finish_reason(completion) is not None or (is_first and bool(self._body.echo))

    def choice(self, prompt_index: int, completion: CompletionOutput) -> CompletionChoice:
        """One answer, or what is new of it."""
        index, reason = self._index(prompt_index, completion), finish_reason(completion)
        is_first, self._is_begun[index] = not self._is_begun[index], True
        prompt_ids, told = self._job.prompts[prompt_index], self._prompt_logprobs[prompt_index]
        token_ids: list[int] = completion.token_ids
        logprobs: Sequence[dict[int, Logprob] | None] | None = completion.logprobs
        if is_first and self._body.echo and logprobs is not None and told is not None:
            token_ids, logprobs = [*prompt_ids, *token_ids], [*told, *logprobs]
        return CompletionChoice(
            index=index,
            text=self._echoes[prompt_index] + completion.text if is_first else completion.text,
            logprobs=self._logprobs[index].take(token_ids, logprobs),
            finish_reason=reason,  # type: ignore[arg-type]
            stop_reason=completion.stop_reason if reason is not None else UNSET,
            token_ids=completion.token_ids if self._body.return_token_ids else UNSET,
            prompt_token_ids=prompt_ids if self._body.return_token_ids and is_first else UNSET,
            prompt_logprobs=(prompt_logprobs(told) or UNSET) if self._body.prompt_logprobs is not None else UNSET,
        )

    def _index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._job.params.n + completion.index


class _Stream:
    """The answer as a stream; see `Telling`."""

    def __init__(self, answer: _Answer, asked: Asked[CompletionRequest], job: Job) -> None:
        body, options = asked.body, asked.body.stream_options
        self._answer, self._asked = answer, asked
        self._has_usage = bool(options and options.include_usage)
        self._has_running_usage = bool(options and options.continuous_usage_stats)
        self._tally = Tally(asked.record, job, is_streamed=True)
        self._blank = msgspec.structs.replace(answer.blank(), usage=None if self._has_usage else UNSET)
        self._num_open = len(job.prompts)
        is_one = len(job.prompts) == job.params.n == 1
        self._is_plain = is_one and body.logprobs is None and not body.return_token_ids and not self._has_running_usage
        """Between the first event and the last one, nothing changes but a text."""
        self._text_event: TextEvent | None = None

    def opening(self) -> bytes:
        return b""

    def news(self, outputs: Outputs) -> bytes:
        self._tally.take(outputs)
        if self._text_event is not None:
            output = outputs[0][1]
            if not output.finished:
                text = output.outputs[0].text
                return self._text_event.with_text(text) if text else b""
        for index, output in outputs:
            self._answer.take_prompt(index, output)
            self._num_open -= output.finished
        answer = self._answer
        choices = [
            answer.choice(index, made) for index, output in outputs for made in output.outputs if answer.is_worth_telling(index, made)
        ]
        if not choices:
            return b""
        if self._is_plain and self._text_event is None:
            self._text_event = TextEvent(self._event_of)
        usage = self._tally.usage() if self._has_running_usage else self._blank.usage
        timings = UNSET if self._num_open or self._has_usage else self._timings()
        return event(msgspec.structs.replace(self._blank, choices=choices, usage=usage, timings=timings))

    def closing(self) -> bytes:
        self._tally.finish()
        if not self._has_usage:
            return DONE
        return event(msgspec.structs.replace(self._blank, usage=self._tally.usage(), timings=self._timings())) + DONE

    def failure(self, error: Exception) -> bytes:
        return tell_failure(self._asked.record, error)

    def _event_of(self, text: str) -> bytes:
        choice = CompletionChoice(index=0, text=text, logprobs=None, finish_reason=None)
        return event(msgspec.structs.replace(self._blank, choices=[choice]))

    def _timings(self) -> Timings | UnsetType:
        return make_timings(*self._tally.timing_values()) if self._asked.body.timings else UNSET
