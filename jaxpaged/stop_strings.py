"""Finding the first of several stop strings in text that arrives piece by piece (Aho and Corasick, 1975)."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxpaged.errors import InvalidRequestError


class StopMatch(NamedTuple):
    """`stop` was completed by the character before index `end` of the text just given."""

    stop: str
    end: int


class StopStrings:
    """Watches a text for stop strings, in constant time per character however many there are.

    The match that is complete first wins; of several complete at the same character, the longest. So the answer does not depend
    on how the text is cut into pieces, and a stop string that begins with another one can never match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequestError for an empty stop string."""
        # Node 0 is the root; a node is a beginning of a stop string, `_longest[node]` the longest stop string its text ends with.
        self._children: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]
        self._num_chars: list[int] = [0]
        self._longest: list[str | None] = [None]
        self._node = 0
        for stop in stops:
            if not stop:
                raise InvalidRequestError("a stop string must not be empty", param="stop")
            self._insert(stop)
        self._link()

    @property
    def num_held_chars(self) -> int:
        """Length of the longest end of the text so far that is a beginning of a stop string."""
        return self._num_chars[self._node]

    def advance(self, text: str) -> StopMatch | None:
        """Reads on to the first match or to the end of `text`; after a match the watch begins anew."""
        children, shorter, longest, node = self._children, self._shorter, self._longest, self._node
        for index, character in enumerate(text):
            while (child := children[node].get(character)) is None and node:
                node = shorter[node]
            node = child or 0
            if (stop := longest[node]) is not None:
                self._node = 0
                return StopMatch(stop, index + 1)
        self._node = node
        return None

    def _insert(self, stop: str) -> None:
        node = 0
        for index, character in enumerate(stop):
            child = self._children[node].get(character)
            if child is None:
                child = self._children[node][character] = len(self._children)
                self._children.append({})
                self._shorter.append(0)
                self._num_chars.append(index + 1)
                self._longest.append(None)
            node = child
        self._longest[node] = stop

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                link = self._shorter[node]
                while character not in self._children[link] and link:
                    link = self._shorter[link]
                self._shorter[child] = self._children[link].get(character, 0)
                self._longest[child] = self._longest[child] or self._longest[self._shorter[child]]
                queue.append(child)
