"""Messages as clients send them -> messages as chat templates know them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxpaged.errors import ChatTemplateError
from server.protocol.chat import Message


def template_messages(messages: Sequence[Message], *, is_joined: bool = False) -> list[dict[str, Any]]:
    """Plain data for a chat template: `developer` is `system`, refusals are text.

    Args:
        messages: as they came.
        is_joined: system messages at the beginning are one, with a blank line between them.

    Raises:
        ChatTemplateError: a part of a content that is no text.
    """
    made = [_template_message(index, message) for index, message in enumerate(messages)]
    if is_joined:
        num_system = next((index for index, message in enumerate(made) if message["role"] != "system"), len(made))
        texts = [str(message.get("content", "")) for message in made[:num_system]]
        made[:num_system] = [{"role": "system", "content": "\n\n".join(texts)}]
    return made


def _template_message(index: int, message: Message) -> dict[str, Any]:
    given = msgspec.structs.asdict(message)
    made = {name: value for name, value in given.items() if value is not None and name not in ("content", "refusal", "tool_calls")}
    if message.role == "developer":
        made["role"] = "system"
    where = f"messages[{index}]"
    content = message.content if message.content is not None else message.refusal
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if content is not None:
        made["content"] = content
    if message.tool_calls:
        made["tool_calls"] = message.tool_calls
    return made


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = {"text": part.text, "input_text": part.text, "output_text": part.text, "refusal": part.refusal}.get(part.type)
    if text is None:
        raise ChatTemplateError(f"{where} is a part of type {part.type[:40]!r} without text: this model takes text parts only", param=where)
    return text
