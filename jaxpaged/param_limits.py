"""The table of limits of `SamplingParams`, and the sentences that refuse what lies beyond them.

docs/sampling.md shows the table; a test holds the two together. Every refusal names the field, what was given and the limit.
"""

import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from jaxpaged.errors import InvalidRequestError

MAX_INT = 2**31 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
"""Ways to spell the bad words of a request in tokens."""
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
"""Likeliest ids of a token that are told at most."""
MAX_ALLOWED_IDS = 2**20
MAX_SAMPLES = 128
"""OpenAI's limit; each sample is a sequence of its own, so a larger number would be a way to fill the queue with one request."""
MAX_SEED = 2**63 - 1

type Kind = Literal["integer", "number", "flag", "texts", "ids", "biases"]


class Limit(NamedTuple):
    """What one field may be.

    Attributes:
        field: its name.
        kind: of its value; "texts", "ids" and "biases" are collections.
        low: least value, or least characters of a text; of the items for a collection.
        high: largest, likewise.
        is_open: `low` itself is refused.
        most: items of a collection.
        least: items of a collection.
        is_optional: None may be given, and means that the field is not set.
        meaning: what is special about some values, for the documentation.
    """

    field: str
    kind: Kind
    low: float = 0
    high: float = 0
    is_open: bool = False
    most: int = 0
    least: int = 0
    is_optional: bool = True
    meaning: str = ""


LIMITS = (
    Limit("n", "integer", 1, MAX_SAMPLES, is_optional=False),
    Limit("temperature", "number", 0.0, 1e6, meaning="under 1e-5: greedy"),
    Limit("top_p", "number", 0.0, 1.0, is_open=True, meaning="1: off"),
    Limit("top_k", "integer", -1, MAX_INT, meaning="-1, 0 and the vocabulary or more: off; 1: greedy"),
    Limit("min_p", "number", 0.0, 1.0, meaning="0: off"),
    Limit("presence_penalty", "number", -2.0, 2.0, is_optional=False, meaning="0: off"),
    Limit("frequency_penalty", "number", -2.0, 2.0, is_optional=False, meaning="0: off"),
    Limit("repetition_penalty", "number", 0.0, 100.0, is_open=True, meaning="1: off"),
    Limit("logit_bias", "biases", -100.0, 100.0, most=MAX_LOGIT_BIASES, meaning="ids of the vocabulary"),
    Limit("allowed_token_ids", "ids", 0, MAX_INT, most=MAX_ALLOWED_IDS, least=1, meaning="ids of the vocabulary"),
    Limit("bad_words", "texts", 1, MAX_STOP_STRING_CHARS, most=MAX_BAD_WORDS, meaning="not all spaces; the limit holds for spellings, too"),
    Limit("logprobs", "integer", 0, MAX_LOGPROBS, meaning="the engine's own limit is `sampling.max_logprobs`"),
    Limit("prompt_logprobs", "integer", 0, MAX_LOGPROBS, meaning="likewise"),
    Limit("seed", "integer", -1, MAX_SEED, meaning="-1: drawn by the engine"),
    Limit("stop", "texts", 1, MAX_STOP_STRING_CHARS, most=MAX_STOP_STRINGS, meaning="or one text"),
    Limit("stop_token_ids", "ids", 0, MAX_INT, most=MAX_STOP_TOKEN_IDS, meaning="ids of the vocabulary"),
    Limit("max_tokens", "integer", 0, MAX_INT, meaning="null: to the end of the context; 0 with `prompt_logprobs` only"),
    Limit("min_tokens", "integer", 0, MAX_INT, is_optional=False, meaning="at most `max_tokens`"),
    Limit("stream_interval", "integer", 1, MAX_INT, is_optional=False),
    Limit("include_stop_str_in_output", "flag", is_optional=False),
    Limit("ignore_eos", "flag", is_optional=False),
    Limit("skip_special_tokens", "flag", is_optional=False),
    Limit("spaces_between_special_tokens", "flag", is_optional=False, meaning="without effect, as in vLLM with fast tokenizers"),
    Limit("detokenize", "flag", is_optional=False, meaning="stop strings need it"),
)


def check_fields(params: Any) -> None:
    """Raises InvalidRequestError for the first field of a `SamplingParams` that is beyond its limits."""
    for limit in LIMITS:
        value = getattr(params, limit.field)
        if value is None and limit.is_optional:
            continue
        _CHECKS[limit.kind](limit, value)


def plain_numbers(params: Any) -> Iterator[tuple[str, int | float]]:
    """Fields of a `SamplingParams` whose number is of another library (numpy's), with Python's own of the same value."""
    for limit in LIMITS:
        value = getattr(params, limit.field)
        if value is None or isinstance(value, int | float) and type(value) in (bool, int, float):
            continue
        if limit.kind == "number" and isinstance(value, numbers.Real):
            yield limit.field, float(value)
        elif limit.kind == "integer" and isinstance(value, numbers.Integral):
            yield limit.field, int(value)


def range_of(limit: Limit) -> str:
    """What is allowed of one value, in words; empty for a flag."""
    if limit.kind == "flag":
        return ""
    low, high = (f"{bound:g}" if limit.kind in ("number", "biases") else str(int(bound)) for bound in (limit.low, limit.high))
    return f"above {low} and at most {high}" if limit.is_open else f"between {low} and {high}"


def show(value: Any) -> str:
    """A value for a sentence, cut when it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(field: str, sentence: str) -> InvalidRequestError:
    """The error of one field."""
    return InvalidRequestError(sentence, param=field)


def _check_integer(limit: Limit, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(limit.field, f"{limit.field} must be an integer, got {show(value)}")
    if not limit.low <= value <= limit.high:
        raise refuse(limit.field, f"{limit.field} must be {range_of(limit)}, got {show(value)}")


def _check_number(limit: Limit, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(limit.field, f"{limit.field} must be a number, got {show(value)}")
    # NaN fails every comparison, so it is refused here too.
    above = limit.low < value if limit.is_open else limit.low <= value
    if not (above and value <= limit.high and math.isfinite(value)):
        raise refuse(limit.field, f"{limit.field} must be {range_of(limit)}, got {show(value)}")


def _check_flag(limit: Limit, value: Any) -> None:
    if not isinstance(value, bool):
        raise refuse(limit.field, f"{limit.field} must be true or false, got {show(value)}")


def _check_texts(limit: Limit, value: Any) -> None:
    field = limit.field
    texts = [value] if field == "stop" and isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        one = "a string or " if field == "stop" else ""
        raise refuse(field, f"{field} must be {one}a list of strings, got {show(value)}")
    if len(texts) > limit.most:
        raise refuse(field, f"{field} takes at most {limit.most} strings, got {len(texts)}")
    for text in texts:
        if not limit.low <= len(text) <= limit.high:
            raise refuse(
                field, f"each string of {field} has {int(limit.low)} to {int(limit.high)} characters, got {len(text)}: {show(text)}"
            )
        if field == "bad_words" and not text.strip():
            raise refuse(field, f"a string of {field} must not be all spaces, got {show(text)}")


def _check_ids(limit: Limit, value: Any) -> None:
    field = limit.field
    if not isinstance(value, list | tuple):
        raise refuse(field, f"{field} must be a list of token ids, got {show(value)}")
    if len(value) > limit.most:
        raise refuse(field, f"{field} takes at most {limit.most} ids, got {len(value)}")
    if len(value) < limit.least:
        raise refuse(field, f"{field} must name at least one id, got {show(value)}")
    for token_id in value:
        if token_id is None:
            raise refuse(field, f"{field} must be a list of token ids, got {show(value)}")
        _check_integer(limit, token_id)


def _check_biases(limit: Limit, value: Any) -> None:
    field = limit.field
    if not isinstance(value, dict):
        raise refuse(field, f"{field} must be an object of token ids and numbers, got {show(value)}")
    if len(value) > limit.most:
        raise refuse(field, f"{field} takes at most {limit.most} ids, got {len(value)}")
    for key, bias in value.items():
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key <= MAX_INT:
            raise refuse(field, f"{field} has token ids for keys, got {show(key)}")
        if bias is None:
            raise refuse(field, f"{field} of id {key} must be a number, got None")
        _check_number(limit, bias)


_CHECKS: dict[Kind, Callable[[Limit, Any], None]] = {
    "integer": _check_integer,
    "number": _check_number,
    "flag": _check_flag,
    "texts": _check_texts,
    "ids": _check_ids,
    "biases": _check_biases,
}
