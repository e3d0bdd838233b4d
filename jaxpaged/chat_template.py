"""Turns a conversation into the text the model was trained on, by the Jinja template that came with it.

Templates come from strangers, so they run in Jinja's immutable sandbox, see plain data only and cannot reach Python's objects.
What they may use is what Hugging Face's transformers offers them: `raise_exception`, `strftime_now`, `tojson` without HTML
escapes, `break` and `continue`, `{% generation %}` blocks, and the variables `messages`, `tools`, `documents`,
`add_generation_prompt`, `bos_token`, `eos_token`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import TemplateError

from jaxpaged.errors import ChatTemplateError, ConfigError
from jaxpaged.template_sandbox import RefusalError, TemplateEnvironment
from jaxpaged.time_limit import TimeUpError, run_within

_RESERVED: Final = ("messages", "add_generation_prompt", "bos_token", "eos_token")
_MAX_DEPTH: Final = 64
TIMEOUT_S: Final = 2.0
# Marks where the message to be continued ends. A template that trims its messages cannot trim what comes before the mark.
_CONTINUE_HERE: Final = "\U000fff00CONTINUE_HERE\U000fff01"


class ChatTemplate:
    """A template, compiled once; `render` may be called from several threads."""

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Compiles the template; one rendering takes at most `timeout_s`. Raises ChatTemplateError when its syntax is wrong."""
        self.source: Final = source
        self.timeout_s = timeout_s
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._environment = TemplateEnvironment()
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {_sentence(error)}", param="chat_template") from error

    def render(
        self,
        /,  # a variable may have any name
        messages: Any,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        Args:
            messages: see `check_messages`.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end with the last message's content, as given and without an end of turn, to be continued.
            variables: what else the template sees (`tools`, `documents`, switches of its own); plain data.

        Raises:
            ChatTemplateError: the messages are malformed, the template refuses them (its own sentence is passed on) or fails on
                them, takes too long or too much memory, both flags are set, or a variable would hide one of the template's own.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message")
        for name in _RESERVED:
            if name in variables:
                raise ChatTemplateError(f"{name} cannot be set as a variable of the chat template", param="chat_template_kwargs")
        conversation = check_messages(messages)
        if continue_final_message:
            if "content" not in conversation[-1]:
                raise ChatTemplateError("there is no content to continue in the last message", param="messages")
            conversation[-1]["content"] += _CONTINUE_HERE
        # None tells a template that there is nothing, as a variable that is not set would, but some only ask for None.
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        text = self._run(conversation, add_generation_prompt, {name: plain_value(value) for name, value in given.items()})
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(_CONTINUE_HERE)
        if not mark:
            raise ChatTemplateError("the chat template does not show the last message, so it cannot be continued", param="messages")
        return head

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]) -> str:
        is_set = {name: value for name, value in variables.items() if value is not None or name not in self._tokens}
        try:
            return run_within(
                self.timeout_s,
                lambda: self._environment.run(
                    self._template, {**is_set, "messages": messages, "add_generation_prompt": add_generation_prompt}
                ),
            )
        except TimeUpError:
            raise ChatTemplateError(
                f"the chat template takes more than {self.timeout_s:g} s for these messages", param="messages"
            ) from None
        except RefusalError as refusal:
            raise ChatTemplateError(str(refusal), param="messages") from refusal
        except Exception as error:  # a template can raise anything its expressions can
            raise ChatTemplateError(f"the chat template cannot show these messages: {_sentence(error)}", param="messages") from error


def read_chat_template(option: str) -> str:
    """The template that the option `chat_template` means: the content of the file of that name, or the option's text itself.

    Raises:
        ConfigError: it is neither a file that can be read nor a text that could be a template.
    """
    if any(character in option for character in "{}\n"):
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template file {option!r} cannot be read: {error}", param="chat_template") from error


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies a conversation as plain data with every content a string.

    A message is a mapping with a `role` and a `content`; other keys are passed on to the template. A content that is a list of
    text parts (`{"type": "text", "text": ...}` or plain strings) becomes their texts joined by a newline, as vLLM does; an empty
    list is an empty text. A content of None counts as absent, and may be absent only beside `tool_calls`, whose arguments become
    mappings where they are texts of JSON.

    Raises:
        ChatTemplateError: naming the message, counted from 0, and what is wrong with it.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ChatTemplateError("messages must be a list of at least one message", param="messages")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content, got {_kind(message)}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where} has no role", param=f"{where}.role")
    # transformers drops null values too: templates test for keys and would print "None".
    copied: dict[str, Any] = {key: plain_value(value) for key, value in message.items() if value is not None and key != "content"}
    if isinstance(calls := copied.get("tool_calls"), list):
        copied["tool_calls"] = [_with_arguments(call, f"{where}.tool_calls[{position}]") for position, call in enumerate(calls)]
    content = message.get("content")
    if content is not None:
        copied["content"] = _content_text(content, f"{where}.content")
    elif not copied.get("tool_calls"):
        raise ChatTemplateError(f"{where} (role {role!r}) has no content", param=f"{where}.content")
    return copied


def _with_arguments(call: Any, where: str) -> Any:
    """A tool call whose arguments are a mapping, as templates expect them; OpenAI's clients send them as a text of JSON."""
    function: Any = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    where += ".function.arguments"
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ChatTemplateError(f"{where} is no JSON: {_sentence(error)}", param=where) from error
    if not isinstance(decoded, dict):
        raise ChatTemplateError(f"{where} must be the JSON of an object, got {_kind(decoded)}", param=where)
    return {**call, "function": {**function, "arguments": plain_value(decoded)}}


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(f"{where} must be a string or a list of text parts, got {_kind(content)}", param=where)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = repr(part.get("type")) if isinstance(part, Mapping) else _kind(part)
            raise ChatTemplateError(
                f"{where}[{index}] is a part of type {kind}; this model takes text parts only", param=f"{where}[{index}]"
            )
        texts.append(text)
    return "\n".join(texts)


def plain_value(value: Any, depth: int = 0) -> Any:
    """A copy made of JSON's types alone, so that a template meets no methods but theirs. Raises ChatTemplateError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if depth >= _MAX_DEPTH:
        raise ChatTemplateError(f"messages and template variables may be nested {_MAX_DEPTH} deep at most", param="messages")
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, depth + 1) for item in value]
    raise ChatTemplateError(f"a chat template takes strings, numbers, lists and objects only, got {_kind(value)}", param="messages")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
