"""How bench_peers.py speaks with an engine, over the pipes of its process. Standard library only, for every Python from 3.11.

First comes a line `{"ready_s": seconds since the process began, "version": ...}`. Then, for each line
`{"requests": [{"prompt": [ids], "max_tokens": n}, ...]}`, all of whose requests are handed to the engine at once, comes
`{"tokens": of all answers, "seconds": until the last one was whole, "ttft_s": mean seconds to a request's first token}`. A line that
cannot be served ends the process.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO, TypedDict


class Asked(TypedDict):
    """A greedy request that runs to its full length."""

    prompt: list[int]
    max_tokens: int


class Run(TypedDict):
    """What a workload took."""

    tokens: int
    seconds: float
    ttft_s: float


def serve(pipe: TextIO, version: str, run: Callable[[list[Asked]], Run]) -> None:
    """Answers until the pipe that asks is closed; `pipe` is what `claim_output` gave."""
    run([{"prompt": [5] * 8, "max_tokens": 2}])
    _tell(pipe, {"ready_s": _age_s(), "version": version})
    for line in sys.stdin:
        _tell(pipe, run(json.loads(line)["requests"]))


def claim_output() -> TextIO:
    """Standard output, for this protocol alone: whatever libraries print from now on, also those written in C, goes to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")


def _tell(pipe: TextIO, line: object) -> None:
    pipe.write(json.dumps(line) + "\n")
    pipe.flush()


def _age_s() -> float:
    """Seconds since this process began, by the kernel's books."""
    with open("/proc/self/stat", encoding="utf-8") as stat:
        began_ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")
