"""What became of the requests of a benchmark, and the figures of them all, under the names of `vllm bench serve`."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpaged.errors import ConfigError

WIDTH = 50
METRICS = {
    "ttft": ("ttft", "TTFT", "Time to First Token"),
    "tpot": ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("itl", "ITL", "Inter-token Latency"),
    "e2el": ("e2el", "E2EL", "End-to-end Latency"),
}
"""By vLLM's short name: key in the JSON, letters in the table, title."""

FAILED_SHARE = 0.01
"""From this share of failed requests on a benchmark has failed."""


class Outcome(NamedTuple):
    """One request. Times are seconds on one clock.

    Attributes:
        sent_s: when it was sent.
        times_s: when each event with tokens came, the first one's first.
        num_prompt: tokens, by the server's own count.
        num_output: tokens, by the server's own count (`usage`).
        ended_s: when the answer's last byte came.
        error: why it failed; empty: it did not.
    """

    sent_s: float
    times_s: list[float]
    num_prompt: int
    num_output: int
    ended_s: float
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return (self.times_s[0] if self.times_s else self.ended_s) - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds for a token after the first; 0 for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else 0.0


type Goals = dict[str, float]
"""Short name of a metric -> milliseconds that a good request keeps."""


def read_goals(words: Iterable[str]) -> Goals:
    """`ttft:200 tpot:50` -> milliseconds by name.

    Raises:
        ConfigError: not NAME:MILLISECONDS, or a name other than ttft, tpot and e2el.
    """
    goals: Goals = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if name not in ("ttft", "tpot", "e2el") or not limit_ms >= 0:
            raise ConfigError(f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {word[:80]!r}")
        goals[name] = limit_ms
    return goals


def figures(
    outcomes: Sequence[Outcome], seconds: float, *, percentiles: Sequence[float] = (99,), goals: Goals | None = None
) -> dict[str, float | int | None]:
    """The figures of a run; keys, units and definitions as `vllm bench serve` writes them.

    Args:
        seconds: of the whole run.
        percentiles: 0 to 100; each gives keys such as `p99_ttft_ms`.
        goals: None: no goodput.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input, num_output = sum(outcome.num_prompt for outcome in good), sum(outcome.num_output for outcome in good)
    made: dict[str, float | int | None] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": None if goals is None else sum(_keeps(outcome, goals) for outcome in good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_open(good),
    }
    for name, values in _values_ms(good).items():
        # Numbers of no request are no zeros.
        made[f"mean_{name}_ms"] = float(np.mean(values)) if values else None
        made[f"median_{name}_ms"] = float(np.median(values)) if values else None
        made[f"std_{name}_ms"] = float(np.std(values)) if values else None
        for percentile in percentiles:
            made[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile)) if values else None
    return made


def table(made: dict[str, float | int | None], *, rate: float = math.inf, max_concurrency: int | None = None) -> str:
    """The figures as `vllm bench serve` prints them."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def line(title: str, value: float | int | str | None) -> None:
        if value is not None:
            lines.append(f"{title:<40} {value:<10.2f}" if isinstance(value, float) else f"{title:<40} {value:<10}")

    line("Successful requests:", made["completed"])
    line("Failed requests:", made["failed"])
    line("Maximum request concurrency:", max_concurrency)
    line("Request rate configured (RPS):", None if math.isinf(rate) else float(rate))
    line("Benchmark duration (s):", made["duration"])
    line("Total input tokens:", made["total_input_tokens"])
    line("Total generated tokens:", made["total_output_tokens"])
    line("Request throughput (req/s):", made["request_throughput"])
    line("Request goodput (req/s):", made["request_goodput"])
    line("Output token throughput (tok/s):", made["output_throughput"])
    line("Peak output token throughput (tok/s):", made["max_output_tokens_per_s"])
    line("Peak concurrent requests:", made["max_concurrent_requests"])
    line("Total token throughput (tok/s):", made["total_token_throughput"])
    for name, letters, title in METRICS.values():
        lines.append(f"{title:-^{WIDTH}}")
        for key, value in made.items():
            kind, _, rest = key.partition("_")
            if rest == f"{name}_ms" and kind != "std":
                line(f"{kind.capitalize()} {letters} (ms):", value)
    lines.append("=" * WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def has_failed(outcomes: Sequence[Outcome]) -> bool:
    """Whether so many requests failed that the figures say nothing."""
    return sum(bool(outcome.error) for outcome in outcomes) >= FAILED_SHARE * len(outcomes)


def _values_ms(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """Every metric's values, one a request, for ITL one a gap."""
    return {
        "ttft": [1000 * outcome.ttft_s for outcome in good],
        "tpot": [1000 * outcome.tpot_s for outcome in good if outcome.num_output > 1],
        "itl": [1000 * (after - before) for outcome in good for before, after in itertools.pairwise(outcome.times_s)],
        "e2el": [1000 * outcome.e2el_s for outcome in good],
    }


def _keeps(outcome: Outcome, goals: Goals) -> bool:
    values_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.e2el_s}
    return all(1000 * values_s[name] <= limit_ms for name, limit_ms in goals.items())


def _peak_tokens(good: Sequence[Outcome]) -> float:
    """Output tokens in the best whole second of the run; an answer's tokens are spread evenly over its events."""
    if not good:
        return 0.0
    begun_s = min(outcome.sent_s for outcome in good)
    buckets: dict[int, float] = {}
    for outcome in good:
        for time_s in outcome.times_s:
            second = int(time_s - begun_s)
            buckets[second] = buckets.get(second, 0.0) + outcome.num_output / len(outcome.times_s)
    return max(buckets.values(), default=0.0)


def _peak_open(good: Sequence[Outcome]) -> int:
    """The most requests that were open at once."""
    changes = sorted([(outcome.sent_s, 1) for outcome in good] + [(outcome.ended_s, -1) for outcome in good])
    return max(itertools.accumulate(change for _, change in changes), default=0)
