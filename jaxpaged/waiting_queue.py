"""Requests without pages, in the order in which they are let in.

The order is by priority (lower first) and then by arrival, and waiting counts: a request gains one class of priority for
every `ageing_s` seconds in the queue, so that a stream of better ones cannot keep it out for ever. Since all gain alike,
the order of two requests never changes, and `priority * ageing_s + time of arrival` is a key for good: a request goes
before one of the next worse class unless that one came `ageing_s` earlier.

A second order is by priority alone: who may take the place of a running request is decided without ageing. Both are heaps
from which removed requests are dropped when they come to the top.
"""

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter

from jaxpaged.sequence import Sequence

_Entry = tuple[tuple[float, int], int, Sequence]


class WaitingQueue:
    """Add, remove and first are O(log n). A sequence keeps its place when it comes back after a preemption.

    Args:
        ageing_s: seconds of waiting that are worth one class of priority.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._by_age: list[_Entry] = []
        self._by_priority: list[_Entry] = []
        self._members: dict[Sequence, int] = {}  # and the number of the entries that stand for each
        self._num_placed = 0
        self._num_entries = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """In order; not for every step."""
        return iter(sorted(self._members, key=attrgetter("queue_key")))

    def place(self, sequence: Sequence, now_s: float) -> None:
        """Gives a new sequence its place for good: behind all of its priority."""
        self._num_placed += 1
        sequence.queued_s = now_s
        sequence.queue_key = (sequence.priority * self._ageing_s + now_s, self._num_placed)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence that has a place into the queue."""
        self._num_entries += 1
        number = self._members[sequence] = self._num_entries
        self.num_prompt_tokens += sequence.num_prompt_tokens
        heapq.heappush(self._by_age, (sequence.queue_key, number, sequence))
        heapq.heappush(self._by_priority, ((sequence.priority, sequence.queue_key[1]), number, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out. Raises KeyError when it is not in the queue."""
        del self._members[sequence]
        self.num_prompt_tokens -= sequence.num_prompt_tokens
        if len(self._by_age) > 2 * len(self._members) + 64:
            self._by_age = [entry for entry in self._by_age if self._is_current(entry)]
            heapq.heapify(self._by_age)
        if len(self._by_priority) > 2 * len(self._members) + 64:
            self._by_priority = [entry for entry in self._by_priority if self._is_current(entry)]
            heapq.heapify(self._by_priority)

    def first(self) -> Sequence:
        """The one to be let in next. Raises IndexError when nobody waits."""
        return self._first(self._by_age)

    def first_of(self, is_one: Callable[[Sequence], bool]) -> Sequence | None:
        """The first of those that `is_one` says; not for every step."""
        return min(filter(is_one, self._members), key=attrgetter("queue_key"), default=None)

    def first_by_priority(self) -> Sequence:
        """The first of the best priority, whatever others have waited. Raises IndexError when nobody waits."""
        return self._first(self._by_priority)

    def _first(self, heap: list[_Entry]) -> Sequence:
        while not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2]

    def _is_current(self, entry: _Entry) -> bool:
        return self._members.get(entry[2]) == entry[1]
