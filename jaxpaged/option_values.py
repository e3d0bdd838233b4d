"""What an option's value may look like: text to value, limits in words, value to YAML.

The type of a field in `config.py` is the only source; this module reads it once into an `OptionType`.
"""

import enum
import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from jaxpaged.config import BYTES, REDACTED, SECRET, is_marked
from jaxpaged.errors import ConfigError

_NONE_WORDS = frozenset({"none", "null", "~"})
_TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
_FALSE_WORDS = frozenset({"false", "no", "off", "0"})

# vLLM's reading: a small letter is a power of ten, a capital one a power of two.
_SUFFIXES = {
    **{letter: 1000 ** (i + 1) for i, letter in enumerate("kmgt")},
    **{letter: 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
}
_BYTE_SUFFIXES = {
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")},
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")},
    "b": 1,
}
_NUMBER = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


class Kind(enum.StrEnum):
    """What sort of value a field holds, apart from none."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    CHOICE = "choice"
    LIST = "list"


class OptionType(msgspec.Struct, frozen=True, kw_only=True):
    """A field's type, taken apart. `choices` are words that an INT may be too (`auto`), or all of a CHOICE; `spellings` other words."""

    kind: Kind
    is_optional: bool = False
    is_bytes: bool = False
    is_secret: bool = False
    choices: tuple[str, ...] = ()
    spellings: Mapping[str, str] = {}
    limits: Meta = Meta()
    item: "OptionType | None" = None

    @property
    def expected(self) -> str:
        """The values accepted, in words."""
        words = {
            Kind.BOOL: "true or false",
            Kind.INT: "a size in bytes such as 512MiB" if self.is_bytes else "an integer",
            Kind.FLOAT: "a number",
            Kind.TEXT: "a text",
            Kind.CHOICE: "one of " + ", ".join(self.choices),
            Kind.LIST: f"a list, each item {self.item.expected}" if self.item else "a list",
        }[self.kind]
        words += _limits_in_words(self.limits)
        if self.kind is Kind.INT and self.choices:
            words += ", or " + " or ".join(self.choices)
        return words + (", or none" if self.is_optional else "")

    @property
    def metavar(self) -> str:
        """A short word for help texts."""
        if self.kind is Kind.CHOICE:
            return "{" + ",".join(self.choices) + "}"
        return {Kind.INT: "SIZE" if self.is_bytes else "N", Kind.FLOAT: "X", Kind.LIST: "X"}.get(self.kind, "TEXT")


def _limits_in_words(limits: Meta) -> str:
    low = limits.ge if limits.ge is not None else limits.gt
    if low is None and limits.le is None:
        return " that is not empty" if limits.min_length else ""
    opening = "" if low is None else f" above {low:g}" if limits.ge is None else f" from {low}"
    closing = "" if limits.le is None else f" {'to' if limits.ge is not None else 'and at most'} {limits.le}"
    return opening + (closing or " up") if limits.ge is not None else opening + closing


def read_type(annotation: Any) -> OptionType:
    """Takes a field's annotation apart.

    Raises:
        TypeError: the annotation is of a form that options do not have.
    """
    limits, inner = Meta(), annotation
    if get_origin(inner) is Annotated:
        inner, *metas = get_args(inner)
        limits = next((meta for meta in metas if isinstance(meta, Meta)), Meta())
    parts = list(get_args(inner)) if get_origin(inner) in (Union, types.UnionType) else [inner]
    is_optional = type(None) in parts
    parts = [part for part in parts if part is not type(None)]
    choices = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    parts = [part for part in parts if get_origin(part) is not Literal]
    if not parts:
        kind, item = Kind.CHOICE, None
    elif len(parts) == 1 and get_origin(parts[0]) is tuple:
        kind, item = Kind.LIST, read_type(get_args(parts[0])[0])
    elif len(parts) == 1 and parts[0] in _KINDS:
        kind, item = _KINDS[parts[0]], None
    else:
        raise TypeError(f"{annotation} is not a type that an option can have")
    return OptionType(
        kind=kind,
        is_optional=is_optional,
        is_bytes=is_marked(annotation, BYTES),
        is_secret=is_marked(annotation, SECRET),
        choices=choices,
        spellings=(limits.extra or {}).get("spellings", {}),
        limits=limits,
        item=item,
    )


_KINDS = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT}


def parse_size(text: str, *, is_bytes: bool = False) -> int:
    """Reads `4096`, `32k` (32,000), `32K` (32,768), and with `is_bytes` also `512MiB`, `1.5GiB`, `2GB`.

    Raises:
        ValueError: not a whole number of units.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a count: {shorten(text)!r}")
    number, suffix = match[1].replace("_", ""), match[2]
    factor = 1 if not suffix else _SUFFIXES.get(suffix) or (_BYTE_SUFFIXES.get(suffix.lower()) if is_bytes else None)
    if factor is None:
        raise ValueError(f"not a count: {shorten(text)!r}")
    whole, _, fraction = number.partition(".")
    scaled, rest = divmod(int(whole + fraction) * factor, 10 ** len(fraction))
    # A count of tokens is exact or it is a mistake; a size of bytes like 0.3GB may round down.
    if rest and not is_bytes:
        raise ValueError(f"not a count: {shorten(text)!r}")
    return scaled


def parse_text(text: str, option: OptionType) -> Any:
    """The value that a flag's, variable's or YAML string's text means, before limits are checked.

    Raises:
        ValueError: the text cannot be read as the option's type.
    """
    word = text.strip().lower()
    if option.is_optional and word in _NONE_WORDS:
        return None
    if option.kind is Kind.BOOL:
        if word in _TRUE_WORDS or word in _FALSE_WORDS:
            return word in _TRUE_WORDS
        raise ValueError(text)
    if option.kind is Kind.INT:
        if word in option.choices:
            return word
        if "auto" in option.choices and word == "-1":
            return "auto"
        return parse_size(text, is_bytes=option.is_bytes)
    if option.kind is Kind.FLOAT:
        return float(text)
    if option.kind is Kind.LIST:
        assert option.item is not None
        return [parse_text(item.strip(), option.item) for item in text.split(",") if item.strip()]
    return text


def read_value(value: Any, option: OptionType, *, path: str, source: str) -> Any:
    """Brings a value from any source into the field's type and checks its limits.

    Args:
        value: text, or what YAML or Python gives.
        path: the option's place in the tree, for messages.
        source: where the value came from, for messages (`--cache.page-size`, `line of x.yaml`).

    Raises:
        ConfigError: wrong type or out of range; the message names the option, the value and what is accepted.
    """
    try:
        return _checked(value, option)
    except (ValueError, OverflowError) as e:
        shown = "a value that is not shown" if option.is_secret else shorten(repr(value))
        origin = "" if source == path else f" ({source})"
        raise ConfigError(f"{path} must be {option.expected}; got {shown}{origin}", param=path) from e


def _checked(value: Any, option: OptionType) -> Any:
    """The value in the field's type and within its limits. Raises ValueError."""
    if isinstance(value, str):
        value = parse_text(value, option)
    if value is None and option.is_optional:
        return None
    match option.kind:
        case Kind.LIST:
            if isinstance(value, str) or not isinstance(value, Sequence) or option.item is None:
                raise ValueError(value)
            return tuple(_checked(item, option.item) for item in value)
        case Kind.INT:
            if isinstance(value, str) and value in option.choices:
                return value
            if "auto" in option.choices and value == -1:
                return "auto"
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(value)
        case Kind.FLOAT:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(value)
            value = float(value)
            if not math.isfinite(value):
                raise ValueError(value)
        case Kind.BOOL:
            if not isinstance(value, bool):
                raise ValueError(value)
        case Kind.CHOICE:
            if isinstance(value, str):
                value = option.spellings.get(value, value)
            if value not in option.choices:
                raise ValueError(value)
        case Kind.TEXT:
            if not isinstance(value, str) or len(value) < (option.limits.min_length or 0):
                raise ValueError(value)
    limits = option.limits
    is_low = (limits.ge is not None and value < limits.ge) or (limits.gt is not None and value <= limits.gt)
    if is_low or (limits.le is not None and value > limits.le):
        raise ValueError(value)
    return value


def shorten(text: str, limit: int = 80) -> str:
    """Cuts text that came from outside, for use in a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_yaml_value(value: Any, option: OptionType, *, redact: bool) -> str:
    """One value as YAML on one line; secrets that are set become `***` if `redact`."""
    if option.is_secret and redact and value:
        return f"[{_quoted(REDACTED)}]" if option.item else _quoted(REDACTED)
    if isinstance(value, str):
        return value if _is_plain(value) else _quoted(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_quoted(item) if isinstance(item, str) else json.dumps(item) for item in value) + "]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """A double-quoted YAML scalar, all that is not printable escaped."""
    escaped = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)
    return '"' + "".join(escaped).replace("\\U00000022", '\\"').replace("\\U0000005C", "\\\\").replace("\\U0000000A", "\\n") + '"'


_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./-]*", re.ASCII)


def _is_plain(text: str) -> bool:
    words = _NONE_WORDS | _TRUE_WORDS | _FALSE_WORDS | {"y", "n", ".inf", ".nan"}
    return bool(_PLAIN.fullmatch(text)) and text.lower() not in words and not text.startswith(".") and not text.endswith(".")
