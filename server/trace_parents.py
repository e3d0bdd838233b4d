"""The header `traceparent` of W3C Trace Context: which span of a client's a request belongs to."""

import re
from collections.abc import Sequence

_VERSION_00 = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def trace_parent(given: Sequence[str]) -> str | None:
    """The header in the form of version 00, which later versions begin with.

    Args:
        given: the values of all such headers of a request.

    Returns:
        None: there is none, several, or one that is none.
    """
    if len(given) != 1:
        return None
    value = given[0].strip(" \t")
    version, rest = value[:2], value[55:]
    if not re.fullmatch("[0-9a-f]{2}", version) or version == "ff" or (rest if version == "00" else rest and rest[0] != "-"):
        return None
    as_first = f"00{value[2:55]}"
    return as_first if _VERSION_00.fullmatch(as_first) else None
