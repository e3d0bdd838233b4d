"""How long answers will probably become, from those that have ended lately."""

from bisect import bisect_right, insort
from collections import deque

HISTORY = 256
"""Ended answers that are remembered."""

FIRST_GUESS_TOKENS = 256
"""What an answer is taken to need as long as none has ended."""


class OutputLengths:
    """A sorted window of the last lengths."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=HISTORY)
        self._sorted: list[int] = []

    def record(self, num_tokens: int) -> None:
        """Notes the length of an answer that has come to its own end."""
        if len(self._recent) == HISTORY:
            del self._sorted[bisect_right(self._sorted, self._recent[0]) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    def expected_remaining(self, num_tokens: int, quantile: float) -> int:
        """Tokens that an answer of `num_tokens` so far will probably still get; at least 1.

        Args:
            num_tokens: its length by now.
            quantile: in [0, 1): of the answers that became longer than that, this share was no longer than what is expected.
        """
        lengths = self._sorted
        index = bisect_right(lengths, num_tokens)
        num_longer = len(lengths) - index
        if num_longer:
            return lengths[index + int(quantile * num_longer)] - num_tokens
        # Longer than all: such answers go on for about as long again.
        return max(num_tokens, 1) if lengths else max(FIRST_GUESS_TOKENS, num_tokens)
