"""A trace as other sources tell it: scrapes of our figures or of vLLM's, our log for people, vLLM's log."""

from collections.abc import Sequence
from datetime import UTC, datetime

from prometheus_client import generate_latest

from jaxpaged import events
from jaxpaged.diagnose.windows import Observation
from jaxpaged.log_format import Level, LogFormatter
from server.prometheus_sink import PrometheusSink


def as_scrapes(trace: Sequence[events.Event], window_s: float = 1.0, *, model_name: str | None = None) -> list[str]:
    """What /metrics would have told every second; of vLLM's names nothing without a model's name."""
    sink, texts, next_s = PrometheusSink(model_name), list[str](), trace[0].time_s
    for event in trace:
        while event.time_s >= next_s:
            texts.append(_text(sink, next_s))
            next_s += window_s
        sink(event)
    return [*texts, _text(sink, trace[-1].time_s + 0.01)]


def _text(sink: PrometheusSink, at_s: float) -> str:
    return f"jaxpaged_scrape_time_seconds {at_s!r}\n" + generate_latest(sink.registry).decode()


def of_vllm(texts: Sequence[str]) -> list[str]:
    """The same as vLLM would tell it, but for the time."""
    kept = [[line for line in text.splitlines() if line.startswith("vllm:") or line.startswith("jaxpaged_scrape")] for text in texts]
    return ["\n".join(lines) + "\n" for lines in kept]


def as_our_log(trace: Sequence[events.Event], interval_s: float = 2.0) -> str:
    """The lines at level info."""
    formatter = LogFormatter(interval_s)
    lines = [line for event in [*trace, events.EngineStopped(time_s=trace[-1].time_s)] for line in formatter.lines(event)]
    return "".join(f"{line}\n" for line in lines if line.level >= Level.INFO)


def as_vllm_log(seen: Observation) -> str:
    """Lines as vLLM writes them every few seconds."""
    lines = [
        "(EngineCore pid=1234) INFO 11-30 12:00:00 [core.py:77] Initializing a V1 LLM engine (v0.33.0) with config: model='m', "
        + ", ".join(f"{name}={value:.0f}" for name, value in seen.limits.items())
    ]
    for window in seen.windows:
        stamp = datetime.fromtimestamp(round(window.to_s), UTC).strftime("%m-%d %H:%M:%S")
        preempted = f", Preemptions: {window.preempted:.0f}" if window.preempted else ""
        if window.compiled:
            lines.append(
                f"(EngineCore pid=1234) WARNING {stamp} [jit_monitor.py:90] Triton kernel compiled during inference: f. "
                "This causes a latency spike; consider extending warmup to cover this shape/config."
            )
        lines.append(
            f"(APIServer pid=1200) INFO {stamp} [loggers.py:259] Engine 000: Avg prompt throughput: "
            f"{(window.prefill or 0) / window.seconds:.1f} tokens/s, Avg generation throughput: "
            f"{(window.generated or 0) / window.seconds:.1f} tokens/s, Running: {window.running or 0:.0f} reqs, "
            f"Waiting: {window.waiting or 0:.0f} reqs{preempted}, GPU KV cache usage: {100 * (window.pool or 0):.1f}%, "
            "Prefix cache hit rate: 0.0%"
        )
    return "\n".join(lines) + "\n"
