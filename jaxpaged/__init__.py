"""jaxpaged: an LLM inference engine on JAX with a paged KV cache and continuous batching.

The public names are imported on first use, so that `import jaxpaged` (and `jaxpaged --help`) loads no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM, AsyncLLMEngine
    from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from jaxpaged.config import Config
    from jaxpaged.embeddings import EmbeddingOutput, EmbeddingRequestOutput
    from jaxpaged.errors import JaxpagedError
    from jaxpaged.llm import LLM
    from jaxpaged.request import CompletionOutput, RequestOutput, SamplingParams
    from jaxpaged.scoring import ContinuationScore

    __version__: str

_HOMES = {
    "LLM": "jaxpaged.llm",
    "AsyncLLM": "jaxpaged.async_llm",
    "AsyncLLMEngine": "jaxpaged.async_llm",
    "SamplingParams": "jaxpaged.request",
    "RequestOutput": "jaxpaged.request",
    "CompletionOutput": "jaxpaged.request",
    "BeamSearchOutput": "jaxpaged.beam_search",
    "BeamSearchParams": "jaxpaged.beam_search",
    "BeamSearchSequence": "jaxpaged.beam_search",
    "EmbeddingOutput": "jaxpaged.embeddings",
    "EmbeddingRequestOutput": "jaxpaged.embeddings",
    "ContinuationScore": "jaxpaged.scoring",
    "Config": "jaxpaged.config",
    "JaxpagedError": "jaxpaged.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Config",
    "ContinuationScore",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "JaxpagedError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jaxpaged")
    except PackageNotFoundError:
        return "0+source"
