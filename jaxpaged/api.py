"""What `LLM` and `AsyncLLM` share: options, sinks, the shape of prompts."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.config import Config
from jaxpaged.errors import ConfigError, InvalidRequestError, JaxpagedError
from jaxpaged.events import Sink
from jaxpaged.intake import Messages, Prompt
from jaxpaged.options import from_kwargs, validate
from jaxpaged.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams
from jaxpaged.sinks import open_log
from jaxpaged.startup_progress import open_startup_progress


def settle_config(model: str | None, config: Config | None, kwargs: Mapping[str, Any]) -> Config:
    """The tree from either a whole one or keyword arguments, checked. Raises ConfigError."""
    if config is None:
        return from_kwargs(**({} if model is None else {"model": model}), **kwargs)
    if model is not None or kwargs:
        raise ConfigError("give either config or keyword arguments, not both")
    validate(config)
    return config


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array of ids, or of rows of ids
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError(f"prompts must be a text, token ids or a list of them, got {type(prompts).__name__}", param="prompt")
    if prompts and all(isinstance(item, numbers.Integral) for item in prompts):  # numpy's integers, too
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation or many, as a list. A list of objects is one conversation."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def failed_output(request_id: str, prompt: Prompt, error: JaxpagedError, arrival_s: float) -> RequestOutput:
    """The output of a request that was refused."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(finish_reason=FinishReason.ERROR)],
        finished=True,
        metrics=RequestMetrics(arrival_s=arrival_s),
        error=error.message,
        error_code=error.code,
    )


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """One for each prompt. Raises InvalidRequestError when there are neither one nor `count`."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidRequestError(f"sampling_params must be SamplingParams or a list, got {type(params).__name__}", param="sampling_params")
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling_params for {count} prompts; give one for all or one each", param="sampling_params"
        )
    return list(params)


def priority_each(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """One for each prompt; 0 unless said otherwise. Raises InvalidRequestError when there are neither one nor `count`."""
    if priority is None or isinstance(priority, int):
        return [priority or 0] * count
    if not isinstance(priority, Sequence):
        raise InvalidRequestError(f"priority must be an integer or a list, got {type(priority).__name__}", param="priority")
    if len(priority) != count:
        raise InvalidRequestError(f"{len(priority)} priorities for {count} prompts; give one for all or one each", param="priority")
    return list(priority)


def open_own_sinks(config: Config, *, is_quiet: bool) -> list[Sink]:
    """The log of the options and, on a terminal, the start-up line; a quiet log holds warnings only."""
    log = msgspec.structs.replace(config.log, level="warning") if is_quiet else config.log
    progress = open_startup_progress()
    return [open_log(log)] if progress is None else [open_log(log), progress]
