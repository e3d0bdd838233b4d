"""Writes configs/grafana/jaxpaged.json, a dashboard of rows of panels, from the table below.

python scripts/make_dashboard.py
"""

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent.parent / "configs" / "grafana" / "jaxpaged.json"
SELECT = '{instance=~"$instance"}'
COLUMNS, HEIGHT = 24, 8


def rate(name: str, by: str = "", labels: str = "") -> str:
    """Growth a second of a counter."""
    selector = f'{{instance=~"$instance"{", " + labels if labels else ""}}}'
    total = f"rate(jaxpaged_{name}{selector}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


def quantiles(name: str) -> list[tuple[str, str]]:
    """P50, P95 and P99 of a histogram."""
    buckets = f"sum by (le) (rate(jaxpaged_{name}_bucket{SELECT}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {buckets})", legend) for share, legend in ((0.5, "P50"), (0.95, "P95"), (0.99, "P99"))]


def gauge(name: str, labels: str = "") -> str:
    """The present value of each server."""
    return f'jaxpaged_{name}{{instance=~"$instance"{", " + labels if labels else ""}}}'


ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Throughput",
        [
            ("Tokens per second", "short", [(rate("generation_tokens_total"), "answers"), (rate("prefill_tokens_total"), "prompts")]),
            ("Requests per second by end", "reqps", [(rate("requests_finished_total", "reason"), "{{reason}}")]),
            ("Steps per second", "ops", [(rate("steps_total"), "steps")]),
        ],
    ),
    (
        "Latency",
        [
            ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
            ("Gap between tokens", "s", quantiles("token_gap_seconds")),
            ("Time in the queue", "s", quantiles("queue_seconds")),
            ("Whole request", "s", quantiles("request_seconds")),
        ],
    ),
    (
        "Load",
        [
            (
                "Running and waiting",
                "short",
                [
                    (gauge("num_requests_running"), "running"),
                    (gauge("num_requests_waiting"), "waiting"),
                    (f"{gauge('max_num_seqs')} * {gauge('num_engines')}", "max_num_seqs"),
                ],
            ),
            ("Batch", "short", [(gauge("batch_sequences"), "sequences"), (gauge("batch_tokens"), "tokens")]),
            (
                "Padding",
                "percentunit",
                [(f"{rate('padding_tokens_total')} / ({rate('padding_tokens_total')} + {rate('computed_tokens_total')})", "padding")],
            ),
            ("What keeps requests out", "ops", [(rate("admission_decisions_total", "reason", 'reason!="none"'), "{{reason}}")]),
        ],
    ),
    (
        "Page pool",
        [
            ("In use", "percentunit", [(gauge("kv_cache_usage_ratio"), "{{instance}}")]),
            ("Pages", "short", [(gauge("kv_pages"), "{{state}}")]),
            ("Prefix hits", "percentunit", [(f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "hits")]),
            (
                "Preemptions and tokens computed again",
                "short",
                [(rate("preemptions_total"), "preemptions"), (rate("prefill_recompute_tokens_total"), "tokens computed again")],
            ),
        ],
    ),
    (
        "Where the time goes",
        [
            ("Step time by part", "percentunit", [(rate("step_seconds_total", "part"), "{{part}}")]),
            ("Step", "s", quantiles("step_duration_seconds")),
            ("Programs compiled while serving", "short", [(gauge("programs_compiled_total", 'when="after_ready"'), "{{instance}}")]),
        ],
    ),
    (
        "Errors",
        [
            ("HTTP ends", "reqps", [(rate("http_ends_total", "end"), "{{end}}")]),
            ("Errors by code", "reqps", [(rate("http_errors_total", "code"), "{{code}}")]),
            ("Rejected by the engine", "reqps", [(rate("requests_rejected_total", "reason"), "{{reason}}")]),
        ],
    ),
    (
        "Machine",
        [
            ("GPU utilisation", "percentunit", [(gauge("gpu_utilization_ratio"), "GPU {{gpu}}")]),
            (
                "GPU memory",
                "bytes",
                [(gauge("gpu_memory_used_bytes"), "GPU {{gpu}} used"), (gauge("gpu_memory_total_bytes"), "GPU {{gpu}} total")],
            ),
            ("Process memory", "bytes", [(gauge("process_memory_bytes"), "resident"), (gauge("process_peak_memory_bytes"), "most")]),
            ("Process CPU", "percentunit", [(f"rate(process_cpu_seconds_total{SELECT}[$__rate_interval])", "{{instance}}")]),
        ],
    ),
]


def panel(number: int, title: str, unit: str, targets: list[tuple[str, str]], place: tuple[int, int, int]) -> dict[str, Any]:
    """A panel over time."""
    x, y, width = place
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [{"refId": chr(65 + index), "expr": expr, "legendFormat": legend} for index, (expr, legend) in enumerate(targets)],
    }


def dashboard() -> dict[str, Any]:
    """The whole of it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y += 1
        width = COLUMNS // len(row)
        for index, (name, unit, targets) in enumerate(row):
            panels.append(panel(len(panels) + 1, name, unit, targets, (index * width, y, width)))
        y += HEIGHT
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "instance",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(jaxpaged_steps_total, instance)",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "uid": "jaxpaged",
        "title": "jaxpaged",
        "tags": ["jaxpaged", "llm"],
        "schemaVersion": 38,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
