"""Counts of values by class, and those that are made of a request's and a step's events."""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from jaxpaged import events
from jaxpaged.metric_table import REQUEST_HISTOGRAMS

# fmt: off
SECONDS_BOUNDS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.8,
    1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 120.0, 160.0, 240.0, 480.0, 640.0, 960.0, 1920.0, 2560.0,
    7680.0,
)
"""Fine enough to see 1 ms; vLLM's bounds of first tokens and of whole requests are among them."""
TOKEN_BOUNDS: Final = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0, 100_000.0, 200_000.0,
)
STEP_TOKEN_BOUNDS: Final = tuple(float(2**power) for power in range(15))
SMALL_BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
# fmt: on

BOUNDS: Final = {
    "jaxpaged_token_gap_seconds": events.TOKEN_GAP_BOUNDS_S,
    "jaxpaged_request_prompt_tokens": TOKEN_BOUNDS,
    "jaxpaged_request_computed_prompt_tokens": TOKEN_BOUNDS,
    "jaxpaged_request_output_tokens": TOKEN_BOUNDS,
    "jaxpaged_request_longest_answer_tokens": TOKEN_BOUNDS,
    "jaxpaged_request_max_tokens": TOKEN_BOUNDS,
    "jaxpaged_request_answers": SMALL_BOUNDS,
    "jaxpaged_step_tokens": STEP_TOKEN_BOUNDS,
    "jaxpaged_step_sequences": STEP_TOKEN_BOUNDS,
}
"""Classes of the histograms that do not count in `SECONDS_BOUNDS`."""


class Spread(msgspec.Struct, frozen=True):
    """How values are spread.

    Attributes:
        bounds: upper bounds of the classes; a last class holds larger values.
        counts: values in each class; one more than bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float = 0.0

    @property
    def count(self) -> float:
        """How many values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; 0 of nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value below which `share` of them lie, as near as the classes tell; 0 of nothing."""
        wanted, so_far, below = share * self.count, 0.0, 0.0
        for bound, count in zip((*self.bounds, self.bounds[-1]), self.counts, strict=True):
            if count and so_far + count >= wanted:
                return below + (bound - below) * (wanted - so_far) / count
            so_far, below = so_far + count, bound
        return below if so_far else 0.0

    def since(self, before: "Spread | None") -> "Spread":
        """The values that came after `before`."""
        if before is None or before.bounds != self.bounds:
            return self
        counts = tuple(max(0.0, count - old) for count, old in zip(self.counts, before.counts, strict=True))
        return Spread(self.bounds, counts, max(0.0, self.total - before.total))

    def plus(self, other: "Spread") -> "Spread":
        """Both together; of other classes, the first one alone."""
        if other.bounds != self.bounds:
            return self
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Spread(self.bounds, counts, self.total + other.total)


class Histogram:
    """Counts by class.

    Args:
        bounds: upper bounds of the classes; a last class holds larger values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = np.array(bounds), np.zeros(len(bounds) + 1, np.int64), 0.0

    def observe(self, value: float) -> None:
        """One value."""
        self._counts[self._bounds.searchsorted(value)] += 1
        self._sum += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Values that were counted in the same classes already; those of another number of classes are of another version."""
        if len(counts) == len(self._counts):
            self._counts += np.array(counts)
            self._sum += total

    def spread(self) -> Spread:
        """What was counted so far."""
        return Spread(tuple(self._bounds.tolist()), tuple(self._counts.tolist()), self._sum)


class EventHistograms:
    """The histograms of the table, from events alone. Whoever reads and feeds it on two threads brings a lock.

    Attributes:
        by_name: all of them.
    """

    def __init__(self) -> None:
        self.by_name = {row.name: Histogram(BOUNDS.get(row.name, SECONDS_BOUNDS)) for row in REQUEST_HISTOGRAMS}

    def __call__(self, event: events.Event, /) -> None:
        """Takes one event."""
        match event:
            case events.StepFinished():
                if event.token_gaps:
                    self.by_name["jaxpaged_token_gap_seconds"].add(event.token_gaps, event.token_gaps_s)
                self._observe("step_duration_seconds", sum(event.parts_s))
                self._observe("step_tokens", event.num_tokens)
                self._observe("step_sequences", event.num_seqs)
            case events.RequestFirstToken():
                self._observe("time_to_first_token_seconds", event.ttft_s)
            case events.RequestQueued():
                self._observe("request_max_tokens", event.max_tokens)
            case events.RequestFinished():
                self._take_finished(event)
            case events.HttpAnswered() if event.end:
                self._observe("http_seconds", event.seconds)

    def _take_finished(self, event: events.RequestFinished) -> None:
        self._observe("request_seconds", event.e2e_s)
        self._observe("queue_seconds", event.queue_s)
        self._observe("inference_seconds", max(0.0, event.e2e_s - event.queue_s))
        self._observe("request_prompt_tokens", event.num_prompt_tokens)
        self._observe("request_computed_prompt_tokens", max(0, event.num_prompt_tokens - event.num_cached_tokens))
        self._observe("request_output_tokens", event.num_output_tokens)
        self._observe("request_longest_answer_tokens", event.num_longest_tokens)
        self._observe("request_answers", event.num_samples)
        if event.ttft_s is not None:
            rest_s = max(0.0, event.e2e_s - event.ttft_s)
            self._observe("prefill_seconds", max(0.0, event.ttft_s - event.queue_s))
            self._observe("decode_seconds", rest_s)
            if event.num_longest_tokens > 1:
                self._observe("request_time_per_output_token_seconds", rest_s / (event.num_longest_tokens - 1))

    def _observe(self, name: str, value: float) -> None:
        self.by_name[f"jaxpaged_{name}"].observe(value)
