"""Bodies of POST /v1/completions."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.protocol.generation import PromptLogprob, SamplingFields, Timings, Usage


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """One prompt to be continued, or several: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists, one entry for each token; `text_offset` is the character at which it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or what is new of it in a stream; of several prompts those of the first come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """All answers, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | None | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
