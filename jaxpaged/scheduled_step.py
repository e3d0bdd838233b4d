"""What a step computes: the type that goes from the scheduler to packing, and back with the results."""

import msgspec

from jaxpaged.sequence import Sequence


class ScheduledRow(msgspec.Struct, frozen=True, eq=False):
    """Tokens `start` to `start + num_tokens` of one sequence. `samples`: the last of them is the last known, so a new id comes out."""

    sequence: Sequence
    num_tokens: int
    start: int
    samples: bool


class ScheduledStep(msgspec.Struct, frozen=True, eq=False):
    """One step: at least one row, rows of one token first.

    Attributes:
        rows: what to compute.
        admitted: sequences that got pages in this step, in order; each has a row, whose `start` is its prefix hit in tokens.
        preempted: sequences that lost their pages, in the order in which they did.
        decision: for people, why so many were admitted ("admitted 3 of 9: pages").
        prefix_queries_tokens: prompt tokens looked up in the prefix cache, at first admissions.
        prefix_hits_tokens: how many of them were found.
    """

    rows: tuple[ScheduledRow, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    decision: str
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
