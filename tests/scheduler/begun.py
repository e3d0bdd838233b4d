"""Which requests have begun, as the simulation knows it: an engine that drains takes those to their ends and lets nobody else in."""

from collections.abc import Iterable

from jaxpaged.scheduled_step import ScheduledStep
from jaxpaged.sequence import Sequence


class Begun:
    """A request has begun when it, or another sample of its prompt, was let in."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    def of(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those that have."""
        return [sequence for sequence in sequences if sequence.epoch or sequence.request.sample_group in self._groups]

    def note(self, step: ScheduledStep) -> None:
        """Takes in who was let in."""
        self._groups |= {group for admitted in step.admitted if (group := admitted.request.sample_group) is not None}
