"""How large the values of a chat template get, looked at before they are made.

No text grows past `MAX_CHARS` characters, and no value holds more than that in all that it holds: `text_size` is what it would take
to write it out. Lists of short texts take far more memory than their characters do, so there are fewer of these (`MAX_ITEMS`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_CHARS = 16_000_000
"""Characters of a text, or items of a list, that a template may make; the rendered conversation included."""
MAX_ITEMS = 1_000_000
"""Pieces that one text may be cut into."""
MAX_DEPTH = 128
"""Values within values."""
MAX_INT_BITS = 4096
MAX_INDENT = 256
MAX_FORMAT_WIDTH = 99_999

_FIELD = re.compile(r"%(?:\([^)]*\))?([-#0 +\d.*]*)|\{[^{}:]*:([^{}]*)")
"""Flags, width and precision of a field: of `%5.2f` and of `{:>4}`. Digits of the text around it are nobody's width."""
_TAKES_WIDTH = re.compile(r"%(?:\([^)]*\))?[-#0 +\d.]*\*|\{[^{}]*:[^{}]*\{")


class TooLargeError(TemplateError):
    """The template makes a value that is too large."""


def check_size(size: int) -> None:
    """Refuses a value of that many characters or items. Raises TooLargeError."""
    if size > MAX_CHARS:
        raise TooLargeError(f"it makes a value of {size} characters or items, and at most {MAX_CHARS} are allowed")


def own_size(value: Any) -> int:
    """Characters of a text, or items of a list, whatever they are."""
    return len(value) if isinstance(value, str | list | tuple) else 0


def text_size(value: Any) -> int:
    """About the characters that a value takes when it is written out, with all that it holds.

    Raises:
        TooLargeError: more than `MAX_CHARS`; no more of it is looked at then.
    """
    if isinstance(value, str):  # most are
        check_size(len(value))
        return len(value)
    size = 0
    waiting: list[Iterator[Any]] = [iter((value,))]
    while waiting:
        for item in waiting[-1]:
            if isinstance(item, str):
                size += len(item) + 2
            elif isinstance(item, int):
                size += item.bit_length() // 3 + 2
            elif (inner := _items(item)) is not None:
                size += 8
                waiting.append(inner)
                if len(waiting) > MAX_DEPTH:
                    raise TooLargeError(f"it nests values more than {MAX_DEPTH} deep")
                break
            else:
                size += 8
            check_size(size)
        else:
            waiting.pop()
    return size


def _items(value: Any) -> Iterator[Any] | None:
    """What a value holds; None if it is none that holds others."""
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if isinstance(value, Context):
        value = value.get_all()
    if isinstance(value, Mapping):
        return (part for pair in value.items() for part in pair)
    return iter(value) if isinstance(value, list | tuple | AbstractSet) or type(value) is type({}.values()) else None


def check_indent(width: Any) -> None:
    """Refuses an indent that is a number or a text. Raises TooLargeError."""
    if own_size(width) > MAX_INDENT or (isinstance(width, int) and width > MAX_INDENT):
        raise TooLargeError(f"an indent is at most {MAX_INDENT} wide")


def check_tojson(value: Any, indent: int | None) -> None:
    """Refuses a value that is too large as JSON. Raises TooLargeError."""
    size = text_size(value)
    if isinstance(indent, int):
        check_indent(indent)
        # Each item takes 8 at least of that size, and has a line of its own.
        check_size(size + size // 8 * max(indent, 0))


def check_product(left: Any, right: Any) -> None:
    """Refuses `left * right`. Raises TooLargeError."""
    count = right if isinstance(right, int) else left if isinstance(left, int) else 0
    check_size((own_size(left) + own_size(right)) * count)


def _check_width(value: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        check_size(width)


def _check_center(value: Any, width: Any = 80, *_: Any, **__: Any) -> None:
    text_size(value)
    _check_width(value, width)


def _check_indent_filter(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    check_indent(width)
    text_size(value)
    text = str(value)
    check_size(len(text) + text.count("\n") * (width if isinstance(width, int) else own_size(width)))


def _check_replace(value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    for part in (value, old, new):
        text_size(part)
    text, old, new = str(value), str(old), str(new)
    check_size(len(text) + text.count(old) * len(new))


def _check_join(separator: Any, values: Any = (), *_: Any, **__: Any) -> None:
    if own_size(values):
        check_size(text_size(values) + len(values) * own_size(separator))


def _check_join_filter(values: Any, d: Any = "", *_: Any, **__: Any) -> None:
    text_size(d)
    _check_join(str(d), values)


def _check_expandtabs(text: str, tabsize: Any = 8, *_: Any, **__: Any) -> None:
    if isinstance(tabsize, int):
        check_size(len(text) + text.count("\t") * max(tabsize, 0))


def _check_translate(text: str, table: Any = None, *_: Any, **__: Any) -> None:
    longest = max((own_size(value) for value in table.values()), default=0) if isinstance(table, Mapping) else 0
    check_size(len(text) * max(longest, 1))


def _check_format_filter(value: Any, *args: Any, **kwargs: Any) -> None:
    check_format(str(value), (*args, *kwargs.values()))


def check_format(format_: str, values: Iterable[Any]) -> None:
    """Refuses a format. Widths and precisions are written in its fields, or taken from a value (`*`, `{:{}}`).

    Raises:
        TooLargeError: a width or the text would be too large.
    """
    values = tuple(values)
    widths = [int(number) for groups in _FIELD.findall(format_) for field in groups for number in re.findall(r"\d+", field)]
    if _TAKES_WIDTH.search(format_):
        widths += [abs(value) for value in values if isinstance(value, int)]
    if any(width > MAX_FORMAT_WIDTH for width in widths):
        raise TooLargeError(f"a format's width is at most {MAX_FORMAT_WIDTH}")
    longest = max(map(text_size, values), default=0)
    check_size(len(format_) + (format_.count("%") + format_.count("{")) * longest + sum(widths))


def _check_wordwrap(
    value: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, break_on_hyphens: Any = True, *_: Any, **__: Any
) -> None:
    size = text_size(value)
    check_size(size + (size // max(width, 1) + 1 if isinstance(width, int) else size) * max(own_size(wrapstring), 1))


def _check_values(*values: Any, **named: Any) -> None:
    text_size((*values, *named.values()))


def _check_pieces(value: Any, *_: Any, **__: Any) -> None:
    """Of a text that becomes the list of its characters."""
    if isinstance(value, str):
        _check_count(len(value))


def _check_batch(value: Any, width: Any = 0, *_: Any, **__: Any) -> None:
    _check_pieces(value)
    _check_width(value, width)


def _check_split(text: str, sep: Any = None, *_: Any, **__: Any) -> None:
    separators = (sep,) if isinstance(sep, str) and sep else (" ", "\n", "\t", "\r", "\f", "\v", "\u3000")
    _check_count(sum(map(text.count, separators)) + 1)


def _check_splitlines(text: str, *_: Any, **__: Any) -> None:
    _check_count(sum(map(text.count, ("\n", "\r", "\f", "\v", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"))) + 1)


def _check_count(count: int) -> None:
    if count > MAX_ITEMS:
        raise TooLargeError(f"it cuts a text into {count} pieces, and at most {MAX_ITEMS} are allowed")


FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_batch,
    "center": _check_center,
    "format": _check_format_filter,
    "indent": _check_indent_filter,
    "join": _check_join_filter,
    "list": _check_pieces,
    "replace": _check_replace,
    "slice": _check_batch,
    "sort": _check_pieces,
    "unique": _check_pieces,
    "wordwrap": _check_wordwrap,
    # What these are given is made a text, or added up, before anything else is done with it.
    **dict.fromkeys(
        (
            *("capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "sum", "title", "trim"),
            *("truncate", "upper", "urlencode", "urlize", "wordcount", "xmlattr"),
        ),
        _check_values,
    ),
}
"""Filter -> what looks at its arguments."""
METHOD_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "expandtabs": _check_expandtabs,
    "join": _check_join,
    "ljust": _check_width,
    "replace": _check_replace,
    "rjust": _check_width,
    "rsplit": _check_split,
    "split": _check_split,
    "splitlines": _check_splitlines,
    "translate": _check_translate,
    "zfill": _check_width,
}
"""Method of a text -> what looks at the text and its arguments."""
