"""Keeps a user's words from becoming control tokens.

A message that spells `<|im_end|>` must not end its turn. So control tokens spelled in messages are marked before the template
is run, and the rendered text is cut at the control tokens without a mark, which the template wrote itself; what lies between
them is tokenized with control tokens switched off. (A token that swallows the white space beside it does not do so then.)
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxpaged.errors import ChatTemplateError

# Unicode's private planes: a text that uses all 131,068 characters of them at once is no message.
_MARKS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class Marked(NamedTuple):
    """What a user said, with `mark` behind the first character of every control token."""

    said: Any
    mark: str


class ControlTokens:
    """The control tokens of one tokenizer, by their text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: index for text, index in ids.items() if len(text) > 1}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(self, said: Any) -> Marked | None:
        """Strings, and those in lists and mappings, marked; None when they spell no control token.

        Raises:
            ChatTemplateError: there is no character left to mark them with.
        """
        strings = list(_strings(said))
        if not any(self._pattern.search(string) for string in strings):
            return None
        used = set().union(*strings)
        mark = next((chr(code) for code in _MARKS if chr(code) not in used), None)
        if mark is None:
            raise ChatTemplateError("the messages use every character of Unicode's private planes", param="messages")
        return Marked(self._marked(said, mark), mark)

    def cut(self, rendered: str, mark: str) -> list[str | int]:
        """The rendered text as control tokens (ids) and the texts between them, without marks."""
        pieces: list[str | int] = []
        start = 0
        for match in self._pattern.finditer(rendered):
            pieces += [rendered[start : match.start()].replace(mark, ""), self._ids[match.group()]]
            start = match.end()
        return [piece for piece in (*pieces, rendered[start:].replace(mark, "")) if piece != ""]

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            # Once more, since breaking one token can uncover another that began inside it.
            while (marked := self._pattern.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)) != value:
                value = marked
            return value
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return [self._marked(item, mark) for item in value] if isinstance(value, list | tuple) else value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
