"""What every route does first: read the body, name the request, check names and limits, and find the engine."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from litestar import Request, Response

import jaxpaged
from jaxpaged import events
from jaxpaged.config import Config, LimitsConfig
from jaxpaged.errors import InvalidRequestError, ModelNotFoundError, UnsupportedMediaTypeError
from jaxpaged.request import SamplingParams
from server.ledger import RequestRecord, record_of
from server.protocol.bodies import Body, BodyReader, IgnoredNames
from server.protocol.generation import SamplingFields, sampling_values
from server.service import Service
from server.trace_parents import trace_parent

IGNORED_HEADER: Final = "x-jaxpaged-ignored"


FINGERPRINT: Final = f"jaxpaged-{jaxpaged.__version__}"
"""What answers carry as `system_fingerprint`."""


class Asked[T](NamedTuple):
    """A request whose body was read.

    Attributes:
        body: what it says.
        headers: of the answer, whatever it will be.
        record: the request in the books.
        name: of the answer, "chatcmpl-..." and the like.
        created: wall-clock second.
        model: the name that the answer carries.
    """

    body: T
    headers: dict[str, str]
    record: RequestRecord
    name: str
    created: int
    model: str


class Reception:
    """Reads bodies for one server.

    Args:
        service: the server.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._ignored = IgnoredNames()
        self._is_traced = service.config.tracing.otlp_endpoint is not None

    async def read[T: msgspec.Struct](self, request: Request[Any, Any, Any], reader: BodyReader[T], *, prefix: str) -> Asked[T]:
        """The body of a request, for a model that is served.

        Args:
            request: of which nothing was read.
            reader: of this path.
            prefix: what the name of the answer begins with; empty: it has none.

        Raises:
            UnsupportedMediaTypeError: another type than JSON.
            InvalidRequestError: what is wrong with it.
            ModelNotFoundError: another model.
        """
        record = record_of(request.scope)
        check_media_type(request.headers)
        content: Body[T] = reader.read(await request.body(), self.service.config.limits.max_body_parts)
        self._ignored.tell(request.scope["path"], content.ignored)
        headers = {IGNORED_HEADER: ",".join(content.ignored)} if content.ignored else {}
        if "priority" in content.content.__struct_fields__:
            check_priority(content.content.priority, self.service.config.limits)  # type: ignore[attr-defined]
        # The model's name is a field of every body.
        model = check_model(self.service, content.content.model)  # type: ignore[attr-defined]
        name = f"{prefix}{uuid.uuid4().hex}"
        record.answer_id = name if prefix else ""
        if self._is_traced and (parent := trace_parent(request.headers.getall("traceparent", []))) is not None:
            self.service.emit(events.RequestTraced(time_s=self.service.clocks.wall(), answer_id=name, parent=parent))
        return Asked(content.content, headers, record, name, int(time.time()), model)


def check_priority(priority: int | None, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError for one that would take the places of all others."""
    if priority is not None and priority < limits.min_priority:
        raise InvalidRequestError(
            f"priority is at least {limits.min_priority} here (limits.min_priority), got {priority}", param="priority"
        )


def check_media_type(headers: Mapping[str, str]) -> None:
    """Raises UnsupportedMediaTypeError for what is not plain JSON in UTF-8."""
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaTypeError(
            f"The body must be sent with Content-Type: application/json, got {media_type.strip()[:40]!r} "
            "(curl: -H 'Content-Type: application/json')"
        )
    charset = parameters.strip().lower().replace('"', "").removeprefix("charset=")
    if charset not in ("", "utf-8", "utf8"):
        raise UnsupportedMediaTypeError(f"The body must be UTF-8, got {parameters.strip()[:40]!r}")


def check_model(service: Service, name: str | None) -> str:
    """The name that the answer carries. Raises ModelNotFoundError for one that is not served."""
    if name is None:
        return service.model_name
    if name not in service.served_names:
        shown = name if len(name) <= 128 else name[:125] + "..."
        raise ModelNotFoundError(f"The model {shown!r} is not served here; there is {', '.join(service.served_names)}", param="model")
    return name


def check_limits(body: SamplingFields, num_prompts: int, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError naming the field, what was given and the limit."""
    n = 1 if body.n is None else body.n
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _at_least_one("n", n, limits.max_n, "limits.max_n")
    _at_most("n", n, limits.max_n, "limits.max_n", "answers")
    _at_most("prompt", num_prompts, limits.max_prompts, "limits.max_prompts", "prompts")
    _at_most("n", n * num_prompts, limits.max_answers, "limits.max_answers", "answers in all")
    _at_most("stop", len(stops), limits.max_stop, "limits.max_stop", "strings")
    if "" in stops:
        _at_least_one("the number of characters of a string of stop", 0, limits.max_stop_chars, "limits.max_stop_chars", param="stop")
    _at_most("stop", max(map(len, stops), default=0), limits.max_stop_chars, "limits.max_stop_chars", "characters in a string")
    _at_most("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stop_token_ids, "limits.max_stop_token_ids", "ids")
    _at_most("logit_bias", len(body.logit_bias or ()), limits.max_logit_bias, "limits.max_logit_bias", "ids")


def _at_least_one(what: str, given: int, limit: int, option: str, *, param: str | None = None) -> None:
    # Before the engine, whose own limits are wider, says so.
    if given < 1:
        raise InvalidRequestError(f"{what} is from 1 to {limit} ({option}), got {given}", param=param or what)


def _at_most(field: str, given: int, limit: int, option: str, what: str) -> None:
    if given > limit:
        raise InvalidRequestError(f"{field} takes at most {limit} {what} ({option}), got {given}", param=field)


def check_num_prompts(field: str, number: int, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError for too many texts to be scored at once."""
    _at_most(field, number, limits.max_prompts, "limits.max_prompts", "texts")


def check_num_inputs(number: int, limits: LimitsConfig) -> None:
    """Raises InvalidRequestError for too many inputs of embeddings at once."""
    _at_most("input", number, limits.max_inputs, "limits.max_inputs", "inputs")


def check_prompt_logprobs(body: SamplingFields, config: Config) -> None:
    """Raises InvalidRequestError for log-probabilities of the prompt in a stream, or too many."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs are not told in a stream: leave out stream, or prompt_logprobs", param="prompt_logprobs")
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config)


def check_logprobs(field: str, given: int | None, config: Config) -> None:
    """Raises InvalidRequestError for more likeliest tokens than the server tells."""
    _at_most(field, given or 0, config.sampling.max_logprobs, "sampling.max_logprobs", "likeliest tokens")


def check_messages(messages: Sequence[object], limits: LimitsConfig) -> None:
    """Raises InvalidRequestError for too many messages."""
    _at_most("messages", len(messages), limits.max_messages, "limits.max_messages", "messages")


def sampling_params(body: SamplingFields, **fields: Any) -> SamplingParams:
    """How to choose tokens. Raises InvalidRequestError as `SamplingParams` does."""
    return SamplingParams(**sampling_values(body), **fields)


def json_response(content: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response[bytes]:
    """A Struct as the answer."""
    return Response(msgspec.json.encode(content), media_type="application/json", headers=dict(headers or {}))
