"""Figures at a moment, under our names or vLLM's, and the window between two such moments."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from jaxpaged.diagnose.windows import Observation, Window
from jaxpaged.histograms import Spread

type Key = tuple[str, tuple[tuple[str, str], ...]]

# Ours first, then vLLM's present name, then those of its older versions.
GAUGES: Final = {
    "running": ("jaxpaged_num_requests_running", "vllm:num_requests_running"),
    "waiting": ("jaxpaged_num_requests_waiting", "vllm:num_requests_waiting"),
    "pool": ("jaxpaged_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
COUNTERS: Final = {
    "steps": ("jaxpaged_steps_total", "vllm:iteration_tokens_total_count"),
    "computed": ("jaxpaged_computed_tokens_total", "vllm:iteration_tokens_total_sum"),
    "padding": ("jaxpaged_padding_tokens_total",),
    "prefill": ("jaxpaged_prefill_tokens_total", "vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    "generated": ("jaxpaged_generation_tokens_total", "vllm:generation_tokens_total", "vllm:generation_tokens"),
    "preempted": ("jaxpaged_preemptions_total", "vllm:num_preemptions_total", "vllm:num_preemptions"),
    "recomputed": ("jaxpaged_prefill_recompute_tokens_total",),
    "busy_s": ("jaxpaged_step_seconds_total",),
    "compile_s": ("jaxpaged_compile_after_ready_seconds_total",),
    "finished": ("jaxpaged_requests_finished_total", "vllm:request_success_total", "vllm:request_success"),
}
LABELLED: Final = {
    "device_s": ("jaxpaged_step_seconds_total", "part", ("device",)),
    "compiled": ("jaxpaged_programs_compiled_total", "when", ("after_ready",)),
    "refused": ("jaxpaged_requests_rejected_total", "reason", ("queue_full",)),
}
HISTOGRAMS: Final = {
    "first_tokens": ("jaxpaged_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "gaps": ("jaxpaged_token_gap_seconds", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "prompts": ("jaxpaged_request_prompt_tokens", "vllm:request_prompt_tokens"),
    "whole": ("jaxpaged_request_seconds", "vllm:e2e_request_latency_seconds"),
    "http": ("jaxpaged_http_seconds",),
    "rows": ("jaxpaged_step_sequences",),
}
HELD = "jaxpaged_admission_decisions_total"
LIMITS: Final = {
    "max_num_seqs": "jaxpaged_max_num_seqs",
    "max_num_batched_tokens": "jaxpaged_max_num_batched_tokens",
    "num_engines": "jaxpaged_num_engines",
}
ENGINE_INFO = "jaxpaged_engine_info"
PAUSED = "jaxpaged_engine_is_paused"


class Scrape(msgspec.Struct, frozen=True):
    """Figures at a moment.

    Attributes:
        at_s: when.
        values: (name, labels) -> value; of histograms only those that are told as sums and counts.
        spreads: histogram -> its values so far, of all labels together.
    """

    at_s: float
    values: Mapping[Key, float]
    spreads: Mapping[str, Spread]


def observe(scrapes: Sequence[Scrape], source: str, *, is_dated: bool = True) -> Observation:
    """Windows between scrapes that follow each other, and what the last one says of limits."""
    windows = tuple(window_between(before, after) for before, after in zip(scrapes, scrapes[1:], strict=False) if after.at_s > before.at_s)
    limits, facts = dict[str, float](), dict[str, str]()
    if scrapes:
        last = scrapes[-1]
        limits = {name: value for name, key in LIMITS.items() if (value := _gauge(last, (key,))) is not None}
        if "max_num_seqs" in limits:
            limits["max_num_seqs"] *= limits.get("num_engines", 1)
        facts = {name: text for (key, labels), _ in last.values.items() if key == ENGINE_INFO for name, text in labels}
    return Observation(source=source, windows=windows, limits=limits, facts=facts, is_dated=is_dated)


def window_between(before: Scrape, after: Scrape) -> Window:
    """What happened between two moments. A counter that fell, as at a restart, counts from 0."""
    told: dict[str, Any] = {name: _gauge(after, names) for name, names in GAUGES.items()}
    told["pool"] = _mean_gauge(after, GAUGES["pool"])
    told |= {name: _growth(before, after, names) for name, names in COUNTERS.items()}
    told |= {name: _labelled_growth(before, after, *where) for name, where in LABELLED.items()}
    told |= {name: _new(before, after, names) for name, names in HISTOGRAMS.items()}
    rows: Spread | None = told.pop("rows")
    held = {
        dict(labels)["reason"]: value - before.values.get((key, labels), 0.0)
        for (key, labels), value in after.values.items()
        if key == HELD
    }
    return Window(
        from_s=before.at_s,
        to_s=after.at_s,
        is_paused=bool(_gauge(after, (PAUSED,))),
        rows=rows.mean if rows is not None and rows.count else None,
        held={reason: number for reason, number in held.items() if number > 0},
        **told,
    )


def _sums(scrape: Scrape, name: str) -> list[float]:
    return [value for (key, _), value in scrape.values.items() if key == name]


def _gauge(scrape: Scrape, names: Iterable[str]) -> float | None:
    for name in names:
        if values := _sums(scrape, name):
            return sum(values)
    return None


def _mean_gauge(scrape: Scrape, names: Iterable[str]) -> float | None:
    """A share, of several engines that tell one each."""
    for name in names:
        if values := _sums(scrape, name):
            return sum(values) / len(values)
    return None


def _growth(before: Scrape, after: Scrape, names: Iterable[str]) -> float | None:
    for name in names:
        if values := _sums(after, name):
            now, then = sum(values), sum(_sums(before, name))
            return now - then if now >= then else now
    return None


def _labelled_growth(before: Scrape, after: Scrape, name: str, label: str, wanted: Sequence[str]) -> float | None:
    if not _sums(after, name) and not any(key.startswith("jaxpaged_") for key, _ in after.values):
        return None

    def total(scrape: Scrape) -> float:
        return sum(value for (key, labels), value in scrape.values.items() if key == name and dict(labels).get(label) in wanted)

    return max(0.0, total(after) - total(before))


def _new(before: Scrape, after: Scrape, names: Iterable[str]) -> Spread | None:
    for name in names:
        if name in after.spreads:
            return after.spreads[name].since(before.spreads.get(name))
    return None
