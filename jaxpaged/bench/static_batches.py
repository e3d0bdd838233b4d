"""The same requests through static batches and through continuous batching: same model, same kernels, same page pool.

Requests have prompts of 16 to 512 tokens and answers of 16 to 256, drawn from the seed. They arrive at random at a rate, or all at the
start.

* static: batches in order of arrival; one begins when it is full. Prompts are padded to the longest of the batch, all rows run until the
  longest answer ends, and only then do answers go out and does the next batch begin.
* continuous: the engine as it is served.
* continuous in a pool of 160 pages, of 16 tokens and of 64 (a quarter as many pages): how full a pool is that is too small.

Columns: output tokens/s (those that were asked for); mean latency; pool in use: pages that hold tokens somebody still needs, mean of
all steps, and of the steps with requests waiting; waste inside pages: slots of pages in use that hold no token; padding: share of the
computed tokens that nobody asked for, or that were computed before; preemptions.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxpaged import events
from jaxpaged.bench.in_process import StartFacts
from jaxpaged.bench.workloads import Job
from jaxpaged.config import CacheConfig, Config, LogConfig, ModelConfig, SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.host_limits import prepare_process
from jaxpaged.request import Request, RequestOutputKind, SamplingParams
from jaxpaged.start import start_engine

PROMPT_TOKENS, OUTPUT_TOKENS = (16, 512), (16, 256)
PAGE_SIZE = 16
SMALL_POOL_TOKENS = 160 * PAGE_SIZE
FIRST_PLAIN_ID, LAST_PLAIN_ID = 1000, 20000

type Row = dict[str, float | str | None]
"""Figures by column."""


@dataclass
class Measures:
    """What was seen of one way to serve."""

    title: str
    seconds: float = 0.0
    num_output_tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    use: list[float] = field(default_factory=list)
    use_while_waiting: list[float] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_needed: int = 0
    num_preempted: int = 0

    def figures(self) -> Row:
        """By column."""
        return {
            "way": self.title,
            "output_tokens_per_s": self.num_output_tokens / self.seconds,
            "mean_latency_s": statistics.fmean(self.latencies_s),
            "pool_use": statistics.fmean(self.use),
            "pool_use_while_waiting": statistics.fmean(self.use_while_waiting) if self.use_while_waiting else None,
            "waste_inside_pages": statistics.fmean(self.waste) if self.waste else None,
            "padding": 1 - self.num_needed / self.num_computed,
            "preemptions": self.num_preempted,
            "seconds": self.seconds,
        }


def jobs(count: int, seed: int, rate: float | None) -> list[Job]:
    """The requests of a seed; `rate` is in requests per second, None for all at once."""
    rng = np.random.default_rng(seed)
    arrivals = np.zeros(count) if rate is None else np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate, count))
    made = []
    for index, arrival_s in enumerate(arrivals):
        num_prompt, num_output = rng.integers(*PROMPT_TOKENS, endpoint=True), rng.integers(*OUTPUT_TOKENS, endpoint=True)
        prompt = rng.integers(FIRST_PLAIN_ID, LAST_PLAIN_ID, num_prompt).tolist()
        made.append(Job(str(index), prompt, int(num_output), float(arrival_s)))
    return made


def request_of(job: Job) -> Request:
    """A greedy request that runs to its full length."""
    params = SamplingParams(temperature=0.0, max_tokens=job.num_output, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    return Request(request_id=job.name, prompt_token_ids=job.prompt, params=params, seed=0, arrival_s=time.monotonic())


class StepLog:
    """Remembers how many tokens each step computed, padding of its bucket included."""

    def __init__(self) -> None:
        self.num_computed = self.num_preempted = 0

    def clear(self) -> None:
        """Forgets all steps."""
        self.num_computed = self.num_preempted = 0

    def close(self) -> None:
        """See `Sink`."""

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StepFinished):
            self.num_computed += event.bucket_tokens
            self.num_preempted += event.num_preempted


class Bench:
    """An engine with a pool of a given size, and what its steps computed.

    Args:
        num_pages: usable pages.
        bytes_per_token: of keys and values.
    """

    def __init__(self, model: str, *, num_pages: int, page_size: int, bytes_per_token: int) -> None:
        config = Config(
            model=ModelConfig(model=model),
            # One page more: page 0 is never given out.
            cache=CacheConfig(memory=(num_pages + 1) * page_size * bytes_per_token, page_size=page_size, enable_prefix_caching=False),
            scheduler=SchedulerConfig(),
            log=LogConfig(level="error"),
        )
        self.log = StepLog()
        self.engine = start_engine(config, (self.log,)).engine
        self.num_pages, self.page_size = num_pages, page_size
        assert self.engine.pages.num_usable == num_pages, (self.engine.pages.num_usable, num_pages)

    def close(self) -> None:
        self.engine.close()


def drive(engine: Engine, requests: list[Job], begun: float) -> Iterator[list[str]]:
    """Runs requests as they arrive, to their end; yields who ended, after each step."""
    left = deque(requests)
    while left or engine.has_work:
        while left and left[0].arrival_s <= time.monotonic() - begun:
            engine.add(request_of(left.popleft()))
        if not engine.has_work:
            time.sleep(max(0.0, left[0].arrival_s - (time.monotonic() - begun)))
            continue
        yield [output.request_id for output in engine.step()]


def run_static(bench: Bench, requests: list[Job], batch_size: int) -> Measures:
    """Padded batches, one after another. The engine computes what such a server would: equal prompts, equal answers."""
    measures = Measures(f"static, batch {batch_size}")
    bench.log.clear()
    begun = time.monotonic()
    for batch in itertools.batched(requests, batch_size):
        longest, steps = max(len(job.prompt) for job in batch), max(job.num_output for job in batch)
        is_full_s = batch[-1].arrival_s
        padded = [Job(job.name, [FIRST_PLAIN_ID] * (longest - len(job.prompt)) + job.prompt, steps, is_full_s) for job in batch]
        for _ in drive(bench.engine, padded, begun):
            by_name = {sequence.request_id: sequence for sequence in bench.engine.scheduler.sequences}
            # What an answer holds is of use until it has its tokens; the pads never are.
            held = 0
            for job in batch:
                sequence = by_name.get(job.name)
                num_done = 0 if sequence is None else sequence.num_computed_tokens - (longest - len(job.prompt))
                if 0 < num_done < len(job.prompt) + job.num_output:
                    held += bench.engine.pages.pages_for(num_done)
            measures.use.append(held / bench.num_pages)
        now_s = time.monotonic() - begun
        measures.latencies_s += [now_s - job.arrival_s for job in batch]
    return finished(measures, bench, requests, begun)


def run_continuous(bench: Bench, requests: list[Job], title: str) -> Measures:
    """The engine as it is."""
    measures = Measures(title)
    bench.log.clear()
    arrivals, begun = {job.name: job.arrival_s for job in requests}, time.monotonic()
    for ended in drive(bench.engine, requests, begun):
        now_s = time.monotonic() - begun
        measures.latencies_s += [now_s - arrivals[name] for name in ended]
        pages, scheduler = bench.engine.pages, bench.engine.scheduler
        use = pages.num_in_use / bench.num_pages
        measures.use.append(use)
        if scheduler.num_waiting:
            measures.use_while_waiting.append(use)
        if pages.num_in_use:
            held = sum(sequence.num_computed_tokens for sequence in scheduler.sequences)
            measures.waste.append(1 - held / (pages.num_in_use * bench.page_size))
    return finished(measures, bench, requests, begun)


def finished(measures: Measures, bench: Bench, requests: list[Job], begun: float) -> Measures:
    """Adds what is known at the end."""
    measures.seconds = time.monotonic() - begun
    measures.num_output_tokens = sum(job.num_output for job in requests)
    measures.num_computed, measures.num_preempted = bench.log.num_computed, bench.log.num_preempted
    # The last token of an answer is never computed on.
    measures.num_needed = sum(len(job.prompt) + job.num_output - 1 for job in requests)
    return measures


def table(rows: list[Row]) -> str:
    """The figures as a Markdown table."""

    def share(value: float | str | None) -> str:
        return "" if value is None else f"{value:.1%}"

    lines = [
        "| | output tokens/s | mean latency | pool in use | while requests wait | waste inside pages | padding | preemptions |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shares = " | ".join(share(row[name]) for name in ("pool_use", "pool_use_while_waiting", "waste_inside_pages", "padding"))
        lines.append(
            f"| {row['way']} | {row['output_tokens_per_s']:.1f} | {row['mean_latency_s']:.1f} s | {shares} | {row['preemptions']} |"
        )
    return "\n".join(lines)


def compare(model: str, count: int = 64, *, rate: float | None = None, seed: int = 0, static_batch: int = 16) -> list[Row]:
    """All ways, one row each: static, continuous, and continuous in two pools that are too small."""
    requests = jobs(count, seed, rate)
    prepare_process(Config())

    # What a page of this model takes.
    facts = StartFacts()
    probe = start_engine(Config(model=ModelConfig(model=model), log=LogConfig(level="error")), (facts,)).engine
    assert facts.started is not None
    bytes_per_token = facts.started.pool_bytes // (facts.started.num_pages * facts.started.page_size)
    probe.close()

    # Memory for one static batch of the longest prompts and answers, and the engine gets the same.
    longest = -(-(PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]) // PAGE_SIZE)
    rows = []
    bench = Bench(model, num_pages=static_batch * longest, page_size=PAGE_SIZE, bytes_per_token=bytes_per_token)
    rows.append(run_static(bench, requests, static_batch).figures())
    rows.append(run_continuous(bench, requests, "continuous").figures())
    bench.close()
    for page_size in (PAGE_SIZE, 64):
        num_pages = SMALL_POOL_TOKENS // page_size
        bench = Bench(model, num_pages=num_pages, page_size=page_size, bytes_per_token=bytes_per_token)
        rows.append(run_continuous(bench, requests, f"continuous, {num_pages} pages of {page_size}").figures())
        bench.close()
    return rows


def ratio(rows: list[Row]) -> float:
    """Tokens/s of continuous batching over those of static batches."""
    static, continuous = (float(row["output_tokens_per_s"] or 0) for row in rows[:2])
    return continuous / static
