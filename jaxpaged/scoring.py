"""`score`: how likely a given continuation of a prompt is, as harnesses that choose between answers ask."""

from collections.abc import Sequence

import msgspec

from jaxpaged.api import as_prompts
from jaxpaged.config import Config
from jaxpaged.errors import InvalidRequestError, RequestFailedError
from jaxpaged.intake import Continuation, Prompt
from jaxpaged.request import RequestOutput


class ContinuationScore(msgspec.Struct, frozen=True, kw_only=True):
    """How likely the model finds one continuation of one prompt.

    Attributes:
        logprob: natural logarithm of the probability of all its tokens, one after the other.
        is_greedy: whether a greedy answer to the prompt would begin with it.
        token_ids: its tokens.
        token_logprobs: of each of them; their sum is `logprob`. -9999.0 for an id that the tokenizer does not have.
        num_prompt_tokens: tokens before it.
        num_cached_tokens: of them, those found in the prefix cache.
    """

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


def score_of(output: RequestOutput) -> ContinuationScore:
    """The score in the last output of an `Intake.scoring_request`. Raises RequestFailedError when it has failed or was aborted."""
    if output.error is not None or output.prompt_logprobs is None:
        raise RequestFailedError(output.error or "the request was aborted before its prompt had been computed")
    ids, told = output.prompt_token_ids, output.prompt_logprobs
    first = next(index for index, entries in enumerate(told) if entries is not None)
    own = [entries[token_id] for token_id, entries in zip(ids[first:], told[first:], strict=True) if entries is not None]
    return ContinuationScore(
        logprob=sum(entry.logprob for entry in own),
        is_greedy=all(entry.rank == 1 for entry in own),
        token_ids=ids[first:],
        token_logprobs=[entry.logprob for entry in own],
        num_prompt_tokens=first,
        num_cached_tokens=output.num_cached_tokens,
    )


def check_gives_logprobs(config: Config, asker: str = "score") -> None:
    """Raises InvalidRequestError on an engine that gives logits instead of what `asker` needs."""
    if config.sampling.logprobs_mode in ("raw_logits", "processed_logits"):
        raise InvalidRequestError(
            f"{asker} needs log-probabilities, and this engine gives logits (sampling.logprobs_mode {config.sampling.logprobs_mode})"
        )


def as_pairs(prompts: Prompt | Sequence[Prompt], continuations: Continuation | Sequence[Continuation]) -> list[tuple[Prompt, Continuation]]:
    """A prompt for each continuation; one prompt serves them all. Raises InvalidRequestError when their numbers do not fit."""
    several, endings = as_prompts(prompts), as_prompts(continuations)
    if len(several) == 1:
        several *= len(endings)
    if len(several) != len(endings):
        raise InvalidRequestError(
            f"{len(endings)} continuations for {len(several)} prompts; give one each, or one prompt for all", param="continuations"
        )
    return list(zip(several, endings, strict=True))  # type: ignore[arg-type]  # what is no continuation is refused one by one
