"""Counters and gauges of one engine, from its events alone: what `get_metrics()` returns."""

import threading
from typing import Final, Literal

import msgspec

from jaxpaged import events
from jaxpaged.metric_table import ENGINE_COUNTERS

STEP_PARTS = ("schedule", "pack", "device", "update", "detokenize")
FINISH_REASONS = ("stop", "length", "abort", "error")
PAGE_STATES = ("in_use", "cached", "free")
WHENS = ("start", "after_ready")
KNOWN_LABELS = {
    "jaxpaged_step_seconds_total": ("part", STEP_PARTS),
    "jaxpaged_requests_finished_total": ("reason", FINISH_REASONS),
    "jaxpaged_programs_compiled_total": ("when", WHENS),
}
"""Counters whose labels are known from the beginning; they and those without labels begin at 0, so that a rate sees the first one."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. A counter only grows; `labels` tell figures of one name apart."""

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: dict[str, str] = {}


type _Labels = tuple[tuple[str, str], ...]

STEP_KEYS: Final[tuple[tuple[str, _Labels], ...]] = (
    ("jaxpaged_steps_total", ()),
    *(("jaxpaged_step_seconds_total", (("part", part),)) for part in STEP_PARTS),
    ("jaxpaged_computed_tokens_total", ()),
    ("jaxpaged_padding_tokens_total", ()),
    ("jaxpaged_prefill_tokens_total", ()),
    ("jaxpaged_decode_tokens_total", ()),
    ("jaxpaged_generation_tokens_total", ()),
    ("jaxpaged_preemptions_total", ()),
    ("jaxpaged_prefix_cache_queries_total", ()),
    ("jaxpaged_prefix_cache_hits_total", ()),
    ("jaxpaged_prefill_recompute_tokens_total", ()),
)
"""Counters that every step moves, in the order of the amounts in `EngineMetrics._take_step`."""


class EngineMetrics:
    """A sink that adds up; reading it from any thread never waits for a step.

    A counter never falls: an amount below 0 is left out, counted in `jaxpaged_metric_faults_total`, and said once for each counter by
    raising ValueError after the event was taken, which whoever gives events to several sinks turns into a `SinkDropped`.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, _Labels], float] = {(row.name, ()): 0.0 for row in ENGINE_COUNTERS if not row.labels}
        for name, (label, values) in KNOWN_LABELS.items():
            self._counters.update({(name, ((label, value),)): 0.0 for value in values})
        self._gauges: dict[tuple[str, _Labels], float] = {}
        self._last_step: events.StepFinished | None = None
        self._last_load: events.StepFinished | events.LoadChanged | None = None
        self._num_waiting: int | None = None
        """Since the last event that told a load."""
        self._told_faults: set[str] = set()
        self._fault = ""
        self._lock = threading.Lock()

    def __call__(self, event: events.Event, /) -> None:
        """Takes one event. Raises ValueError when a counter would fall for the first time."""
        with self._lock:
            self._take(event)
            fault, self._fault = self._fault, ""
        if fault:
            raise ValueError(fault)

    def close(self) -> None:
        """Keeps the figures; there is nothing to give back."""

    def snapshot(self) -> list[Metric]:
        """All figures, counters first, each kind ordered by name."""
        with self._lock:
            self._settle()
            counters, gauges = sorted(self._counters.items()), sorted(self._gauges.items())
        return [
            *(Metric(name=name, kind="counter", value=value, labels=dict(labels)) for (name, labels), value in counters),
            *(Metric(name=name, kind="gauge", value=value, labels=dict(labels)) for (name, labels), value in gauges),
        ]

    def _count(self, name: str, amount: float = 1, labels: _Labels = ()) -> None:
        if amount < 0:
            self._counters["jaxpaged_metric_faults_total", ()] += 1
            if name not in self._told_faults:
                self._told_faults.add(name)
                self._fault = f"{name} would have fallen by {-amount:g}; the amount was left out"
            return
        key = (name, labels)
        self._counters[key] = self._counters.get(key, 0.0) + amount

    def _set(self, name: str, value: float, labels: _Labels = ()) -> None:
        self._gauges[name, labels] = float(value)

    def _take(self, event: events.Event) -> None:
        match event:
            case events.StepFinished():
                self._take_step(event)
            case events.LoadChanged():
                self._last_load, self._num_waiting = event, None
            case events.HealthChanged():
                self._set("jaxpaged_engine_is_paused", event.state in ("draining", "paused", "sleeping"))
                self._set("jaxpaged_engine_is_sleeping", event.state == "sleeping")
            case events.RequestReceived():
                self._count("jaxpaged_requests_received_total")
            case events.RequestRejected():
                self._count("jaxpaged_requests_rejected_total", labels=(("reason", event.code),))
            case events.RequestQueued():
                self._count("jaxpaged_requests_queued_total")
                self._num_waiting = event.num_waiting
            case events.RequestPreempted():
                self._count("jaxpaged_preempted_tokens_total", event.num_computed_tokens)
            case events.RequestFinished():
                self._count("jaxpaged_requests_finished_total", labels=(("reason", event.reason),))
                self._count("jaxpaged_prompt_tokens_total", event.num_prompt_tokens)
                self._count("jaxpaged_prompt_tokens_cached_total", event.num_cached_tokens)
            case events.ProgramCompiled():
                self._count("jaxpaged_programs_compiled_total", labels=(("when", WHENS[event.after_ready]),))
                if event.after_ready:
                    self._count("jaxpaged_compile_after_ready_seconds_total", event.seconds)
            case events.SinkDropped():
                self._count("jaxpaged_events_lost_total", event.count, (("sink", event.sink),))
            case events.EngineStarted():
                self._take_start(event)

    def _take_start(self, event: events.EngineStarted) -> None:
        self._set("jaxpaged_num_engines", event.num_engines)
        self._set("jaxpaged_max_num_seqs", event.max_num_seqs)
        self._set("jaxpaged_max_num_batched_tokens", event.max_num_batched_tokens)
        self._set("jaxpaged_max_model_len", event.max_model_len)
        self._set("jaxpaged_kv_pool_bytes", event.pool_bytes)
        self._set("jaxpaged_kv_page_tokens", event.page_size)
        self._set("jaxpaged_weight_bytes", event.weight_bytes)
        names = ("model", "dtype", "platform", "attention", "quantization")
        self._set("jaxpaged_engine_info", 1, tuple((name, getattr(event, name)) for name in names))

    def _take_step(self, event: events.StepFinished) -> None:
        amounts = (
            1,
            *event.parts_s,
            event.num_tokens,
            event.bucket_tokens - event.num_tokens,
            event.num_prefill_tokens,
            event.num_decode_tokens,
            event.num_output_tokens,
            event.num_preempted,
            event.prefix_queries_tokens,
            event.prefix_hits_tokens,
            event.prefill_recompute_tokens,
        )
        # On the way of every step: no look at each amount unless one is wrong.
        if min(amounts) >= 0:
            counters = self._counters
            for key, amount in zip(STEP_KEYS, amounts, strict=True):
                counters[key] += amount
        else:
            for (name, labels), amount in zip(STEP_KEYS, amounts, strict=True):
                self._count(name, amount, labels)
        if event.decision:
            self._count("jaxpaged_admission_decisions_total", labels=(("reason", event.admission_limit or "none"),))
        self._last_step = self._last_load = event
        self._num_waiting = None

    def _take_load(self, event: events.StepFinished | events.LoadChanged) -> None:
        """Shows the load of the last event that told one."""
        self._set("jaxpaged_num_requests_running", event.num_running)
        self._set("jaxpaged_num_requests_waiting", event.num_waiting)
        self._set("jaxpaged_kv_cache_usage_ratio", event.num_pages_in_use / max(1, event.num_pages_total))
        num_free = event.num_pages_total - event.num_pages_in_use - event.num_pages_cached
        for state, number in zip(PAGE_STATES, (event.num_pages_in_use, event.num_pages_cached, num_free), strict=True):
            self._set("jaxpaged_kv_pages", number, (("state", state),))

    def _settle(self) -> None:
        """Gauges are made of the last event when somebody looks, and not at each step."""
        if (step := self._last_step) is not None:
            self._set("jaxpaged_batch_sequences", step.num_seqs)
            self._set("jaxpaged_batch_tokens", step.num_tokens)
            self._set("jaxpaged_padding_ratio", (step.bucket_tokens - step.num_tokens) / max(1, step.bucket_tokens))
        if (load := self._last_load) is not None:
            self._take_load(load)
        if (waiting := self._num_waiting) is not None:
            self._set("jaxpaged_num_requests_waiting", waiting)
