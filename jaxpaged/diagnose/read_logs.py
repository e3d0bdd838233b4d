"""Logs for people: ours, and vLLM's. They tell less than events: what is not in their lines stays unknown."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from jaxpaged.diagnose.windows import Observation, Window
from jaxpaged.histograms import SECONDS_BOUNDS, Histogram

OURS: Final = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) \w+ +running (?P<running>\d+), waiting (?P<waiting>\d+); "
    r"batch (?P<batch>[\d.]+) tokens \+ (?P<padding>[\d.]+) padding \(mean of (?P<steps>\d+) steps\); "
    r"pages (?P<pool>[\d.]+) % of \d+ in use; prompt (?P<prompt>[\d.]+) tokens/s, generation (?P<generation>[\d.]+) tokens/s; "
    r"prefix hits [\d.]+ %(?:; preempted (?P<preempted>\d+))?(?:; (?P<recomputed>\d+) tokens? computed again)?"
)
OUR_END: Final = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) \w+ +request .* finished \(\w+\): .*?first token after (?P<ttft>[\d.]+) s"
)
OUR_COMPILE: Final = re.compile(r"^(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) .*program for .* in (?P<seconds>[\d.]+) s, after ready")
OUR_START: Final = re.compile(r"per step at most (?P<seqs>\d+) sequences? and (?P<tokens>\d+) tokens?;")
OUR_REFUSAL: Final = re.compile(r"^(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) .*request .* rejected \(queue_full\)")

VLLM: Final = re.compile(
    r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d) .*?Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs(?:, Swapped: \d+ reqs)?"
    r", (?:Waiting|Pending): (?P<waiting>\d+) reqs.*?, GPU (?:KV )?cache usage: (?P<pool>[\d.]+)%"
)
VLLM_PREEMPTED: Final = re.compile(r", Preemptions: (\d+)")
VLLM_COMPILE: Final = re.compile(r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d) .*during inference: .*causes a latency spike")
VLLM_SEQS: Final = re.compile(r"max_num_seqs['\"]?\s*[=:]\s*(?P<seqs>\d+)")
VLLM_TOKENS: Final = re.compile(r"max_num_batched_tokens['\"]?\s*[=:]\s*(?P<tokens>\d+)")
VLLM_WORDS: Final = "Avg generation throughput:"
IDLE_S: Final = 1.0
"""So long without a step, and the engine was idle: a line about the whole engine covers only the time in which it worked."""
MAX_INTERVAL_S: Final = 120.0
"""A longer silence between two lines is no window."""


def _ours_s(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _vllm_s(text: str, year: int) -> float:
    """The year is not told, and is the present one."""
    return datetime.strptime(f"{year}-{text}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()


def read_our_log(lines: Iterable[str]) -> Observation:
    """Lines about the whole engine, with the first tokens of requests that ended between them."""
    windows: list[Window] = []
    limits: dict[str, float] = {}
    ttfts, compiled, compile_s, finished, refused = Histogram(SECONDS_BOUNDS), 0, 0.0, 0, 0
    for line in lines:
        if end := OUR_END.match(line):
            ttfts.observe(float(end["ttft"]))
            finished += 1
        elif late := OUR_COMPILE.match(line):
            compiled, compile_s = compiled + 1, compile_s + float(late["seconds"])
        elif OUR_REFUSAL.match(line):
            refused += 1
        elif start := OUR_START.search(line):
            limits = {"max_num_seqs": float(start["seqs"]), "max_num_batched_tokens": float(start["tokens"])}
        elif found := OURS.match(line):
            at_s, steps = _ours_s(found["time"]), float(found["steps"])
            generated, prompt = float(found["generation"]), float(found["prompt"])
            # All tokens of the interval by tokens a second gives its length.
            tokens = float(found["batch"]) * steps
            seconds = tokens / (generated + prompt) if generated + prompt > 0 else 1.0
            begin_s = max(at_s - seconds, windows[-1].to_s) if windows else at_s - seconds
            if windows and begin_s - windows[-1].to_s >= IDLE_S:
                windows.append(Window(from_s=windows[-1].to_s, to_s=begin_s, running=0.0, waiting=0.0, steps=0.0, generated=0.0))
            if begin_s < at_s:
                windows.append(
                    Window(
                        from_s=begin_s,
                        to_s=at_s,
                        running=float(found["running"]),
                        waiting=float(found["waiting"]),
                        pool=float(found["pool"]) / 100,
                        steps=steps,
                        computed=tokens,
                        padding=float(found["padding"]) * steps,
                        prefill=prompt * seconds,
                        generated=generated * seconds,
                        preempted=float(found["preempted"] or 0),
                        recomputed=float(found["recomputed"] or 0),
                        compiled=compiled,
                        compile_s=compile_s,
                        finished=finished,
                        refused=refused,
                        first_tokens=ttfts.spread(),
                    )
                )
                ttfts, compiled, compile_s, finished, refused = Histogram(SECONDS_BOUNDS), 0, 0.0, 0, 0
    if compiled and windows:
        last = windows[-1]
        windows[-1] = msgspec.structs.replace(last, compiled=(last.compiled or 0) + compiled, compile_s=(last.compile_s or 0) + compile_s)
    return Observation(source="a log of jaxpaged", windows=tuple(windows), limits=limits)


def read_vllm_log(lines: Iterable[str], year: int | None = None) -> Observation:
    """Periodic lines of vLLM's log, those of all engines together, and its warnings of programs compiled while serving."""
    year = year or datetime.now(UTC).year
    windows: list[Window] = []
    limits: dict[str, float] = {}
    compiled, interval_s, last_s = 0, 10.0, None
    for line in lines:
        if found := VLLM.search(line):
            at_s = _vllm_s(found["time"], year)
            if last_s is not None and 0 < at_s - last_s <= MAX_INTERVAL_S:
                interval_s = at_s - last_s
            begin_s = at_s - interval_s if last_s is None or at_s - last_s > MAX_INTERVAL_S else last_s
            last_s = at_s
            seconds = max(0.0, at_s - begin_s)
            if not seconds:
                continue
            if len(windows) == 1:  # by now it is known how often a line is written
                windows[0] = msgspec.structs.replace(windows[0], from_s=windows[0].to_s - interval_s)
            windows.append(
                Window(
                    from_s=begin_s,
                    to_s=at_s,
                    running=float(found["running"]),
                    waiting=float(found["waiting"]),
                    pool=float(found["pool"]) / 100,
                    prefill=float(found["prompt"]) * seconds,
                    generated=float(found["generation"]) * seconds,
                    preempted=float(preempted[1]) if (preempted := VLLM_PREEMPTED.search(line)) else 0.0,
                    compiled=compiled,
                )
            )
            compiled = 0
        elif VLLM_COMPILE.search(line):
            compiled += 1
        else:
            for name, pattern in (("max_num_seqs", VLLM_SEQS), ("max_num_batched_tokens", VLLM_TOKENS)):
                if told := pattern.search(line):
                    limits[name] = float(told[1])
    if compiled and windows:
        windows[-1] = msgspec.structs.replace(windows[-1], compiled=(windows[-1].compiled or 0) + compiled)
    return Observation(source="a log of vLLM", windows=tuple(windows), limits=limits)
