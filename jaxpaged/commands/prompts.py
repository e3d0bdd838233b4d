"""Where the prompts of `generate` come from: arguments, a file, or standard input."""

import codecs
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxpaged.commands.engine_api import Message
from jaxpaged.errors import ConfigError, InvalidRequestError


class PromptSource(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt as given: a text, token ids, or messages; exactly one of them."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[Message] | None = None

    @property
    def shown(self) -> str | list[int] | list[Message]:
        """What was given."""
        return next(value for value in (self.text, self.token_ids, self.messages) if value is not None)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = None


def read_prompts(arguments: Sequence[str], file: str | None, *, has_line_prompts: bool) -> list[PromptSource]:
    """The prompts, in order.

    Args:
        arguments: one prompt each.
        file: path, or `-` for standard input: one prompt (a last line end is not part of it); `.jsonl`: one a line.
        has_line_prompts: `file` or standard input holds one prompt a line; empty lines are left out.

    Raises:
        ConfigError: no prompt, two sources, or a file that cannot be read.
        InvalidRequestError: text that is not UTF-8, or a malformed line.
    """
    if arguments and file is not None:
        raise ConfigError("prompts are given as arguments and with --file; choose one")
    if arguments:
        return [PromptSource(text=_checked_text(argument, f"prompt {i}")) for i, argument in enumerate(arguments)]
    if file is None or file == "-":
        if file is None and sys.stdin.isatty():
            raise ConfigError("no prompt: give it as an argument, with --file, or on standard input")
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        try:
            data, name = Path(file).read_bytes(), file
        except OSError as e:
            raise ConfigError(f"cannot read the prompts in {file}: {e.strerror or e}") from e
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as e:
        raise InvalidRequestError(f"{name} is not UTF-8 text: byte {e.start} is {data[e.start]:#04x}") from e
    if file is not None and file.endswith((".jsonl", ".ndjson")):
        prompts = [_record(line, f"{name}, line {i}") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    elif has_line_prompts:
        prompts = [PromptSource(text=line.removesuffix("\r")) for line in text.split("\n") if line.strip()]
    else:
        text = text.removesuffix("\n").removesuffix("\r")
        prompts = [PromptSource(text=text)] if text else []
    if not prompts:
        raise ConfigError(f"no prompt: {name} is empty")
    return prompts


def _record(line: str, where: str) -> PromptSource:
    """A line of JSON: a text, a list of token ids, or an object with `prompt`, `prompt_token_ids` or `messages`."""
    try:
        value = msgspec.json.decode(line, type=str | list[int] | _Record)
    except (msgspec.MsgspecError, UnicodeEncodeError) as e:
        raise InvalidRequestError(f"{where}: {e}") from e
    record = value if isinstance(value, _Record) else _Record(prompt=value)
    given = [item for item in (record.prompt, record.prompt_token_ids, record.messages) if item is not None]
    if len(given) != 1:
        raise InvalidRequestError(f"{where}: exactly one of prompt, prompt_token_ids and messages is needed, got {len(given)}")
    if isinstance(record.prompt, str):
        return PromptSource(text=record.prompt)
    if record.messages is not None:
        if not record.messages:
            raise InvalidRequestError(f"{where}: messages is empty")
        return PromptSource(messages=record.messages)
    return PromptSource(token_ids=record.prompt_token_ids if record.prompt is None else record.prompt)


def _checked_text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InvalidRequestError(f"{where} is not UTF-8 text") from e
    return text
