"""Events of a short made-up run, with times that can be worked out on paper."""

from typing import Any

from jaxpaged import events
from jaxpaged.events import Event

START_S = 1_764_472_392.0
"""2025-11-30T03:13:12Z."""


def step(at_s: float, number: int = 1, **changes: Any) -> events.StepFinished:
    """A step that ends `at_s` seconds after START_S: 12 generated tokens of 12 sequences in a bucket of 16, 10 ms."""
    values: dict[str, Any] = {
        "step": number,
        "bucket_tokens": 16,
        "num_tokens": 12,
        "num_prefill_tokens": 0,
        "num_decode_tokens": 12,
        "num_seqs": 12,
        "num_running": 12,
        "num_waiting": 3,
        "num_preempted": 0,
        "num_pages_total": 1000,
        "num_pages_in_use": 452,
        "num_pages_cached": 20,
        "schedule_s": 0.001,
        "pack_s": 0.001,
        "device_s": 0.006,
        "update_s": 0.001,
        "detokenize_s": 0.001,
    }
    return events.StepFinished(time_s=START_S + at_s, **{**values, **changes})


def scheduled(request_id: str, at_s: float = 0.0, **changes: Any) -> events.RequestScheduled:
    values: dict[str, Any] = {"num_prompt_tokens": 120, "num_cached_tokens": 96, "num_pages": 8, "queue_s": 0.0}
    return events.RequestScheduled(time_s=START_S + at_s, request_id=request_id, **{**values, **changes})


def finished(request_id: str, at_s: float = 1.0, **changes: Any) -> events.RequestFinished:
    values: dict[str, Any] = {
        "reason": "stop",
        "num_prompt_tokens": 120,
        "num_output_tokens": 41,
        "num_cached_tokens": 96,
        "num_pages_freed": 11,
        "num_preemptions": 0,
        "ttft_s": 0.2,
        "e2e_s": 1.0,
        "queue_s": 0.0,
    }
    return events.RequestFinished(time_s=START_S + at_s, request_id=request_id, **{**values, **changes})


def short_run() -> list[Event]:
    """Start, one request over 12 s, stop."""
    run: list[Event] = [
        events.HealthChanged(time_s=START_S, state="starting"),
        events.PhaseChanged(time_s=START_S, phase="compile", message="compiling the step programs", total=3),
        events.ProgramCompiled(time_s=START_S + 0.1, bucket_tokens=2, seconds=0.1, from_cache=True),
        events.PhaseChanged(time_s=START_S + 0.1, phase="compile", message="", done=1, total=3),
        events.ProgramCompiled(time_s=START_S + 0.2, bucket_tokens=4, seconds=0.1, from_cache=True),
        events.PhaseChanged(time_s=START_S + 0.2, phase="compile", message="", done=2, total=3),
        events.ProgramCompiled(time_s=START_S + 1.5, bucket_tokens=8, seconds=1.3, from_cache=False),
        events.PhaseChanged(time_s=START_S + 1.5, phase="compile", message="", done=3, total=3),
        events.RequestReceived(time_s=START_S + 2, request_id="req-1", num_prompt_tokens=120),
        events.RequestQueued(time_s=START_S + 2, request_id="req-1", num_prompt_tokens=120, max_tokens=41, num_waiting=0),
        scheduled("req-1", 2),
        events.RequestFirstToken(time_s=START_S + 2.2, request_id="req-1", ttft_s=0.2),
    ]
    run += [step(2.2 + i / 10, i, num_running=1, num_waiting=0) for i in range(120)]
    run += [finished("req-1", 14.3), events.EngineStopped(time_s=START_S + 15)]
    return run


def started(**changes: Any) -> events.EngineStarted:
    """An engine is ready."""
    values: dict[str, Any] = {
        "model": "smollm2-135m",
        "dtype": "float32",
        "num_pages": 1000,
        "page_size": 16,
        "pool_bytes": 2**29,
        "weight_bytes": 2**28,
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "seconds": 3.0,
        "num_programs": 3,
        "platform": "cpu",
    }
    return events.EngineStarted(time_s=START_S, **{**values, **changes})
