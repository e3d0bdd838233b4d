"""What a request is called in answers and in the log."""

import itertools
import re
import secrets
from collections.abc import Iterable

_WORD = re.compile(rb"[A-Za-z0-9._:-]+")


class RequestIds:
    """Gives names.

    Args:
        max_chars: of a client's; a longer one is not taken over.
    """

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._prefix, self._numbers = f"req-{secrets.token_hex(4)}", itertools.count()
        """An id of ours never meets another process's."""

    def name(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The client's `x-request-id`, if it is a word of a fair length; else one of ours."""
        given = next((value for name, value in headers if name == b"x-request-id"), b"")
        if len(given) <= self._max_chars and _WORD.fullmatch(given):
            return given.decode("ascii")
        return f"{self._prefix}-{next(self._numbers)}"
