"""What the OpenAPI document says of a route; handlers that read bodies themselves carry it as `opt={"operation": Operation(...)}`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a path.

    Attributes:
        summary: one line.
        tag: the group that the docs page shows it in.
        answer: the Struct of a 200, or None where it is no JSON.
        body: the Struct of the request's body.
        media_type: of the 200.
        chunk: the Struct of a stream's events, if it can stream.
        statuses: of errors, besides those that any path can answer.
        other_bodies: Structs of answers that are no success and have another body than an error's, by status.
    """

    summary: str
    tag: str
    answer: Any = None
    body: Any = None
    media_type: str = "application/json"
    chunk: Any = None
    statuses: tuple[int, ...] = ()
    other_bodies: Mapping[int, Any] = MappingProxyType({})


GENERATION_STATUSES = (400, 404, 413, 415, 429, 500, 503, 504)
"""What a path that asks for an answer of the model may say instead."""

BODY_STATUSES = (400, 404, 413, 415, 500, 503)
"""What a path that reads a body and needs the model may say."""
