"""What every source is turned into: windows of time, each with what happened in it. None: the source does not tell.

Figures of a server, and an event log that is replayed into the same figures, come as scrapes; a window is what lies between two.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from jaxpaged.histograms import Spread


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of time.

    Attributes:
        from_s, to_s: seconds since 1970, or since the first sample where a source has no dates.
        running, waiting: requests, at its end.
        pool: share of pages in use, at its end.
        is_paused: whether an operator holds the engine.
        steps: steps that ended in it.
        busy_s, device_s: seconds of those steps, and of waiting for the device.
        rows: sequences per step.
        computed, padding, prefill, generated: tokens.
        preempted, recomputed: times, tokens.
        held: admission decisions, by what kept the next request out.
        compiled, compile_s: programs made after the engine was ready, and seconds.
        finished, refused: requests.
        first_tokens, gaps, prompts, whole, http: spread of seconds to first tokens, between tokens, of prompt tokens, of whole requests in
            the engine and over HTTP.
    """

    from_s: float
    to_s: float
    running: float | None = None
    waiting: float | None = None
    pool: float | None = None
    is_paused: bool = False
    steps: float | None = None
    busy_s: float | None = None
    device_s: float | None = None
    rows: float | None = None
    computed: float | None = None
    padding: float | None = None
    prefill: float | None = None
    generated: float | None = None
    preempted: float | None = None
    recomputed: float | None = None
    held: Mapping[str, float] = {}
    compiled: float | None = None
    compile_s: float | None = None
    finished: float | None = None
    refused: float | None = None
    first_tokens: Spread | None = None
    gaps: Spread | None = None
    prompts: Spread | None = None
    whole: Spread | None = None
    http: Spread | None = None

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.to_s - self.from_s

    @property
    def has_work(self) -> bool:
        """Whether anything ran, waited or was computed."""
        return bool(self.running or self.waiting or self.steps or self.generated)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a source says.

    Attributes:
        source: what it is, for people.
        windows: in order of time.
        limits: max_num_seqs (of all copies of the model together), max_num_batched_tokens (of one), num_engines (copies) where told.
        facts: model, dtype, platform, attention where told.
        is_dated: whether times are dates.
    """

    source: str
    windows: tuple[Window, ...]
    limits: Mapping[str, float] = {}
    facts: Mapping[str, str] = {}
    is_dated: bool = True

    @property
    def working(self) -> list[Window]:
        """Windows with work."""
        return [window for window in self.windows if window.has_work]

    def total(self, name: str) -> float | None:
        """Sum of a figure over all windows that tell it; None: none does."""
        values = [value for window in self.windows if (value := getattr(window, name)) is not None]
        return sum(values) if values else None

    def spread(self, name: str) -> Spread | None:
        """All values of a histogram; None: no window tells any."""
        whole: Spread | None = None
        for window in self.windows:
            spread: Spread | None = getattr(window, name)
            if spread is not None:
                whole = spread if whole is None else whole.plus(spread)
        return whole if whole is not None and whole.count else None

    def mean(self, name: str) -> float | None:
        """Mean of a figure over the windows with work that tell it, by their length."""
        told = [(window.seconds, value) for window in self.working if (value := getattr(window, name)) is not None]
        seconds = sum(length for length, _ in told)
        return sum(length * value for length, value in told) / seconds if seconds else None

    def share(self, is_so: Callable[[Window], bool]) -> float:
        """Share of the time with work for which something is so."""
        working = self.working
        seconds = sum(window.seconds for window in working)
        return sum(window.seconds for window in working if is_so(window)) / seconds if seconds else 0.0

    def first(self, is_so: Callable[[Window], bool]) -> Window:
        """The first window in which something is so; the first of all if it never is."""
        return next((window for window in self.windows if is_so(window)), self.windows[0])

    def spans(self, is_so: Callable[[Window], bool]) -> Iterator[list[Window]]:
        """Windows in a row in which something is so."""
        span: list[Window] = []
        for window in self.windows:
            if is_so(window):
                span.append(window)
            elif span:
                yield span
                span = []
        if span:
            yield span

    def longest(self, is_so: Callable[[Window], bool]) -> list[Window]:
        """The longest such span; empty: there is none."""
        return max(self.spans(is_so), key=seconds_of, default=[])


def seconds_of(span: Iterable[Window]) -> float:
    """How long windows are together."""
    return sum(window.seconds for window in span)
