"""What the page is told, as events of one stream: the history once, then frames, each of which can be read without the one before it."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.report import as_json, remedy_of
from jaxpaged.diagnose.rules import diagnose
from jaxpaged.diagnose.scrapes import Scrape, observe, window_between
from jaxpaged.diagnose.windows import Observation, Window
from jaxpaged.histograms import Spread
from jaxpaged.pool_map import PoolCopy, PoolMap, fold
from server.dashboard.live_view import LiveView
from server.dashboard.timeline import RequestRow, cut

SPREAD_S: Final = 10.0
"""Seconds whose first tokens and gaps are one point's percentiles: a second alone has too few."""
MAX_POINTS: Final = 150
NUM_REPEATED: Final = 10
"""Points in each frame, so that a viewer who missed some frames misses no point."""
TIMELINE_S: Final = 60.0
VERDICT_S: Final = 2.0
MIN_WINDOWS: Final = 3
MAX_FINDINGS: Final = 3
SHARES: Final = (0.5, 0.95, 0.99)

type Quantiles = tuple[float, float, float] | None

_encode: Final = msgspec.json.Encoder().encode


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """What cannot be read from figures: how the server is, and its load at this moment.

    Attributes:
        phase, message: of the server, and why or how far.
        slots, names: see `Timeline.rows`.
    """

    time_s: float
    phase: str
    message: str
    running: int
    waiting: int
    pool: float
    viewers: int
    model: str
    names: Mapping[str, str]


class Point(msgspec.Struct, frozen=True):
    """One second. Rates are per second, times in seconds; None: nothing of the kind happened."""

    at_s: float
    answers: float
    prompts: float
    first_token: Quantiles
    gap: Quantiles
    running: float
    waiting: float
    pool: float
    batch: float | None
    padding: float | None
    device: float | None
    finished: float
    refused: float
    preempted: float


class Verdict(msgspec.Struct, frozen=True):
    """What the doctor says: `state` is found, healthy, idle (nothing to look at) or early (too little seen)."""

    state: str
    findings: list[dict[str, Any]] = []


class PoolBody(msgspec.Struct, frozen=True):
    """The map of the page pool, and who holds most of it."""

    num_pages: int
    page_size: int
    owners: list[tuple[int, str, int]]
    map: PoolMap


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the stream."""

    time_s: float
    phase: str
    message: str
    model: str
    facts: Mapping[str, str]
    limits: Mapping[str, float]
    running: int
    waiting: int
    pool: float
    viewers: int
    points: Sequence[Point]
    pages: PoolBody | None
    requests: Sequence[RequestRow]
    verdict: Verdict


class FrameMaker:
    """Makes frames, for any thread.

    Args:
        live: what happened.
        limits: thresholds of the verdict.
    """

    def __init__(self, live: LiveView, limits: DiagnoseConfig) -> None:
        self._live, self._limits = live, limits
        self._windows: deque[tuple[Scrape, Window]] = deque()
        """Between the scrape before and this one."""
        self._before: Scrape | None = None
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._observed = Observation(source="", windows=())
        self._verdict, self._verdict_s = Verdict("early"), float("-inf")
        self._history = b""
        self._lock = threading.Lock()
        """A viewer may leave while a frame is made, and the next one come."""

    def frame(self, present: Present, pool: PoolCopy | None) -> bytes:
        """The next event, encoded once for all who look."""
        with self._lock:
            return self._frame(present, pool)

    def _frame(self, present: Present, pool: PoolCopy | None) -> bytes:
        self._live.look(present.time_s)
        self._take_scrapes()
        if not self._verdict_s <= present.time_s < self._verdict_s + VERDICT_S:
            self._verdict, self._verdict_s = self._judge(), present.time_s
        slots = {} if pool is None else {owner.request_id: owner.slot for owner in pool.owners}
        frame = Frame(
            time_s=present.time_s,
            phase=present.phase,
            message=present.message,
            model=cut(present.model),
            facts=self._observed.facts,
            limits=self._observed.limits,
            running=present.running,
            waiting=present.waiting,
            pool=present.pool,
            viewers=present.viewers,
            points=list(self._points)[-NUM_REPEATED:],
            pages=None if pool is None else _pool_body(pool),
            requests=self._live.rows(slots, present.names, present.time_s, TIMELINE_S),
            verdict=self._verdict,
        )
        return b"event: frame\ndata: " + _encode(frame) + b"\n\n"

    def history(self, now_s: float) -> bytes:
        """The event that a new viewer gets first: all points so far; made once a second."""
        with self._lock:
            self._live.look(now_s)
            self._take_scrapes()
            if not self._history:
                self._history = b"event: history\ndata: " + _encode({"points": list(self._points)}) + b"\n\n"
            return self._history

    def _take_scrapes(self) -> None:
        scrapes = self._live.scrapes()
        if not scrapes:
            return
        if self._before is not None and scrapes[-1] is self._before:
            return
        known = next((place for place, scrape in enumerate(scrapes) if scrape is self._before), None)
        if known is None:  # the first look of all, or a clock that was set
            self._windows.clear()
            self._points.clear()
            self._before, known = scrapes[0], 0
        for scrape in scrapes[known + 1 :]:
            assert self._before is not None
            if scrape.at_s > self._before.at_s:
                self._windows.append((scrape, window_between(self._before, scrape)))
                self._points.append(self._point())
            self._before = scrape
        while self._windows and self._windows[0][0].at_s <= scrapes[0].at_s:
            self._windows.popleft()
        self._observed = observe(scrapes[-2:], "this server")
        self._history = b""

    def _point(self) -> Point:
        now = self._windows[-1][1]
        recent = [window for _, window in self._windows if window.to_s > now.to_s - SPREAD_S]
        computed, padding = now.computed or 0.0, now.padding or 0.0
        return Point(
            at_s=now.to_s,
            answers=(now.generated or 0.0) / now.seconds,
            prompts=(now.prefill or 0.0) / now.seconds,
            first_token=_quantiles(recent, "first_tokens"),
            gap=_quantiles(recent, "gaps"),
            running=now.running or 0.0,
            waiting=now.waiting or 0.0,
            pool=now.pool or 0.0,
            batch=now.rows,
            padding=padding / (computed + padding) if computed else None,
            device=None if not now.busy_s or now.device_s is None else now.device_s / now.busy_s,
            finished=(now.finished or 0.0) / now.seconds,
            refused=now.refused or 0.0,
            preempted=now.preempted or 0.0,
        )

    def _judge(self) -> Verdict:
        windows = tuple(window for _, window in self._windows)
        seen = msgspec.structs.replace(self._observed, windows=windows)
        if len(windows) < MIN_WINDOWS:
            return Verdict("early")
        findings = diagnose(seen, self._limits)
        if not findings:
            return Verdict("healthy" if seen.working else "idle")
        told = as_json(findings[:MAX_FINDINGS], seen)["findings"]
        # In words, too: the page shows texts and knows no rules.
        for finding, one in zip(findings, told, strict=False):
            one |= {"title": finding.title, "remedy": remedy_of(finding)}
        return Verdict("found", told)


def _quantiles(windows: Sequence[Window], name: str) -> Quantiles:
    whole: Spread | None = None
    for window in windows:
        spread: Spread | None = getattr(window, name)
        if spread is not None and spread.count:
            whole = spread if whole is None else whole.plus(spread)
    if whole is None:
        return None
    p50, p95, p99 = (whole.quantile(share) for share in SHARES)
    return p50, p95, p99


def _pool_body(pool: PoolCopy) -> PoolBody:
    owners = [(owner.slot, cut(owner.request_id), owner.num_pages) for owner in pool.owners]
    return PoolBody(pool.num_usable, pool.page_size, owners, fold(pool))
