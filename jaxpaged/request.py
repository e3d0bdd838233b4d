"""What a request is, and what comes back: the types that cross between the front ends and the engine.

Names and meanings follow vLLM where it offers the same thing. `SamplingParams.validate` is the only validator.
"""

import enum
import math
from typing import Any, Literal

import msgspec

from jaxpaged.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this a request is greedy (the largest logit, then the first index)."""

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_EOS_IDS = 16
"""End tokens of a model."""
MAX_BAD_WORDS = 128
"""Ways to spell the bad words of a request in tokens."""
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
"""Likeliest ids of a token that are told at most."""
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""
MAX_ALLOWED_IDS = 2**20

MAX_SAMPLES = 128
"""OpenAI's limit; each sample is a sequence of its own, so a larger number would be a way to fill the queue with one request."""

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1_000_000
MAX_CACHE_SALT_CHARS = 128
SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that the samples of a request get distinct seeds however many they are."""


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestOutputKind(enum.Enum):
    """What a streamed `RequestOutput` holds: all so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens and when to stop. Raises InvalidRequestError naming field, value and limit.

    Attributes:
        n: number of answers to the prompt, 1 to 128. Each has a random stream of its own; the first is the answer of n = 1.
        temperature: 0 or more; under 1e-5 is greedy. None: the model's default.
        top_p: mass kept, in (0, 1]. None: the model's default.
        top_k: number of tokens kept; 0 or -1 is off, above the vocabulary is off. None: the model's default.
        min_p: tokens under `min_p` times the largest probability are dropped; in [0, 1]. None: the model's default.
        presence_penalty: taken off the logit of every token that the answer holds, in [-2, 2].
        frequency_penalty: taken off as often as the answer holds the token, in [-2, 2].
        repetition_penalty: divides positive logits of tokens that prompt or answer hold, and multiplies negative ones; above 0 and
            at most 100. None: the model's default.
        logit_bias: token id -> what is added to its logit, in [-100, 100]; at most 1024. Ids may be spelled as texts, as JSON does.
        allowed_token_ids: only these can be chosen. An end token that is not among them cannot end the answer.
        bad_words: texts that the answer does not come to hold, at least not in the tokens in which they are usually written, with
            or without a space before them; at most 128 spellings.
        logprobs: for each token of the answer, log-probabilities of so many likeliest ids and of the chosen one, as the model itself
            gave them (before biases, penalties and temperature; see the option `logprobs_mode`); 0 to 20. None: none.
        prompt_logprobs: the same for each token of the prompt but the first, always as the model itself gave them; 0 to 20.
            Of such a prompt nothing is taken from the prefix cache. None: none.
        seed: the random stream depends on it, on the answer's index and on the token's position only. None or -1: drawn by the engine.
        stop: strings that end the answer; cut off unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the answer; the id stays in `token_ids`.
        ignore_eos: go on past the model's end tokens (all of them).
        max_tokens: output tokens at most; 0, with `prompt_logprobs`, for the prompt alone. None: up to the end of the context.
        min_tokens: end tokens and `stop_token_ids` cannot be chosen before this many.
        skip_special_tokens: leave control tokens out of the text.
        detokenize: False leaves the text empty.
        output_kind: what each streamed output holds.
        stream_interval: output tokens per streamed output, counted for each answer.
        best_of: refused; vLLM has dropped it as well.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_float("temperature", self.temperature, 0.0, 1e6)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_int("seed", self.seed, -1, MAX_SEED)
        _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_int("stream_interval", self.stream_interval, 1, 2**31 - 1)
        for name in ("n", "min_tokens", "stream_interval"):
            if getattr(self, name) is None:
                raise InvalidRequestError(f"{name} must be an integer, got None", param=name)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is None:
                raise InvalidRequestError(f"{name} must be a number, got None", param=name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError(f"output_kind must be a RequestOutputKind, got {_show(self.output_kind)}", param="output_kind")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}", param="min_tokens")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {value!r}", param=name)
        if self.best_of is not None:
            raise InvalidRequestError("best_of is not supported: ask for n answers and choose among them", param="best_of")
        _check_stop(self.stop)
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.logit_bias is not None:
            msgspec.structs.force_setattr(self, "logit_bias", _checked_bias(self.logit_bias))
        _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must name at least one id", param="allowed_token_ids")
        _check_bad_words(self.bad_words)

    @property
    def has_penalty(self) -> bool:
        """Whether the choice of a token depends on which ones came before."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty not in (None, 1.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is used."""
        return self.temperature is None or self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {_show(value)}", param=name)
    if not low <= value <= high:
        limit = f"exactly {low}" if low == high else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {limit}, got {_show(value)}", param=name)


def _check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, got {_show(value)}", param=name)
    # NaN fails every comparison, so it is refused here too.
    above = low < value if low_open else low <= value
    if not (above and value <= high and math.isfinite(value)):
        limit = f"above {low:g} and at most {high:g}" if low_open else f"between {low:g} and {high:g}"
        raise InvalidRequestError(f"{name} must be {limit}, got {_show(value)}", param=name)


def _check_stop(stop: Any) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if strings is None:
        return
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise InvalidRequestError(f"stop must be a string or a list of strings, got {_show(stop)}", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop")
    for text in strings:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}", param="stop")


def _check_ids(name: str, ids: Any, limit: int) -> None:
    if ids is None:
        return
    if not isinstance(ids, list | tuple):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {_show(ids)}", param=name)
    if len(ids) > limit:
        raise InvalidRequestError(f"{name} takes at most {limit} ids, got {len(ids)}", param=name)
    for i in ids:
        _check_int(name, i, 0, 2**31 - 1)
        if i is None:
            raise InvalidRequestError(f"{name} must be a list of token ids, got {_show(ids)}", param=name)


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise InvalidRequestError(f"logit_bias must be an object of token ids and numbers, got {_show(bias)}", param="logit_bias")
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(f"logit_bias takes at most {MAX_LOGIT_BIASES} ids, got {len(bias)}", param="logit_bias")
    checked = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
            raise InvalidRequestError(f"logit_bias has token ids for keys, got {_show(key)}", param="logit_bias")
        if value is None:
            raise InvalidRequestError(f"logit_bias of id {token_id} must be a number, got None", param="logit_bias")
        _check_float("logit_bias", value, -100.0, 100.0)
        checked[token_id] = float(value)
    return checked


def _check_bad_words(words: Any) -> None:
    if words is None:
        return
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise InvalidRequestError(f"bad_words must be a list of strings, got {_show(words)}", param="bad_words")
    for word in words:
        if not 1 <= len(word) <= MAX_STOP_STRING_CHARS or not word.strip():
            raise InvalidRequestError(
                f"a bad word has 1 to {MAX_STOP_STRING_CHARS} characters, not all spaces, got {_show(word)}", param="bad_words"
            )
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words takes at most {MAX_BAD_WORDS}, got {len(words)}", param="bad_words")


type Pooling = Literal["mean", "last"]
"""The mean over the prompt's tokens, or what the last of them has."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt on its way to the engine. `params` are resolved: no None among temperature, top_p, top_k, min_p.

    Raises InvalidRequestError for a priority or a salt that is not acceptable.

    Attributes:
        priority: lower goes first; within one priority first come, first served.
        cache_salt: only requests with the same salt share cached pages; at most 128 characters.
        sample_group: requests with the same name here are samples of one prompt, which wait for each other so as to share
            its pages (see `samples_of`).
        bad_words_ids: spellings of `params.bad_words`.
        score_from: with `params.prompt_logprobs`, the first token of the prompt that they are told of; at least 1.
        pooling: what is wanted of the hidden states of the prompt's tokens (see `embeddings`); None: nothing.
        is_let_in: it goes on with a request that was let in before, so that the limits of the queue are not asked again.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_s: float
    prompt: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str | None = None
    sample_group: str | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    score_from: int = 1
    pooling: Pooling | None = None
    is_let_in: bool = False

    def __post_init__(self) -> None:
        if self.priority.__class__ is not int or not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"priority must be an integer between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {_show(self.priority)}", param="priority"
            )
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
            raise InvalidRequestError(
                f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_CHARS} characters, got {_show(salt)}", param="cache_salt"
            )


def samples_of(request: Request, n: int) -> list[Request]:
    """The `n` requests that answer `request` `n` times: ids "X#0" to "X#n-1", random streams of their own, one sample group.

    The first keeps the request's seed, so that its answer is that of the request with n = 1, and is the one that tells
    log-probabilities of the prompt.
    """
    params = msgspec.structs.replace(request.params, n=1)
    others = msgspec.structs.replace(params, prompt_logprobs=None) if params.max_tokens else params
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}#{index}",
            params=others if index else params,
            seed=(request.seed + index * SEED_STRIDE) % (MAX_SEED + 1),
            sample_group=request.request_id,
        )
        for index in range(n)
    ]


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Monotonic times in seconds and counts of one request; `first_token_s` is None before the first token."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


class Logprob(msgspec.Struct, frozen=True):
    """One id's log-probability at one place of the answer or the prompt.

    Attributes:
        logprob: natural logarithm (or the logit, if `logprobs_mode` says so); -9999.0 for an impossible id.
        rank: 1 for the likeliest id.
        decoded_token: the id's text; half a character is shown as U+FFFD.
        token_bytes: the id's bytes.
    """

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer, the `index`-th of its request.

    Attributes:
        stop_reason: the stop string or stop id that ended it, None for an end token.
        logprobs: for each of `token_ids`, id -> log-probability of the chosen id and of the likeliest ones, the chosen one first.
            None if they were not asked for.
        cumulative_logprob: sum of the chosen ids' log-probabilities over the whole answer so far; None as above.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """What the engine has for a request so far, or (kind DELTA) since the last time.

    `outputs` holds every answer by `index`; of kind DELTA those that moved. `finished`: all answers have ended. `error` says why a request
    failed or was given up, `error_code` is the `code` of one of the classes of `errors`.
    `prompt_logprobs`: for each token of the prompt, id -> log-probability of that token, which comes first, and of the likeliest ones;
    None for the first token, which nothing comes before. None if not asked for, and until the whole prompt has been computed; of kind
    DELTA told once.
    `pooled`: the hidden states that the request asked for, as they are; [embed] numbers.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: list[float] | None = None
    error: str | None = None
    error_code: str | None = None
