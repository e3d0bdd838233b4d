"""Bodies of POST /v1/embeddings and /v1/score."""

from typing import Literal

import msgspec


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One input or several: a text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class EmbeddingItem(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or the base64 of their little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: InputUsage


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How likely are these continuations of this prompt? Each a text or token ids."""

    prompt: str | list[int]
    continuation: str | list[str | int | list[int]]
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation: `score` is the natural logarithm of its probability; `is_greedy`: a greedy answer would begin with it."""

    object: Literal["score"] = "score"
    index: int
    score: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The scores, in the order of the continuations."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: InputUsage
