"""What a diagnosis is made of."""

from typing import Literal

import msgspec

type Severity = Literal["critical", "warning", "info"]


class Evidence(msgspec.Struct, frozen=True, rename={"from_time": "from", "to_time": "to"}):
    """A figure that speaks for a finding, and when; the times are seconds."""

    metric: str
    value: float
    unit: str
    threshold: float
    from_time: float
    to_time: float


class Change(msgspec.Struct, frozen=True, omit_defaults=True, rename={"from_value": "from", "to_value": "to"}):
    """What to do: an option with its present value (None: not told) and a better one, or advice."""

    option: str = ""
    from_value: float | str | None = None
    to_value: float | str | None = None
    advice: str = ""


class Finding(msgspec.Struct, frozen=True):
    """Something that is wrong.

    Attributes:
        id: of the rule.
        title: what is wrong.
        since: seconds, when it was first seen.
        evidence: why we think so.
        change: what to do.
        expect: what will come of it.
    """

    id: str
    severity: Severity
    title: str
    since: float
    evidence: tuple[Evidence, ...]
    change: Change
    expect: str
