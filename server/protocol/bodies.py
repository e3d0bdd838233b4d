"""From the bytes of a body to a Struct: strict, with the field at fault named, and with what is not served looked up in the table."""

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from jaxpaged.errors import InvalidRequestError
from server.protocol.fields import Field, Use
from server.protocol.generation import StreamOptions

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

    def read(self, body: bytes) -> Body[T]:
        """The body as a Struct.

        Raises:
            InvalidRequestError: it is no JSON object, a field has the wrong type, or one is not served.
        """
        try:
            raw = self._keys.decode(body)
            ignored = [name for name in raw if name not in self._fields]
            if "stream_options" in raw and "stream_options" in self._fields:
                ignored += _unknown_stream_options(raw["stream_options"])
            for name, value in raw.items():
                field = self._fields.get(name)
                if field is not None and field.use is Use.REFUSED:
                    _check_refused(field, value)
            content = self._decoder.decode(body)
        except RecursionError:
            raise InvalidRequestError("The body is nested too deeply: make it flatter") from None
        except msgspec.ValidationError as error:
            raise _wrong_field(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = "half of a surrogate pair is no character" if _HALF_PAIR.search(body) else str(error)[:200]
            raise InvalidRequestError(f"The body is not valid JSON in UTF-8: {reason}") from None
        return Body(content, tuple([name for name in ignored if _NAME.fullmatch(name)][:MAX_IGNORED_NAMES]))


def _unknown_stream_options(raw: msgspec.Raw) -> list[str]:
    options = msgspec.json.decode(raw)
    if not isinstance(options, dict):
        return []
    return [f"stream_options.{name}" for name in options if name not in StreamOptions.__struct_fields__]


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
