"""Embeddings: a prompt as one vector, made of the model's final hidden states. Names follow vLLM."""

from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from jaxpaged.errors import InvalidRequestError, RequestFailedError
from jaxpaged.request import Pooling, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.scheduled_step import ScheduledStep

EMBEDDING_PARAMS = SamplingParams(
    temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, seed=0, output_kind=RequestOutputKind.FINAL_ONLY
)
"""Its last row chooses a token, since every row does; nobody looks at it."""


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The vector: as many numbers as the model is wide."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers."""
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct, kw_only=True):
    """The embedding of one prompt. `num_cached_tokens`: found in the prefix cache, which only "last" looks into."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def check_pooling(pooling: Any, normalize: Any) -> None:
    """Raises InvalidRequestError for what is neither "mean" nor "last", or no bool."""
    if pooling not in get_args(Pooling.__value__):
        raise InvalidRequestError(f"pooling is 'mean' or 'last', got {pooling!r:.40}", param="pooling")
    if not isinstance(normalize, bool):
        raise InvalidRequestError(f"normalize must be true or false, got {normalize!r:.40}", param="normalize")


def pooled_rows(step: ScheduledStep, result: Any) -> Mapping[str, list[float]]:
    """By sequence, the vectors of prompts that this step completed; nothing is fetched from the device when there are none.

    Args:
        step: what was computed.
        result: a `StepResult`; its `pooled` [seqs, embed] are sums.
    """
    asking = [(index, row) for index, row in enumerate(step.rows) if row.sequence.request.pooling and row.samples and row.is_awaited]
    if not asking:
        return {}
    sums = np.asarray(result.pooled)
    return {
        row.sequence.request_id: (sums[index] / (row.sequence.num_prompt_tokens if row.sequence.request.pooling == "mean" else 1)).tolist()
        for index, row in asking
    }


def embedding_of(output: RequestOutput, *, normalize: bool) -> EmbeddingRequestOutput:
    """The embedding in the last output of a request with `pooling`. Raises RequestFailedError when it has failed or was aborted."""
    if output.error is not None or output.pooled is None:
        raise RequestFailedError(output.error or "the request was aborted before its prompt had been computed")
    vector = np.array(output.pooled)
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(embedding=vector.tolist()),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
