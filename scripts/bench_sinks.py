"""Times what observation costs a step, in CPU time of the engine's thread: making the step's event, and giving it to every sink.

    python scripts/bench_sinks.py [--rounds 7] [--steps 400]

An engine over a runner that answers at once decodes 32 and 256 sequences with all sinks that a server has: a log for people, an event log,
figures under both names, health, the live page's view. Of the CPU time of a step, what its event and they take; the median of the rounds.
Then what somebody who looks at the live page costs the engine's thread: a copy of the page tables, at most four times a second.
The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.config import LogConfig
from jaxpaged.events import Sink
from jaxpaged.metrics import EngineMetrics
from jaxpaged.page_manager import PageManager
from jaxpaged.pool_map import copy_pool
from jaxpaged.request import Request, SamplingParams
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence
from jaxpaged.sinks import FanOut, open_log
from server.dashboard.live_view import LiveView
from server.dashboard.viewers import FRAME_S
from server.phase import EngineProgress
from server.prometheus_sink import PrometheusSink
from tests.observability.driven import World
from tests.text.vocabularies import byte_level


def seconds_per_step(num_seqs: int, num_steps: int, sink: Sink) -> tuple[float, float]:
    """CPU time of this thread for a step of so many sequences that decode, and what of it goes into its event and the sinks."""
    world = World(
        byte_level(), max_num_seqs=num_seqs, max_num_batched_tokens=1024, num_pages=num_seqs * 64, step_s=0.001, max_model_len=1024
    )
    emit, spent_s = world.engine._emit, 0.0
    real, emit.sink = emit.step_finished, sink

    def timed(*args: Any, **kwargs: Any) -> None:
        nonlocal spent_s
        began_s = time.thread_time()
        real(*args, **kwargs)
        spent_s += time.thread_time() - began_s

    emit.step_finished = timed  # type: ignore[method-assign]
    for _ in range(num_seqs):
        world.arrive(0.0, 4, num_steps + 50)
    world.run(0.02)
    assert world.engine.scheduler.num_running == num_seqs
    spent_s, began_s = 0.0, time.thread_time()
    for _ in range(num_steps):
        world.engine.step()
    return (time.thread_time() - began_s) / num_steps, spent_s / num_steps


def seconds_per_copy(num_seqs: int, num_tokens: int, num_cached: int, num_copies: int = 50) -> float:
    """CPU time of this thread for a copy of the tables of so many sequences with so many tokens each, beside cached pages."""
    pages = PageManager(num_seqs * (num_tokens // 16 + 1) + num_cached + 1, 16)
    scheduler = Scheduler(
        pages, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * num_tokens, max_model_len=2 * num_tokens, clock=time.monotonic
    )
    for number in range(num_seqs):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        request = Request(request_id=f"r{number}", prompt_token_ids=[number] * num_tokens, params=params, seed=0, arrival_s=0.0)
        scheduler.add(Sequence(request))
    scheduler.schedule()
    pages._idle.update(dict.fromkeys(range(num_cached)))
    assert len(copy_pool(scheduler, pages).owners) == num_seqs
    began_s = time.thread_time()
    for _ in range(num_copies):
        copy_pool(scheduler, pages)
    return (time.thread_time() - began_s) / num_copies


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    found = {}
    for num_seqs, goal_us in ((32, 100), (256, 300)):
        steps = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                people = open_log(LogConfig(file=os.path.join(folder, "run.log")))
                lines = open_log(LogConfig(file=os.path.join(folder, "run.jsonl"), format="json"))
                figures = PrometheusSink("m")
                sink = FanOut([people, lines, EngineProgress(time.monotonic), LiveView(figures.scrape), figures, EngineMetrics()])
                steps.append(seconds_per_step(num_seqs, args.steps, sink))
                sink.close()
        step_us, sinks_us = (1e6 * statistics.median(column) for column in zip(*steps, strict=True))
        found[str(num_seqs)] = round(sinks_us, 1)
        print(f"{num_seqs:4} sequences: step {step_us:7.1f} us, of which its event and all sinks {sinks_us:6.1f} us (goal {goal_us})")
    copies = {}
    for num_seqs, num_tokens, num_cached in ((32, 1024, 1000), (256, 1024, 1000), (256, 1024, 40_000)):
        cost_us = 1e6 * min(seconds_per_copy(num_seqs, num_tokens, num_cached) for _ in range(args.rounds))
        copies[f"{num_seqs}x{num_tokens}+{num_cached}"] = round(cost_us, 1)
        share = 100 * cost_us * 1e-6 / FRAME_S
        tables = f"{num_seqs:4} sequences of {num_tokens} tokens, {num_cached:5} cached pages"
        print(f"{tables}: a copy {cost_us:6.1f} us, {share:.2f} % of the time")
    print(json.dumps({"sinks_us": found, "copies_us": copies}))


if __name__ == "__main__":
    main()
