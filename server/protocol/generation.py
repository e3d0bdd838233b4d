"""What the bodies that ask for text have in common: sampling fields, stream options, usage, timings."""

from typing import Any

import msgspec

from jaxpaged.request import RequestMetrics


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream tells besides the text.

    Attributes:
        include_usage: a last event with the counts, and no choices.
        continuous_usage_stats: the counts so far in every event.
        include_obfuscation: has no effect.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every body that asks for text; null is the same as absent. Their limits are those of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


SAMPLING_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "stream_interval",
)
"""Fields of a body that are fields of `SamplingParams` of the same name and meaning."""


def sampling_values(body: msgspec.Struct) -> dict[str, Any]:
    """Those of them that were given."""
    return {name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None}


class PromptLogprob(msgspec.Struct, frozen=True):
    """How likely a token of the prompt was, or one of the likeliest in its place."""

    logprob: float
    rank: int
    decoded_token: str


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: found in the prefix cache, in whole pages."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Nothing is reasoning yet."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all prompts, each counted once, and of all answers, end tokens among them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


def make_usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    """The counts of one request."""
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(num_cached),
    )


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one request in milliseconds, and rates in tokens per second; of several prompts, from the first arrival to the last end."""

    queue_ms: float
    prompt_n: int
    cache_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


def make_timings(metrics: list[RequestMetrics], num_prompt: int, num_output: int, num_cached: int) -> Timings:
    """From the engine's times; what did not happen takes no time."""
    arrival_s = min(one.arrival_s for one in metrics)
    end_s = max(one.finished_s or one.arrival_s for one in metrics)
    scheduled_s = min((one.first_scheduled_s for one in metrics if one.first_scheduled_s is not None), default=end_s)
    first_s = min((one.first_token_s for one in metrics if one.first_token_s is not None), default=end_s)
    prompt_s, predicted_s = max(0.0, first_s - scheduled_s), max(0.0, end_s - first_s)
    return Timings(
        queue_ms=_ms(scheduled_s - arrival_s),
        prompt_n=num_prompt,
        cache_n=num_cached,
        prompt_ms=_ms(prompt_s),
        prompt_per_second=_rate(num_prompt - num_cached, prompt_s),
        predicted_n=num_output,
        predicted_ms=_ms(predicted_s),
        predicted_per_second=_rate(num_output - len(metrics), predicted_s),
    )


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)


def _rate(number: int, seconds: float) -> float:
    return round(max(0, number) / seconds, 2) if seconds > 0 else 0.0
