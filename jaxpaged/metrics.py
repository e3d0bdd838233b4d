"""Counters and gauges of one engine, from its events alone: what `get_metrics()` returns."""

import threading
from typing import Literal

import msgspec

from jaxpaged import events


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. A counter only grows; `labels` tell figures of one name apart."""

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: dict[str, str] = {}


class EngineMetrics:
    """A sink that adds up; reading it from any thread never waits for a step."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, event: events.Event, /) -> None:
        """Takes one event."""
        with self._lock:
            self._take(event)

    def close(self) -> None:
        """Keeps the figures; there is nothing to give back."""

    def snapshot(self) -> list[Metric]:
        """All figures, ordered by name."""
        with self._lock:
            counters = [
                Metric(name=name, kind="counter", value=value, labels={"reason": label} if label else {})
                for (name, label), value in sorted(self._counters.items())
            ]
            gauges = [Metric(name=name, kind="gauge", value=value) for name, value in sorted(self._gauges.items())]
        return counters + gauges

    def _count(self, name: str, amount: float = 1, label: str = "") -> None:
        key = (name, label)
        self._counters[key] = self._counters.get(key, 0) + amount

    def _take(self, event: events.Event) -> None:
        match event:
            case events.StepFinished():
                self._count("jaxpaged_steps_total")
                self._count("jaxpaged_computed_tokens_total", event.num_tokens)
                self._count("jaxpaged_padding_tokens_total", event.bucket_tokens - event.num_tokens)
                self._count("jaxpaged_preemptions_total", event.num_preempted)
                self._count("jaxpaged_prefix_cache_queries_total", event.prefix_queries_tokens)
                self._count("jaxpaged_prefix_cache_hits_total", event.prefix_hits_tokens)
                self._count("jaxpaged_prefill_recompute_tokens_total", event.prefill_recompute_tokens)
                self._take_load(event)
            case events.LoadChanged():
                self._take_load(event)
            case events.HealthChanged():
                self._gauges["jaxpaged_engine_is_paused"] = float(event.state in ("draining", "paused", "sleeping"))
                self._gauges["jaxpaged_engine_is_sleeping"] = float(event.state == "sleeping")
            case events.RequestReceived():
                self._count("jaxpaged_requests_received_total")
            case events.RequestRejected():
                self._count("jaxpaged_requests_rejected_total", label=event.code)
            case events.RequestQueued():
                self._count("jaxpaged_requests_queued_total")
                self._gauges["jaxpaged_num_requests_waiting"] = event.num_waiting
            case events.RequestFinished():
                self._count("jaxpaged_requests_finished_total", label=event.reason)
                self._count("jaxpaged_prompt_tokens_total", event.num_prompt_tokens)
                self._count("jaxpaged_generation_tokens_total", event.num_output_tokens)
            case events.ProgramCompiled():
                self._count("jaxpaged_programs_compiled_total", label="after_ready" if event.after_ready else "start")

    def _take_load(self, event: events.StepFinished | events.LoadChanged) -> None:
        self._gauges["jaxpaged_num_requests_running"] = event.num_running
        self._gauges["jaxpaged_num_requests_waiting"] = event.num_waiting
        self._gauges["jaxpaged_kv_cache_usage_ratio"] = event.num_pages_in_use / event.num_pages_total
