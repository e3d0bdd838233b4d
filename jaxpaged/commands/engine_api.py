"""What the commands ask of an engine: the part of `jaxpaged.llm.LLM` that they use, and the seam for tests."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from jaxpaged.config import Config
from jaxpaged.events import Sink
from jaxpaged.request import RequestOutput, SamplingParams

Prompt = str | list[int]
Message = dict[str, str]


@runtime_checkable
class ChatTokenizer(Protocol):
    """Messages -> token ids by the model's chat template."""

    def apply_chat_template(self, messages: Sequence[Message], /) -> list[int]:
        """Raises ChatTemplateError."""
        ...


@runtime_checkable
class TextEngine(Protocol):
    """An engine that is ready."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, /, *, use_tqdm: bool) -> list[RequestOutput]:
        """Finished outputs in the order of the prompts."""
        ...

    def stream(self, prompt: Prompt, params: SamplingParams, /) -> Iterator[RequestOutput]:
        """What is new, as it comes: a generator whose `close` aborts the request."""
        ...

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


@runtime_checkable
class MakeEngine(Protocol):
    """Makes the engine; tests give their own."""

    def __call__(self, config: Config, sinks: Sequence[Sink], /) -> TextEngine: ...
