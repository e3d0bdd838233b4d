"""What the parts of gpu_check.py share: rows of the table, the card, and clocks."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A line of the table. `share`: of the ceiling that was measured in the same run; None: there is none."""

    part: str
    case: str
    value: float
    unit: str
    share: float | None = None


class Card(NamedTuple):
    """What is measured on, and against.

    Attributes:
        is_dry: sizes are tiny, and kernels interpreted.
        copy_bytes_per_s: measured; 0 where that failed.
        flops_per_s: of a bfloat16 product, likewise.
        until_s: monotonic time at which no new case is begun.
    """

    is_dry: bool
    until_s: float
    copy_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0

    def has_time(self) -> bool:
        return time.monotonic() < self.until_s


def seconds_of(run: Callable[[], Any], rounds: int) -> float:
    """Median seconds of a call, after one that warms up."""
    import jax

    jax.block_until_ready(run())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def per_call(call: Callable[[Any], Any], carry: Any, *, is_dry: bool) -> float:
    """Seconds of one of many calls in one program, each on the result of the one before: the start of a program does not count."""
    import jax

    calls = 1 if is_dry else 20
    program = jax.jit(lambda carry: jax.lax.fori_loop(0, calls, lambda _, carry: call(carry), carry)).lower(carry).compile()
    return seconds_of(lambda: program(carry), 1 if is_dry else 5) / calls


def skipped(part: str) -> Row:
    """Says that the time was up before a part was through."""
    return Row(part, "no time is left for the rest", 0.0, "skipped")
