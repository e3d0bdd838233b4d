"""Measures what `LLM.sleep` gives back and how long it and `LLM.wake_up` take; prints the table of docs/operations.md.

    python scripts/bench_sleep.py [--model NAME] [--dtype float32] [--levels 1 2]

Each level has a process of its own, in which an engine with the default pool answers a request, sleeps, wakes up and answers
it again, to the same tokens. Memory is the process's resident set, which on a GPU is not where weights and pool are. The last
line is JSON.
"""

import argparse
import gc
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.config import MIB
from jaxpaged.llm import LLM
from jaxpaged.request import SamplingParams

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=16)


def resident_mib() -> float:
    """The memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize() / MIB


def answer(llm: LLM) -> list[int]:
    """Token ids of one short answer."""
    return list(llm.generate("Three facts about rivers:", PARAMS)[0].outputs[0].token_ids)


def measure(level: int, model: str | None, dtype: str) -> dict[str, float]:
    """MiB of memory and seconds of one sleep and its end."""
    with LLM(model, dtype=dtype, sinks=[]) as llm:
        expected = answer(llm)
        gc.collect()
        figures: dict[str, float] = {"level": level, "before_mib": resident_mib()}
        begun = time.monotonic()
        llm.sleep(level)
        figures |= {"sleep_s": time.monotonic() - begun, "asleep_mib": resident_mib()}
        begun = time.monotonic()
        llm.wake_up()
        figures |= {"wake_up_s": time.monotonic() - begun}
        if answer(llm) != expected:
            raise AssertionError("another answer after the sleep")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for level in args.levels:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (level, args.model, args.dtype)))
    print("| level | process before | asleep | to sleep | to wake up |")
    print("|---|---|---|---|---|")
    for row in rows:
        memory = f"{row['before_mib']:.0f} MiB | {row['asleep_mib']:.0f} MiB"
        print(f"| {row['level']} | {memory} | {row['sleep_s']:.1f} s | {row['wake_up_s']:.1f} s |")
    print(json.dumps({"benchmark": "sleep", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
