"""Runs a workload through an engine in this process: no server, no clients."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxpaged.bench.floor import Work
from jaxpaged.bench.outcomes import Outcome
from jaxpaged.bench.workloads import Job
from jaxpaged.errors import ConfigError
from jaxpaged.events import EngineStarted, Event
from jaxpaged.request import FinishReason, Request, RequestOutput, RequestOutputKind, SamplingParams


class StartFacts:
    """A sink that remembers what the engine said when it was ready."""

    started: EngineStarted | None = None

    def __call__(self, event: Event) -> None:
        """See `Sink`."""
        if isinstance(event, EngineStarted):
            self.started = event

    def close(self) -> None:
        """See `Sink`."""


def check_fits(jobs: Sequence[Job], max_model_len: int) -> None:
    """Refuses a workload that the model cannot hold, before anything of it runs.

    Raises:
        ConfigError: a prompt and its answer are longer than the context.
    """
    longest = max(len(job.prompt) + job.num_output for job in jobs)
    if longest > max_model_len:
        raise ConfigError(f"the workload's longest request has {longest:,} tokens, the context only {max_model_len:,} (--max-model-len)")


def run(engine: Any, jobs: Sequence[Job], *, on_done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Greedy answers to their full lengths, each request added when it is due; outcomes in the order of the jobs.

    Args:
        engine: an `Engine` without other work.
        on_done: called with each outcome as it comes.
    """
    begun_s = time.perf_counter()
    # The engine's own times are monotonic ones; on one machine both clocks run alike, only differences are told.
    left = deque(jobs)
    opened: dict[str, tuple[float, list[float], int]] = {}
    done: dict[str, Outcome] = {}
    while left or engine.has_work:
        while left and begun_s + left[0].arrival_s <= time.perf_counter():
            job = left.popleft()
            opened[job.name] = (time.perf_counter(), [], len(job.prompt))
            engine.add(request_of(job))
        if not engine.has_work:
            time.sleep(max(0.0, begun_s + left[0].arrival_s - time.perf_counter()))
            continue
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            sent_s, times_s, num_prompt = opened[output.request_id]
            if output.outputs and output.outputs[0].token_ids:
                times_s.append(now_s)
            if output.finished:
                outcome = Outcome(sent_s, times_s, num_prompt, _num_tokens(output), now_s, _error(output))
                done[output.request_id] = outcome
                on_done(outcome)
    return [done[job.name] for job in jobs]


def throughput(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float]:
    """The keys of `vllm bench throughput`; requests that failed count for nothing."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_tokens = sum(outcome.num_prompt + outcome.num_output for outcome in good)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outcomes),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": num_tokens / seconds,
    }


def request_of(job: Job) -> Request:
    """A greedy request that runs to its full length."""
    params = SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    return Request(request_id=job.name, prompt_token_ids=job.prompt, params=params, seed=0, arrival_s=time.monotonic())


def work_of(started: EngineStarted, jobs: Sequence[Job]) -> Work:
    """What a workload asks of the hardware at least."""
    return Work(
        weight_bytes=started.weight_bytes,
        kv_bytes_per_token=started.pool_bytes // (started.num_pages * started.page_size),
        dtype=started.quantization or started.dtype,
        num_parallel=min(len(jobs), started.max_num_seqs),
        lengths=[(len(job.prompt), job.num_output) for job in jobs],
    )


def _num_tokens(output: RequestOutput) -> int:
    return output.metrics.num_output_tokens if output.metrics is not None else 0


def _error(output: RequestOutput) -> str:
    ended = output.outputs[0].finish_reason if output.outputs else None
    return "" if ended is FinishReason.LENGTH else output.error or f"ended with {ended}"
