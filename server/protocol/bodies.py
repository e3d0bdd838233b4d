"""From the bytes of a body to a Struct: strict, with the field at fault named, and with what is not served looked up in the table."""

import itertools
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import msgspec.inspect

from jaxpaged.errors import InvalidRequestError
from server.protocol.fields import Field, Use

LOG: Final = logging.getLogger("jaxpaged.server")

MAX_IGNORED_NAMES: Final = 10
MAX_REMEMBERED_NAMES: Final = 1000
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-bA-B]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89a-bA-B]..)\\u[dD][c-fC-F]")
_AT: Final = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


class IgnoredNames:
    """Names of unknown fields that were told in the log; each is told once, up to a number that bounds the memory."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, path: str, names: Sequence[str]) -> None:
        """Writes a line for each new name."""
        for name in names:
            with self._lock:
                if name in self._told or len(self._told) >= MAX_REMEMBERED_NAMES:
                    continue
                self._told.add(name)
            LOG.warning("the field %s of %s is not known and was ignored", name, path)


class Body[T](NamedTuple):
    """A body that was read, and the names of its fields that nobody knows, at most ten and of harmless characters."""

    content: T
    ignored: tuple[str, ...]


def check_num_parts(body: bytes, most: int) -> None:
    """Refuses a body whose parsing would hold up everybody else, before it is parsed.

    Args:
        body: JSON or not.
        most: texts (names of fields among them), lists and objects; numbers are quick.

    Raises:
        InvalidRequestError: it has more.
    """
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") <= most:
        return
    # Now what stands inside of texts is left out.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    number = bare.count(b'"') // 2
    if number <= most:
        number += sum(between.count(b"[") + between.count(b"{") for between in bare.split(b'"')[::2])
    if number > most:
        raise InvalidRequestError(
            f"The body may hold {most} texts, names of fields, lists and objects in all (limits.max_body_parts), got {number} or more"
        )


class Shape:
    """The names of an object's fields, and the shapes of objects inside of them, in lists or not; None: free, or no object."""

    def __init__(self, kind: msgspec.inspect.StructType) -> None:
        self.fields = {field.encode_name: shape_in(field.type) for field in kind.fields}

    def unknown_names(self, value: Any, path: str) -> Iterator[str]:
        """The names in `value`, or the objects in it, that are none of the fields, each behind a path without indices."""
        if isinstance(value, list):
            for item in value:
                yield from self.unknown_names(item, path)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if name not in self.fields:
                    yield f"{path}.{name}"
                elif (shape := self.fields[name]) is not None:
                    yield from shape.unknown_names(inner, f"{path}.{name}")


def shape_in(kind: msgspec.inspect.Type) -> Shape | None:
    """The shape of the objects in a field of this type, which are all of one kind."""
    match kind:
        case msgspec.inspect.StructType():
            return Shape(kind)
        case msgspec.inspect.ListType():
            return shape_in(kind.item_type)
        case msgspec.inspect.UnionType():
            shapes = [shape for shape in map(shape_in, kind.types) if shape is not None]
            assert len(shapes) <= 1, "which of them an object is would have to be found out"
            return shapes[0] if shapes else None
        case _:
            return None


class BodyReader[T: msgspec.Struct]:
    """Reads the bodies of one endpoint.

    Args:
        kind: what they become; its fields are those that the table calls served.
        table: what is done with each field.
    """

    def __init__(self, kind: type[T], table: Sequence[Field]) -> None:
        self._fields = {field.name: field for field in table}
        self._decoder = msgspec.json.Decoder(kind, strict=True)
        self._keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
        shape = shape_in(msgspec.inspect.type_info(kind))
        assert shape is not None
        self._shapes = {name: inner for name, inner in shape.fields.items() if inner is not None}

    def read(self, body: bytes, max_parts: int) -> Body[T]:
        """The body as a Struct.

        Args:
            body: JSON.
            max_parts: texts, names of fields, lists and objects in it.

        Raises:
            InvalidRequestError: it is no JSON object, has too many parts, a field has the wrong type, or one is not served.
        """
        check_num_parts(body, max_parts)
        try:
            raw = self._keys.decode(body)
            for name, value in raw.items():
                field = self._fields.get(name)
                if field is not None and field.use is Use.REFUSED:
                    _check_refused(field, value)
            content = self._decoder.decode(body)
            ignored = tuple(itertools.islice(self._ignored_names(raw), MAX_IGNORED_NAMES))
        except RecursionError:
            raise InvalidRequestError("The body is nested too deeply: make it flatter") from None
        except msgspec.ValidationError as error:
            raise _wrong_field(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = "half of a surrogate pair is no character" if _HALF_PAIR.search(body) else str(error)[:200]
            raise InvalidRequestError(f"The body is not valid JSON in UTF-8: {reason}") from None
        return Body(content, ignored)

    def _ignored_names(self, raw: Mapping[str, msgspec.Raw]) -> Iterator[str]:
        """Names of harmless characters that nobody knows, each once: first those of the body, then those of objects inside."""
        found = set()
        inside = (shape.unknown_names(msgspec.json.decode(raw[name]), name) for name, shape in self._shapes.items() if name in raw)
        for name in itertools.chain((name for name in raw if name not in self._fields), itertools.chain.from_iterable(inside)):
            if name not in found and _NAME.fullmatch(name):
                found.add(name)
                yield name


def _check_refused(field: Field, raw: msgspec.Raw) -> None:
    if field.is_harmless(msgspec.json.decode(raw)):
        return
    raise InvalidRequestError(f"{field.name} cannot be given: {field.note}", param=field.name)


def _wrong_field(error: msgspec.ValidationError) -> InvalidRequestError:
    text = str(error)
    found = _AT.search(text)
    param = found["path"] if found else ""
    if found:
        text = text[: found.start()]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequestError(f"{param} is missing", param=param)
    sentence = text.replace("`", "").strip()
    return InvalidRequestError(f"{param or 'the body'}: {sentence[:1].lower()}{sentence[1:]}", param=param or None)


def checked_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises InvalidRequestError for a text that is none of `choices`; None passes."""
    if value is not None and value not in choices:
        raise InvalidRequestError(f"{name} is one of {', '.join(choices)}, got {str(value)[:40]!r}", param=name)
