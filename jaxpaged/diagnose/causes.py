"""The checks of `rules.py`: each looks for one cause in an observation, and returns the evidence and the change, or None.

What a source does not tell cannot be found in it: a missing figure is never a reason.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.findings import Change, Evidence
from jaxpaged.diagnose.windows import Observation, Window, seconds_of

MIN_STEPS: Final = 20
"""Of fewer steps no share means much."""
MIN_REQUESTS: Final = 3
SLOW_DTYPES: Final = ("float32", "float64")
SLOW_ATTENTION: Final = ("reference", "xla")
TOKEN_LIMITS: Final = ("tokens", "target_itl_s")
WAITING: Final = 2
"""One that waits may just have come."""
STRONG: Final = 0.8
"""Share of the time for which a quiet state must hold."""


class Cause(NamedTuple):
    """Why, and what to change."""

    evidence: Sequence[Evidence]
    change: Change


def compiling(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Programs after ready."""
    compiled = seen.total("compiled")
    if not compiled:
        return None
    where = _span([window for window in seen.windows if window.compiled])
    evidence = [Evidence("programs compiled after ready", compiled, "programs", 0, *where)]
    if seconds := seen.total("compile_s"):
        evidence.append(Evidence("time spent on them", seconds, "s", 0, *where))
    return Cause(evidence, Change(option="compilation.token_buckets", advice="please report it: every step should have its program"))


def stuck(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """No step although requests run."""
    span = seen.longest(lambda window: bool(window.running) and not window.is_paused and not _moves(window))
    length = seconds_of(span)
    if length < limits.stuck_s or any(window.compiled for window in seen.windows):
        return None
    evidence = [
        Evidence("time without a step", length, "s", limits.stuck_s, *_span(span)),
        Evidence("requests running meanwhile", span[-1].running or 0, "requests", 1, *_span(span)),
    ]
    return Cause(evidence, Change(option="server.watchdog_s", from_value=None, to_value=limits.stuck_s))


def slow_path(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """What was loaded is slower than what could be."""
    if seen.facts.get("platform") not in ("gpu", "cuda") or not seen.windows:
        return None
    where = _span(seen.windows)
    if seen.facts.get("dtype") in SLOW_DTYPES:
        evidence = [Evidence("bits of the model's numbers on a GPU", 32, "bits", 16, *where)]
        return Cause(evidence, Change(option="model.dtype", from_value=seen.facts["dtype"], to_value="bfloat16"))
    if seen.facts.get("attention") in SLOW_ATTENTION:
        evidence = [Evidence(f"attention by {seen.facts['attention']} instead of a kernel", 1, "", 0, *where)]
        advice = "the log's line of the start says why the GPU's kernel was not taken: it may refuse this model"
        taken = seen.facts["attention"]
        return Cause(evidence, Change(option="kernels.paged_attention", from_value=taken, to_value="mosaic_gpu", advice=advice))
    return None


def slow_clients(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Answers are done long before they are read."""
    http, whole = seen.spread("http"), seen.spread("whole")
    if http is None or whole is None or min(http.count, whole.count) < MIN_REQUESTS:
        return None
    lag_s = http.mean - whole.mean
    if lag_s < limits.slow_client_s or http.mean < 2 * whole.mean:
        return None
    where = _span([window for window in seen.windows if window.http is not None and window.http.count])
    evidence = [
        Evidence("answers take longer over HTTP than in the engine", lag_s, "s", limits.slow_client_s, *where),
        Evidence("mean time in the engine", whole.mean, "s", http.mean, *where),
    ]
    return Cause(evidence, Change(option="server.slow_client_timeout_s", from_value=None, to_value=10.0))


def pool_full(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Pages are short."""
    mean, preempted, ended = seen.mean("pool") or 0.0, seen.total("preempted") or 0, seen.total("finished") or 0
    # Who is preempted has lost its pages to somebody: the pool was full then, whatever a sample says.
    is_preempting = preempted >= MIN_REQUESTS and preempted >= limits.preempted_share * max(ended, 1) and mean >= limits.pool_low

    def waits(window: Window) -> bool:
        is_full = (window.pool or 0) >= limits.pool_full or window.held.get("pages", 0) > 0
        return is_full and (window.waiting or 0) >= WAITING

    share, held = seen.share(waits), _held(seen)
    is_for_pages = not held or held.get("pages", 0) >= limits.lasting_share * sum(held.values())
    is_waiting = share >= limits.lasting_share and is_for_pages and mean >= limits.pool_room
    if not is_preempting and (not is_waiting or overloaded(seen, limits) is not None):
        return None
    where = _span([window for window in seen.windows if waits(window) or window.preempted])
    peak = max(window.pool or 0 for window in seen.windows)
    evidence = [Evidence("most of the page pool in use", 100 * peak, "%", 100 * limits.pool_full, *where)]
    if preempted:
        evidence.append(Evidence("preemptions", preempted, "times", limits.preempted_share * ended, *where))
    if recomputed := seen.total("recomputed"):
        evidence.append(Evidence("tokens computed again", recomputed, "tokens", 0, *where))
    if share:
        evidence.append(Evidence("time with requests waiting for pages", 100 * share, "%", 100 * limits.lasting_share, *where))
    return Cause(evidence, Change(option="cache.memory", from_value=None, to_value="1.5 times the present size"))


def row_limit(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """The limit of sequences keeps requests out."""
    most = seen.limits.get("max_num_seqs")
    if not most:
        return None

    def is_so(window: Window) -> bool:
        return (
            (window.waiting or 0) >= WAITING and (window.running or 0) >= limits.rows_full * most and (window.pool or 0) < limits.pool_room
        )

    share = seen.share(is_so)
    if share < limits.lasting_share:
        return None
    span = [window for window in seen.windows if is_so(window)]
    pool = max(window.pool or 0 for window in span)
    # The option is of one copy of the model.
    each = most / seen.limits.get("num_engines", 1)
    room = each * limits.pool_full / pool if pool else 2 * each
    evidence = [
        Evidence("time at the limit of sequences with requests waiting", 100 * share, "%", 100 * limits.lasting_share, *_span(span)),
        Evidence("requests waiting", _mean(span, lambda window: window.waiting), "requests", 1, *_span(span)),
        Evidence("page pool in use", 100 * pool, "%", 100 * limits.pool_room, *_span(span)),
    ]
    to = max(int(each) + 1, math.floor(min(2 * each, room)))
    return Cause(evidence, Change(option="scheduler.max_num_seqs", from_value=int(each), to_value=to))


def batch_too_small(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """The tokens of a step keep requests out."""
    most, held = seen.limits.get("max_num_seqs"), _held(seen)
    by_tokens = sum(held.get(reason, 0) for reason in TOKEN_LIMITS)
    if not most or not held or by_tokens < limits.lasting_share * sum(held.values()):
        return None

    def is_so(window: Window) -> bool:
        return (
            (window.waiting or 0) >= WAITING and (window.running or 0) < limits.rows_full * most and (window.pool or 0) < limits.pool_room
        )

    share = seen.share(is_so)
    if share < limits.lasting_share:
        return None
    where = _span([window for window in seen.windows if is_so(window)])
    evidence = [
        Evidence("time with requests waiting for tokens of a step", 100 * share, "%", 100 * limits.lasting_share, *where),
        Evidence("admissions that ended for want of tokens", by_tokens, "times", limits.lasting_share * sum(held.values()), *where),
    ]
    tokens = seen.limits.get("max_num_batched_tokens")
    if held.get("target_itl_s", 0) > held.get("tokens", 0):
        return Cause(evidence, Change(option="scheduler.target_itl_s", from_value=None, to_value="twice the present value, or none"))
    to = int(2 * tokens) if tokens else "twice the present value"
    return Cause(evidence, Change(option="scheduler.max_num_batched_tokens", from_value=tokens and int(tokens), to_value=to))


def overloaded(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """A queue that stays, with no room for more."""
    each = seen.limits.get("max_num_seqs", 32) / seen.limits.get("num_engines", 1)

    def is_so(window: Window) -> bool:
        waiting = window.waiting or 0
        return waiting >= MIN_REQUESTS and waiting >= (window.running or 0)

    span = seen.longest(is_so)
    refused = seen.longest(lambda window: bool(window.refused) or is_so(window))
    refusals = sum(window.refused or 0 for window in refused)
    is_refusing = seconds_of(refused) >= limits.overload_s and refusals >= MIN_REQUESTS
    if seconds_of(span) < limits.overload_s and not is_refusing:
        return None
    if row_limit(seen, limits) is not None or batch_too_small(seen, limits) is not None:
        return None
    span = span if seconds_of(span) >= limits.overload_s else refused
    evidence = [
        Evidence("time with as many waiting as running", seconds_of(span), "s", limits.overload_s, *_span(span)),
        Evidence("requests waiting at the end of it", span[-1].waiting or 0, "requests", span[-1].running or 0, *_span(span)),
    ]
    if refusals:
        evidence.append(Evidence("requests refused", refusals, "requests", MIN_REQUESTS, *_span(refused)))
    return Cause(evidence, Change(option="scheduler.max_num_queued_requests", from_value=None, to_value=int(each), advice="add a replica"))


def giant_prompt(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Prompts that are rare and very long."""
    prompts, gaps, firsts = seen.spread("prompts"), seen.spread("gaps"), seen.spread("first_tokens")
    if prompts is None or prompts.count < MIN_REQUESTS or gaps is None:
        return None
    median = prompts.quantile(0.5)
    # A class counts as giant when all of it is.
    edges = (0.0, *prompts.bounds)
    giants = [(edge, count) for edge, count in zip(edges, prompts.counts, strict=True) if count and edge >= limits.giant_ratio * median]
    number = sum(count for _, count in giants)
    if not giants or number > max(2, 0.05 * prompts.count):
        return None
    worst, usual = gaps.quantile(1.0), gaps.quantile(0.5)
    first_worst, first_usual = (firsts.quantile(1.0), firsts.quantile(0.5)) if firsts else (0.0, 0.0)
    gap_stands_out = worst >= limits.gap_s and worst >= limits.gap_ratio * usual
    first_stands_out = first_worst >= limits.first_token_s and first_worst >= limits.gap_ratio * first_usual
    if not gap_stands_out and not first_stands_out:
        return None
    least = limits.giant_ratio * median
    where = _span([window for window in seen.windows if window.prompts is not None and any(_giants(window, least))])
    evidence = [
        Evidence("longest prompt is over", giants[-1][0], "tokens", limits.giant_ratio * median, *where),
        Evidence("such prompts", number, "requests", max(2, 0.05 * prompts.count), *where),
        Evidence("longest gap between tokens", worst, "s", limits.gap_ratio * usual, *where),
        Evidence("slowest first token", first_worst, "s", limits.gap_ratio * first_usual, *where),
    ]
    return Cause(evidence, Change(option="scheduler.target_itl_s", from_value=None, to_value=_rounded(max(2 * usual, 0.02))))


def _giants(window: Window, least: float) -> list[float]:
    assert window.prompts is not None
    edges = (0.0, *window.prompts.bounds)
    return [count for edge, count in zip(edges, window.prompts.counts, strict=True) if count and edge >= least]


def prefill_blocks_decode(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Gaps that are long because prompts are read between two tokens."""
    gaps, prefill, computed = seen.spread("gaps"), seen.total("prefill"), seen.total("computed")
    if gaps is None or gaps.count < MIN_STEPS or not prefill or not computed or giant_prompt(seen, limits) is not None:
        return None
    usual, bad, share = gaps.quantile(0.5), gaps.quantile(0.97), prefill / computed
    if bad < limits.gap_s or bad < limits.gap_ratio * usual or share < limits.prefill_share:
        return None
    where = _span(seen.working)
    evidence = [
        Evidence("gap between tokens, P97", bad, "s", max(limits.gap_s, limits.gap_ratio * usual), *where),
        Evidence("gap between tokens, median", usual, "s", bad / limits.gap_ratio, *where),
        Evidence("computed tokens that were of prompts", 100 * share, "%", 100 * limits.prefill_share, *where),
    ]
    return Cause(evidence, Change(option="scheduler.target_itl_s", from_value=None, to_value=_rounded(max(1.5 * usual, 0.02))))


def host_bound(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Steps wait for the host."""
    busy, device = seen.total("busy_s"), seen.total("device_s")
    if not busy or device is None or (seen.total("steps") or 0) < MIN_STEPS:
        return None
    share = (busy - device) / busy
    if share < limits.host_share or _busy_share(seen) < limits.busy_share:
        return None
    where = _span(seen.working)
    steps = seen.total("steps") or 1
    evidence = [
        Evidence("step time that is the host's", 100 * share, "%", 100 * limits.host_share, *where),
        Evidence("the host's time of a step", 1000 * (busy - device) / steps, "ms", 1000 * limits.host_share * busy / steps, *where),
    ]
    return Cause(evidence, Change(option="scheduler.async_scheduling", from_value=None, to_value="true"))


def padding_waste(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """Buckets that do not fit."""
    padding, computed, steps = seen.total("padding"), seen.total("computed"), seen.total("steps")
    if padding is None or not computed or not steps or steps < MIN_STEPS:
        return None
    share, tokens = padding / (padding + computed), computed / steps
    if share < limits.padding_share or tokens < limits.padding_tokens:
        return None
    where = _span(seen.working)
    evidence = [
        Evidence("computed places that were padding", 100 * share, "%", 100 * limits.padding_share, *where),
        Evidence("tokens of a step", tokens, "tokens", limits.padding_tokens, *where),
    ]
    fitting = 8 * math.ceil(1.1 * tokens / 8)
    return Cause(evidence, Change(option="compilation.token_buckets", from_value=None, to_value=f"the present ones and {fitting}"))


def batch_jitter(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """The number of running requests goes up and down."""
    told = [window for window in seen.windows if window.running is not None]
    mean = _mean(told, lambda window: window.running)
    if not told or mean < MIN_REQUESTS:
        return None
    low, high, swings, was_high = mean / limits.swing_ratio, mean * limits.swing_ratio, 0, False
    for window in told:
        if (window.running or 0) >= high:
            was_high = True
        elif was_high and (window.running or 0) <= low:
            swings, was_high = swings + 1, False
    if swings < limits.swings:
        return None
    where = _span(told)
    evidence = [
        Evidence("swings of the number of running requests", swings, "times", limits.swings, *where),
        Evidence("most requests running", max(window.running or 0 for window in told), "requests", high, *where),
        Evidence("fewest requests running", min(window.running or 0 for window in told), "requests", low, *where),
    ]
    return Cause(evidence, Change(advice="spread requests over time where they are sent: the same number a minute, evenly"))


def device_bound(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """The device is all that is waited for, and it is slow."""
    busy, device, gaps = seen.total("busy_s"), seen.total("device_s"), seen.spread("gaps")
    if not busy or device is None or gaps is None or (seen.total("steps") or 0) < MIN_STEPS:
        return None
    usual, share = gaps.quantile(0.5), device / busy
    if share < limits.device_share or usual < limits.gap_s or _busy_share(seen) < limits.busy_share:
        return None
    if prefill_blocks_decode(seen, limits) is not None:
        return None
    where = _span(seen.working)
    evidence = [
        Evidence("step time that is the device's", 100 * share, "%", 100 * limits.device_share, *where),
        Evidence("gap between tokens, median", usual, "s", limits.gap_s, *where),
    ]
    # More devices for one model (parallel.tensor_parallel_size) is not served yet, so it is no advice.
    return Cause(evidence, Change(advice="a smaller model or one of fewer bits, a faster device, or a replica beside it"))


def too_few_requests(seen: Observation, limits: DiagnoseConfig) -> Cause | None:
    """A busy engine with an empty batch."""
    most = seen.limits.get("max_num_seqs")
    few = max(1.0, limits.rows_low * most) if most else limits.few_requests

    def is_so(window: Window) -> bool:
        return (window.running or 0) <= few and (window.waiting or 0) < WAITING and (window.pool or 0) < limits.pool_low

    working = seen.working
    if not working or seconds_of(working) < 2 or seen.share(is_so) < STRONG or _busy_share(seen) < limits.busy_share:
        return None
    if max(window.running or 0 for window in working) == 0:
        return None
    rows = seen.mean("rows") or _mean(working, lambda window: window.running)
    if rows > few:
        return None
    where = _span(working)
    evidence = [
        Evidence("sequences of a step", rows, "sequences", few, *where),
        Evidence("page pool in use", 100 * (seen.mean("pool") or 0), "%", 100 * limits.pool_low, *where),
    ]
    to = int(most or 4 * few)
    return Cause(evidence, Change(advice=f"send up to {to} requests at the same time; one after another uses a fraction of the device"))


def _busy_share(seen: Observation) -> float:
    """Share of the time from the first work to the last in which the engine made steps; where steps are not told, in which tokens came."""
    working = seen.working
    seconds = working[-1].to_s - working[0].from_s if working else 0.0
    if not seconds:
        return 0.0
    if (busy := seen.total("busy_s")) is not None:
        return busy / seconds
    return seconds_of(window for window in working if window.generated or window.steps) / seconds


def _moves(window: Window) -> bool:
    return bool(window.steps if window.steps is not None else window.generated)


def _held(seen: Observation) -> dict[str, float]:
    held: dict[str, float] = {}
    for window in seen.windows:
        for reason, number in window.held.items():
            held[reason] = held.get(reason, 0.0) + number
    return held


def _span(windows: Sequence[Window]) -> tuple[float, float]:
    return (windows[0].from_s, windows[-1].to_s) if windows else (0.0, 0.0)


def _mean(windows: Sequence[Window], of: Callable[[Window], float | None]) -> float:
    seconds = seconds_of(windows)
    return sum(window.seconds * (of(window) or 0.0) for window in windows) / seconds if seconds else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
