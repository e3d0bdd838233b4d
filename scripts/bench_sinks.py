"""Times what observation costs a step, in CPU time of the engine's thread: making the step's event, and giving it to every sink.

    python scripts/bench_sinks.py [--rounds 7] [--steps 400]

An engine over a runner that answers at once decodes 32 and 256 sequences, in turn without sinks and with all that a server has: a log for
people, an event log, figures under both names, health. Medians over the rounds of the difference per step. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.config import LogConfig
from jaxpaged.metrics import EngineMetrics
from jaxpaged.sinks import FanOut, open_log
from server.phase import EngineProgress
from server.prometheus_sink import PrometheusSink
from tests.observability.driven import World
from tests.text.vocabularies import byte_level


class Nothing:
    """No sink."""

    def __call__(self, event: object, /) -> None:
        return

    def close(self) -> None:
        return


def seconds_per_step(num_seqs: int, num_steps: int, sink: object) -> float:
    """CPU time of this thread for a step of so many sequences that decode."""
    world = World(
        byte_level(), max_num_seqs=num_seqs, max_num_batched_tokens=1024, num_pages=num_seqs * 64, step_s=0.001, max_model_len=1024
    )
    world.engine._emit.sink = sink  # type: ignore[assignment]
    for _ in range(num_seqs):
        world.arrive(0.0, 4, num_steps + 50)
    world.run(0.02)
    assert world.engine.scheduler.num_running == num_seqs
    began_s = time.thread_time()
    for _ in range(num_steps):
        world.engine.step()
    return (time.thread_time() - began_s) / num_steps


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    found = {}
    for num_seqs, goal_us in ((32, 100), (256, 300)):
        bare, full = [], []
        for _ in range(args.rounds):
            bare.append(seconds_per_step(num_seqs, args.steps, Nothing()))
            with tempfile.TemporaryDirectory() as folder:
                people = open_log(LogConfig(file=os.path.join(folder, "run.log")))
                lines = open_log(LogConfig(file=os.path.join(folder, "run.jsonl"), format="json"))
                sink = FanOut([people, lines, EngineProgress(time.monotonic), PrometheusSink("m"), EngineMetrics()])
                full.append(seconds_per_step(num_seqs, args.steps, sink))
                sink.close()
        cost_us = 1e6 * (statistics.median(full) - statistics.median(bare))
        found[str(num_seqs)] = round(cost_us, 1)
        print(f"{num_seqs:4} sequences: step {1e6 * statistics.median(bare):7.1f} us, all sinks {cost_us:6.1f} us more (goal {goal_us})")
    print(json.dumps({"sinks_us": found}))


if __name__ == "__main__":
    main()
