"""An engine whose answers are known: it says each prompt backwards, word by word, and remembers what happened to it."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxpaged import cli
from jaxpaged.commands import by_name, chat, generate
from jaxpaged.commands.engine_api import Message, Prompt
from jaxpaged.config import Config
from jaxpaged.errors import InvalidRequestError
from jaxpaged.events import Sink
from jaxpaged.request import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SamplingParams

MODULES = {"generate": generate, "chat": chat}


class CharacterTokenizer:
    """A token is a character; a conversation is `role: content` lines."""

    def apply_chat_template(self, messages: Sequence[Message], /) -> list[int]:
        return [ord(c) for c in "".join(f"<{message['role']}>{message['content']}" for message in messages)]


class ScriptedEngine:
    """Answers `abc` with `cba`. Hooks let a test act in the middle of an answer.

    Args:
        on_piece: called after each piece of a stream with its number.
        error: prompt text -> what to raise for it.
    """

    def __init__(self, *, on_piece: Callable[[int], None] | None = None, error: dict[str, Exception] | None = None) -> None:
        self.on_piece = on_piece
        self.error = error or {}
        self.config: Config | None = None
        self.sinks: Sequence[Sink] = ()
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.num_closed = 0
        self.aborted: list[str] = []
        self.used_tqdm: list[bool] = []

    def make(self, config: Config, sinks: Sequence[Sink], /) -> "ScriptedEngine":
        self.config, self.sinks = config, sinks
        return self

    def get_tokenizer(self) -> CharacterTokenizer:
        return CharacterTokenizer()

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, /, *, use_tqdm: bool) -> list[RequestOutput]:
        self.used_tqdm.append(use_tqdm)
        outputs = []
        for i, prompt in enumerate(prompts):
            text = self._take(prompt, params)
            outputs.append(self._output(f"req-{i}", text, text[::-1], is_last=True))
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams, /) -> Iterator[RequestOutput]:
        text = self._take(prompt, params)
        answer = text[::-1]
        pieces = [answer[i : i + 3] for i in range(0, len(answer), 3)]
        is_done = False
        try:
            for i, piece in enumerate(pieces):
                yield self._output("req-0", text, piece, is_last=i == len(pieces) - 1)
                if self.on_piece is not None:
                    self.on_piece(i)
            is_done = True
        finally:
            if not is_done:
                self.aborted.append(text)

    def close(self) -> None:
        self.num_closed += 1

    def _take(self, prompt: Prompt, params: SamplingParams) -> str:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        self.prompts.append(text)
        self.params.append(params)
        if text in self.error:
            raise self.error[text]
        if not text:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        return text

    @staticmethod
    def _output(request_id: str, prompt: str, text: str, *, is_last: bool) -> RequestOutput:
        completion = CompletionOutput(text=text, token_ids=[ord(c) for c in text], finish_reason=FinishReason.STOP if is_last else None)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=[ord(c) for c in prompt],
            outputs=[completion],
            finished=is_last,
            metrics=RequestMetrics(arrival_s=10.0, first_token_s=10.25, finished_s=11.25 if is_last else None),
            num_cached_tokens=2,
        )


class Result:
    """What a command line did."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def sentence(self) -> str:
        """The one line on standard error. Fails if there are more, or a traceback."""
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.removeprefix("jaxpaged: ").rstrip("\n")


class Stream(io.TextIOWrapper):
    """A standard stream in memory that may claim to be a terminal."""

    mode = "r+"
    name = "<memory>"

    def __init__(self, data: bytes = b"", *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        """What was written."""
        with contextlib.suppress(ValueError):
            self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


def run_cli(*argv: str, engine: ScriptedEngine | None = None, stdin: str | bytes = b"", is_terminal: bool = False) -> Result:
    """Runs `jaxpaged ...` in this process with its own standard streams, and `engine` as the engine of generate and chat."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = Stream(is_terminal=is_terminal), Stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Stream(data, is_terminal=is_terminal))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        if engine is not None:
            _give(patch, engine)
        status = cli.main(argv)
    return Result(status, out.text(), err.text())


def _give(patch: pytest.MonkeyPatch, engine: ScriptedEngine) -> None:
    for name, module in MODULES.items():
        assert by_name()[name].module == name
        real_run: Any = module.run

        def run(args: Any, real_run: Any = real_run) -> int:
            return int(real_run(args, engine.make))

        patch.setattr(module, "run", run)
