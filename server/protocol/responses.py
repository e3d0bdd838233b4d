"""Bodies of /v1/responses."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an input's content; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the input; items of other types are refused."""

    type: str = "message"
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a conversation to be answered, perhaps after an earlier response."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class OutputLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class OutputTokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[OutputLogprob]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, str]] = []
    logprobs: list[OutputTokenLogprob] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class KeptText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a message of the input; one of the assistant has annotations and log-probabilities, which are empty."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[dict[str, str]] | UnsetType = UNSET
    logprobs: list[OutputTokenLogprob] | UnsetType = UNSET


class KeptMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the input as it is kept."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["completed"] = "completed"
    role: Literal["developer", "system", "user", "assistant"]
    content: list[KeptText]


class InputTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Nothing is reasoning yet."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer ended before its end."""

    reason: Literal["max_output_tokens"]


class ResponseFault(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class TextFormat(msgspec.Struct, frozen=True):
    """Plain text."""

    type: Literal["text"] = "text"


class TextOptions(msgspec.Struct, frozen=True):
    """How the text is made."""

    format: TextFormat = TextFormat()


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response: what was asked, and the answer so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    store: bool
    temperature: float | None
    text: TextOptions = TextOptions()
    tool_choice: Literal["auto"] = "auto"
    tools: list[dict[str, str]] = []
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputMessage | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[OutputTokenLogprob] | UnsetType = UNSET


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """Items of an input."""

    object: Literal["list"] = "list"
    data: list[KeptMessage]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that was forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
