"""Bodies of /v1/models, /tokenize, /detokenize and /tokenizer_info."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.protocol.chat import Message


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A name that clients may use.

    Attributes:
        root: the model that it stands for.
        max_model_len: tokens of prompt and answer at most.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxpaged"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a conversation in its place."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Its token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Their text, control tokens among it."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What clients that tokenize for themselves ask for; the other entries of the model's `tokenizer_config.json` are beside it."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    chat_template: str | None | UnsetType = UNSET
