"""What a server needs of an engine, and a request that has not begun."""

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams
from jaxpaged.engine_control import PauseMode
from jaxpaged.errors import JaxpagedError
from jaxpaged.intake import Continuation, Messages, Prompt
from jaxpaged.queue_group import QueueGroup
from jaxpaged.request import Pooling, RequestOutput, SamplingParams
from jaxpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxpaged.embeddings import EmbeddingRequestOutput
    from jaxpaged.pool_map import PoolCopy
    from jaxpaged.scoring import ContinuationScore


class Generation:
    """A request that has not begun: await it for the last output, or iterate over all of them. Each use is a request of its own."""

    def __init__(self, start: Callable[[bool], AsyncIterator[RequestOutput]]) -> None:
        self._start = start

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._last().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._start(False)

    async def _last(self) -> RequestOutput:
        async for output in self._start(True):
            if output.finished:
                return output
        raise AssertionError("a request ended without a last output")


@runtime_checkable
class EngineClient(Protocol):
    """What a server needs of an engine; `AsyncLLM` has it."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> Generation: ...

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]: ...

    async def score(
        self,
        prompt: Prompt,
        continuation: Continuation,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> "ContinuationScore": ...

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> BeamSearchOutput: ...

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        group: QueueGroup | None = None,
    ) -> "EmbeddingRequestOutput": ...

    async def prompt_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]: ...

    @property
    def max_model_len(self) -> int: ...

    def abort(self, request_id: str) -> None: ...

    def check_health(self) -> None: ...

    async def probe(self) -> None: ...

    def fail_open(self, error: JaxpagedError) -> None: ...

    def close(self) -> None: ...

    def get_tokenizer(self) -> Tokenizer: ...


@runtime_checkable
class WatchedEngine(Protocol):
    """What the live page asks of an engine beyond its events."""

    async def pool_copy(self) -> "PoolCopy": ...


@runtime_checkable
class OperatedEngine(Protocol):
    """What operators may tell an engine; see docs/operations.md."""

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool: ...

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None: ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None: ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    async def is_sleeping(self) -> bool: ...

    async def start_profile(self, folder: Path) -> None: ...

    async def stop_profile(self) -> None: ...
