"""Beam search over HTTP (`use_beam_search`): the `n` likeliest answers, by the engine's search instead of one request for each prompt."""

import time
from collections.abc import Mapping
from typing import Any, Final

from jaxpaged.beam_search import MAX_BEAM_WIDTH, BeamSearchOutput, BeamSearchParams
from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import InvalidRequestError, RequestAbortedError
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from server.generation import Job, all_or_none, check_output, prompt_of, request_name
from server.protocol.generation import SamplingFields

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "stream": (False,),
    "prompt_logprobs": (),
    "timings": (False,),
}
"""What a search does not do -> values that do not ask for it; null asks for nothing, and a seed has nothing to draw."""


def beam_params(
    body: SamplingFields, max_tokens: int | None, engine: EngineClient, *, num_logprobs: int | None, name: str
) -> BeamSearchParams | None:
    """How to search; None: the body asks for no search.

    Args:
        body: of a request.
        max_tokens: of an answer; None: to the end of the context.
        engine: for the length of its context.
        num_logprobs: likeliest tokens to tell of each token, besides the chosen one.
        name: the field that says so.

    Raises:
        InvalidRequestError: a field that a search has no use for, or its values; naming it.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise InvalidRequestError("length_penalty is a part of beam search: give use_beam_search: true as well", param="length_penalty")
        return None
    for field, harmless in NEUTRAL.items():
        value = getattr(body, field)
        if value is not None and value not in harmless:
            raise InvalidRequestError(f"{field} cannot be given with use_beam_search: leave it out", param=field)
    width = body.n or 1
    if width > MAX_BEAM_WIDTH:
        raise InvalidRequestError(f"n is the width of the beam search, which is at most {MAX_BEAM_WIDTH}, got {width}", param="n")
    if num_logprobs is not None and num_logprobs > 2 * width:
        raise InvalidRequestError(
            f"A beam search of n {width} knows the {2 * width} likeliest tokens, and not {num_logprobs}: ask for fewer, or for a larger n",
            param=name,
        )
    return BeamSearchParams(
        beam_width=width,
        max_tokens=engine.max_model_len if max_tokens is None else max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


async def beam_outputs(engine: EngineClient, job: Job, params: BeamSearchParams) -> list[RequestOutput]:
    """The answers to each prompt, the likeliest first. Being cancelled ends the searches.

    Raises:
        JaxpagedError: one of them was refused or failed, which ends the others.
    """
    group = QueueGroup()

    async def search(index: int) -> RequestOutput:
        begun_s = time.monotonic()
        found = await engine.beam_search(
            prompt_of(job, index), params, request_name(job.request_id, index), priority=job.priority, group=group
        )
        return _output(job, index, found, begun_s)

    try:
        return await all_or_none([search(index) for index in range(len(job.prompts))])
    except InvalidRequestError as error:
        if error.param != "beam_width":
            raise
        raise InvalidRequestError(error.message.replace("beam_width", "n", 1), param="n") from None


def _output(job: Job, index: int, found: BeamSearchOutput, begun_s: float) -> RequestOutput:
    """What a search found, as the output of a request."""
    told = [
        CompletionOutput(
            index=rank,
            text=sequence.output_text,
            token_ids=sequence.output_token_ids,
            finish_reason=sequence.finish_reason,
            logprobs=sequence.logprobs if job.params.logprobs is not None else None,
            cumulative_logprob=sequence.cum_logprob,
        )
        for rank, sequence in enumerate(found.sequences)
    ]
    output = RequestOutput(
        request_id=request_name(job.request_id, index),
        prompt=None,
        prompt_token_ids=job.prompts[index],
        outputs=told,
        finished=True,
        metrics=RequestMetrics(arrival_s=begun_s, first_scheduled_s=begun_s, finished_s=time.monotonic()),
        num_cached_tokens=found.num_cached_tokens,
        error=found.error,
        error_code=found.error_code,
    )
    check_output(output)
    if len(told) < job.params.n or any(answer.finish_reason is FinishReason.ABORT for answer in told):
        raise RequestAbortedError("The search was ended by an operator, or because the server stops: ask again a little later")
    return output
