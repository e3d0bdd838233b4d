"""What a start needs of the other processes, whichever it is itself: to meet them, and to know whether they live."""

from typing import Protocol, runtime_checkable

from jaxpaged.distributed.settings import Processes
from jaxpaged.errors import JaxpagedError

BEAT_S = 1.0
"""Between two signs of life, when there is nothing else to send."""
TICK_S = 0.5
"""Ticks are counted and no clock is looked at: a process that was stopped and goes on must not take the others for silent."""
SILENCE_S = 5.0
"""After so long a silence a process counts as dead."""
START_SILENCE_S = 30.0
"""Likewise at the start, where tracing and reading hold the interpreter for longer. A process that ends is seen at once all the same."""
DEAD_STATUS = 70
"""Exit status of a process whose company is gone, as of one whose engine is dead."""


@runtime_checkable
class Company(Protocol):
    """The other processes of the engine."""

    processes: Processes

    @property
    def bind_host(self) -> str | None:
        """The address that process 0 listens at; None in the others."""
        ...

    def least(self, name: str, number: int) -> int:
        """The least of all processes' numbers of that name; waits for all of them. Raises StreamError."""
        ...

    def same(self, name: str, text: str) -> None:
        """Waits until all processes are here. Raises ConfigError when they say different things, and StreamError."""
        ...


class Silence:
    """Counts the ticks in which nothing came. Any thread may call it.

    Args:
        limit_s: after which somebody counts as dead.
    """

    def __init__(self, limit_s: float, tick_s: float = TICK_S) -> None:
        self.limit_s, self._tick_s = limit_s, tick_s
        self._num_silent = 0

    def broken(self) -> None:
        """Something came."""
        self._num_silent = 0

    def tick(self) -> bool:
        """One tick more; whether it has lasted for too long."""
        self._num_silent += 1
        return self._num_silent * self._tick_s > self.limit_s


def sentence_of(error: BaseException) -> str:
    """What the others are told of a failure."""
    return error.message if isinstance(error, JaxpagedError) else f"{type(error).__name__}: {error}"
