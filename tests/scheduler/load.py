"""Traffic for the scheduler on a virtual clock, without a model: only times and counts matter here."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxpaged.config import SchedulerConfig
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason
from jaxpaged.scheduler import ScheduledStep, Scheduler, Sequence
from tests.scheduler.table_model import make_request


@dataclass(frozen=True, eq=False)
class Job:
    """One request: when it comes, and how long its answer becomes, which the scheduler cannot know."""

    arrival_s: float
    num_prompt: int
    num_output: int
    max_tokens: int
    priority: int = 0


@dataclass
class Report:
    """What came of it. Times in seconds."""

    end_s: float = 0.0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    max_running: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    page_use: list[float] = field(default_factory=list)  # of steps with a waiting queue
    ended_s: dict[Job, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.num_tokens / self.end_s


def percentile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    return sorted(values)[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)]


def burst(rng: random.Random, *, rate: float, calm_s: float, burst_s: float, factor: float = 10.0) -> Iterator[Job]:
    """Calm, a burst of `factor` times the rate, and calm again; prompts of 16 to 512 tokens, answers of 16 to 256."""
    now = 0.0
    while now < 2 * calm_s + burst_s:
        is_burst = calm_s <= now < calm_s + burst_s
        now += rng.expovariate(rate * (factor if is_burst else 1.0))
        yield Job(now, int(16 * 32 ** rng.random()), int(16 * 16 ** rng.random()), 512)


def run_jobs(
    jobs: list[Job],
    *,
    num_usable: int,
    cost: Callable[[ScheduledStep], float],
    page_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 512,
    policy: SchedulerConfig | None = None,
    token_buckets: tuple[int, ...] = (),
    depth: int = 1,
    prepare: Callable[[Scheduler], None] | None = None,
) -> Report:
    """Runs all jobs to their ends; a job's answer ends as if by a stop string.

    Args:
        cost: seconds of a step.
        depth: steps in flight while the next is scheduled.
        prepare: a last change to the scheduler.
    """
    report, now = Report(), 0.0
    scheduler = Scheduler(
        PageManager(num_usable + 1, page_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=8192,
        clock=lambda: now,
        policy=policy or SchedulerConfig(),
        token_buckets=token_buckets,
    )
    if prepare is not None:
        prepare(scheduler)
    waiting = deque(sorted(jobs, key=lambda job: job.arrival_s))
    num_added = 0
    plans: dict[Sequence, Job] = {}
    last_token_s: dict[Sequence, float] = {}
    in_flight: deque[ScheduledStep] = deque()
    while waiting or plans or in_flight:
        while waiting and waiting[0].arrival_s <= now:
            job = waiting.popleft()
            request = make_request(
                f"r{num_added}", [100 + num_added] * job.num_prompt, max_tokens=job.max_tokens, ignore_eos=True, priority=job.priority
            )
            num_added += 1
            sequence = Sequence(request)
            scheduler.add(sequence)
            plans[sequence] = job
        step = scheduler.schedule()
        if step is not None:
            in_flight.append(step)
            report.num_preemptions += len(step.preempted)
            report.max_running = max(report.max_running, scheduler.num_running)
            if scheduler.num_waiting:
                report.page_use.append(scheduler._pages.num_in_use / num_usable)
        elif not in_flight:
            if not waiting:
                raise AssertionError("there are requests and nothing runs")
            now = waiting[0].arrival_s
            continue
        if step is not None and len(in_flight) <= depth:
            continue
        done = in_flight.popleft()
        seconds = cost(done)
        now += seconds
        report.step_s.append(seconds)
        report.num_prefill_tokens += sum(row.num_tokens for row in done.rows if row.start < row.sequence.num_prompt_tokens)
        scheduler.observe(done, seconds)
        lengths = [len(row.sequence.token_ids) for row in done.rows]
        scheduler.update(done, [5] * len(done.rows))
        for row, length in zip(done.rows, lengths, strict=True):
            sequence = row.sequence
            if len(sequence.token_ids) == length:
                continue
            report.num_tokens += 1
            if sequence.num_output_tokens == 1:
                report.ttfts_s.append(now - plans[sequence].arrival_s)
            else:
                report.gaps_s.append(now - last_token_s[sequence])
            last_token_s[sequence] = now
            job = plans[sequence]
            if sequence.num_output_tokens >= job.num_output:
                scheduler.finish(sequence, FinishReason.STOP, "planned")
            if sequence.is_finished:
                del plans[sequence]
                report.ended_s[job] = now
    report.end_s = now
    scheduler.check()
    assert scheduler._pages.num_in_use == 0
    return report
