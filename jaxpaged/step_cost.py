"""How long a step takes, learnt from those that have run, and how many tokens a step may have to keep a time."""

from bisect import bisect_left

DECAY = 0.97
"""Weight of a step against the one after it: the last 30 or so count."""

LEAST_SPREAD = 1e-3
"""Sizes of steps vary when their variance is more than this share of their mean's square."""


class StepCost:
    """A line through (tokens, seconds), fitted by least squares with fading memory.

    Args:
        token_buckets: token counts that steps are padded to, in order; empty: they are not padded.
    """

    def __init__(self, token_buckets: tuple[int, ...] = ()) -> None:
        self._buckets = token_buckets
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._largest = 0.0
        self._slope: float | None = None
        """Seconds per token, by the last steps that were not all of one size."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from one step."""
        x = float(self._padded(num_tokens))
        self._largest = max(x, self._largest * DECAY)
        self._weight = self._weight * DECAY + 1.0
        self._x = self._x * DECAY + x
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + x * x
        self._xy = self._xy * DECAY + x * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread > LEAST_SPREAD * mean_x * mean_x:
            self._slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)

    @property
    def has_learnt(self) -> bool:
        """Whether any step has been observed."""
        return self._weight > 0

    @property
    def only_size(self) -> int | None:
        """Tokens of a step, padding included, if all so far had the same number: they tell nothing of larger ones."""
        return round(self._x / self._weight) if self._weight and self._slope is None else None

    @property
    def largest(self) -> int:
        """Tokens of the largest step of late, padding included; an old one counts less and less."""
        return int(self._largest)

    def seconds(self, num_tokens: int) -> float:
        """What a step of `num_tokens` tokens will take."""
        base, slope = self._line()
        return base + slope * self._padded(num_tokens)

    def most_tokens(self, seconds: float, limit: int) -> int:
        """Tokens, `limit` at most, of the largest step that takes no longer than `seconds`; 0 when none does."""
        base, slope = self._line()
        if slope <= 0:
            return limit
        num_tokens = max(0, int((seconds - base) / slope + 1e-6))
        if self._buckets and num_tokens < self._buckets[-1]:
            larger = bisect_left(self._buckets, num_tokens + 1)
            num_tokens = self._buckets[larger - 1] if larger else 0
        return min(num_tokens, limit)

    def tokens_per_step(self, num_beside: int, tokens_per_s: float, limit: int) -> int:
        """Tokens of prompts that each step must have, beside `num_beside` others, to get through so many per second."""
        base, slope = self._line()
        share = 1.0 - tokens_per_s * slope
        if share <= 0:
            return limit
        return min(limit, int(tokens_per_s * (base + slope * num_beside) / share) + 1)

    def _padded(self, num_tokens: int) -> int:
        index = bisect_left(self._buckets, num_tokens)
        return self._buckets[index] if index < len(self._buckets) else num_tokens

    def _line(self) -> tuple[float, float]:
        """Seconds of an empty step, and seconds per token."""
        if not self._weight:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if self._slope is not None and (base := mean_y - self._slope * mean_x) >= 0:
            return base, self._slope
        # All steps were of one size, or the line would start below zero: tokens cost what they cost on average.
        return 0.0, mean_y / mean_x
