"""How a decode step's time grows with sequences and with stored tokens: SmolLM2's shape, random weights, int8 and bfloat16.

    python scripts/bench_cost.py [--rounds 3] [--batches 1,2,...,64] [--contexts 128,...,8192] [--svg docs/cost.svg]

One token of each sequence a step, sampler and all, without the engine's host part; positions go beyond the model's length, which changes
no time. Rounds go through the whole grid, and medians are told. The pool holds fewer tokens than the largest steps read, so that rows
share pages there, as far apart as the pool allows; each writes to a page of its own.

`ms = step + sequence * sequences + token * sequences * context` is fitted to the medians (least squares of relative errors): when
the cost is linear, it explains every cell. Prints a Markdown table for each type; the last line is JSON. `--svg` draws the grid.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_step import random_model

from jaxpaged.config import MIB, CacheConfig, CompilationConfig, Config, SchedulerConfig
from jaxpaged.model_runner import ModelRunner
from jaxpaged.request import Request, SamplingParams
from jaxpaged.scheduler import ScheduledRow
from jaxpaged.sequence import Sequence
from jaxpaged.settings import decide_limits
from jaxpaged.step_packer import pack_alone
from jaxpaged.step_program import LoadedModel

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
TYPES = {"int8": ("float32", "int8"), "bfloat16": ("bfloat16", None)}
"""Type of activations and of the pool, and quantization."""
POOL_MIB = 1024
WARM_UP_STEPS = 2

type Grid = dict[tuple[int, int], float]
"""(sequences, context) -> milliseconds."""


class Fit(NamedTuple):
    """Milliseconds of a step, for each sequence, for each stored token; and how far the worst cell is off."""

    step_ms: float
    sequence_ms: float
    token_ms: float
    worst: float

    def of(self, batch: int, context: int) -> float:
        """What it says of a cell."""
        return self.step_ms + self.sequence_ms * batch + self.token_ms * batch * context


def runner_for(model: LoadedModel, batches: tuple[int, ...], context: int) -> ModelRunner:
    """A runner with a bucket for each batch and a pool of 1 GiB."""
    most = max(2, *batches)
    config = Config(
        scheduler=SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=most),
        compilation=CompilationConfig(token_buckets=tuple(sorted({max(2, batch) for batch in batches}))),
    )
    limits = decide_limits(config, is_gpu=False, model_max_len=context)
    cache = CacheConfig(memory=POOL_MIB * MIB)
    return ModelRunner(model, limits=limits, cache=cache, num_ids=model.facts.vocab, max_parallel=2)


def rows_for(runner: ModelRunner, batch: int, context: int) -> list[ScheduledRow]:
    """One token each for sequences of `context` tokens; the page of the last token is nobody else's."""
    own, rest = range(1, 1 + batch), runner.num_pages - 1 - batch
    rows, taken = [], 0
    for index in range(batch):
        request = Request(
            request_id=str(index), prompt_token_ids=[7] * context, params=SamplingParams(temperature=0.0), seed=0, arrival_s=0.0
        )
        sequence = Sequence(request)
        num_shared = -(-context // runner.page_size) - 1
        sequence.tables = ([*(1 + batch + (taken + page) % rest for page in range(num_shared)), own[index]],)
        taken += num_shared
        rows.append(ScheduledRow(sequence, 1, context - 1, True, slot=index, takes_from_slot=False, epoch=0))
    return rows


def measure(kind: str, batches: tuple[int, ...], contexts: tuple[int, ...], rounds: int) -> Grid:
    """Medians of every cell."""
    runner = runner_for(random_model(*TYPES[kind]), batches, max(contexts))
    cells = [(batch, context) for batch in batches for context in contexts]
    blobs = {
        (batch, context): pack_alone(rows_for(runner, batch, context), runner.layout_for(batch), no_token=runner.vocab)
        for batch, context in cells
    }
    # Pages take memory when they are first written: all of the pool now, and not in the middle of a measurement.
    pages = [array.at[:].set(0.01) for array in runner.pool]
    assert runner._state is not None
    runner._state = runner._state._replace(cache=type(runner.pool)(*pages))
    for batch in batches:
        for _ in range(WARM_UP_STEPS):
            np.asarray(runner.run(runner.layout_for(batch), blobs[batch, contexts[0]].copy()))
    seconds: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for batch, context in cells:
            blob = blobs[batch, context].copy()
            begun = time.perf_counter()
            np.asarray(runner.run(runner.layout_for(batch), blob))
            seconds[batch, context].append(time.perf_counter() - begun)
    runner.close()
    return {cell: statistics.median(values) * 1e3 for cell, values in seconds.items()}


def fitted(grid: Grid) -> Fit:
    """The plane through the cells, each weighted by its own size, so that small steps count as much as large ones."""
    batches, contexts = np.array(list(grid), float).T
    measured = np.array(list(grid.values()))
    terms = np.stack([np.ones_like(batches), batches, batches * contexts], axis=1)
    solution, *_ = np.linalg.lstsq(terms / measured[:, None], np.ones_like(measured), rcond=None)
    worst = np.max(np.abs(terms @ solution / measured - 1))
    return Fit(*map(float, solution), float(worst))


def table(grid: Grid) -> str:
    """Milliseconds as a Markdown table: a row a batch, a column a context."""
    batches, contexts = sorted({batch for batch, _ in grid}), sorted({context for _, context in grid})
    lines = ["| sequences | " + " | ".join(f"{context:,} tokens" for context in contexts) + " |", "|---" * (len(contexts) + 1) + "|"]
    lines += [f"| {batch} | " + " | ".join(f"{grid[batch, context]:.1f}" for context in contexts) + " |" for batch in batches]
    return "\n".join(lines)


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440, 300, 70, 34, 62, 40
COLOURS = ("#1b6ca8", "#2a9d8f", "#8ab17d", "#e0a800", "#f4a261", "#e76f51", "#9b2226")


def panel(title: str, axis: str, lines: dict[int, list[tuple[int, float]]], unit: str, x0: int, y0: int) -> list[str]:
    """One chart with linear axes from 0: straight lines mean a linear cost."""
    most_x = max(x for points in lines.values() for x, _ in points)
    quarter = max(y for points in lines.values() for _, y in points) / 4
    digit = 10 ** math.floor(math.log10(quarter))
    most_y = 4 * math.ceil(quarter / digit) * digit
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return x0 + LEFT + wide * x / most_x, y0 + TOP + high * (1 - y / most_y)

    left, bottom = place(0, 0)
    right, top = place(most_x, most_y)
    parts = [
        f'<text x="{x0 + LEFT}" y="{y0 + 18}" font-weight="bold">{title}</text>',
        f'<path d="M{left:.0f} {top:.0f}V{bottom:.0f}H{right:.0f}" fill="none" stroke="#555"/>',
        f'<text x="{(left + right) / 2:.0f}" y="{bottom + 32:.0f}" text-anchor="middle">{axis}</text>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        (x, _), (_, y) = place(most_x * share, 0), place(0, most_y * share)
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16:.0f}" text-anchor="middle">{most_x * share:,.0f}</text>')
        parts.append(f'<text x="{left - 4:.0f}" y="{y + 4:.0f}" text-anchor="end">{most_y * share:,.0f} ms</text>')
    previous = bottom + 99
    for colour, (name, points) in zip(reversed(COLOURS[: len(lines)]), sorted(lines.items(), reverse=True), strict=True):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in (place(*point) for point in points)]
        # The names of the lower lines, which end close together, are pushed down.
        at = place(*points[-1])[1] + 4
        at = at if previous > bottom + 90 else max(at, previous + 12)
        previous = at
        if at <= bottom + 6:
            parts.append(f'<text x="{right + 5:.0f}" y="{at:.0f}" fill="{colour}">{name:,}{unit}</text>')
    return parts


def drawing(grids: dict[str, Grid]) -> str:
    """All grids as SVG: a row a type, over contexts on the left and over sequences on the right."""
    parts = []
    for index, (kind, grid) in enumerate(grids.items()):
        by_batch: dict[int, list[tuple[int, float]]] = {}
        by_context: dict[int, list[tuple[int, float]]] = {}
        for (batch, context), ms in sorted(grid.items()):
            by_batch.setdefault(batch, []).append((context, ms))
            by_context.setdefault(context, []).append((batch, ms))
        parts += panel(f"{kind}: a line a number of sequences", "tokens of context", by_batch, "", 0, index * HEIGHT)
        parts += panel(f"{kind}: a line a context", "sequences", by_context, "", WIDTH, index * HEIGHT)
    size = f'width="{2 * WIDTH}" height="{HEIGHT * len(grids)}" viewBox="0 0 {2 * WIDTH} {HEIGHT * len(grids)}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    first = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([first, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--svg", type=Path, help="where to draw it")
    args = parser.parse_args()
    batches, contexts = (tuple(sorted({int(word) for word in words.split(",")})) for words in (args.batches, args.contexts))
    grids = {kind: measure(kind, batches, contexts, args.rounds) for kind in args.types.split(",")}
    results = {}
    for kind, grid in grids.items():
        fit = fitted(grid)
        told = f"{fit.step_ms:.2f} ms + {fit.sequence_ms:.3f} ms a sequence + {fit.token_ms * 1e3:.2f} ms for 1,000 stored tokens"
        print(f"{kind}: {told}; the worst cell is {fit.worst:.0%} off\n\n{table(grid)}\n")
        results[kind] = {**fit._asdict(), "ms": [[batch, context, ms] for (batch, context), ms in grid.items()]}
    if args.svg is not None:
        args.svg.write_text(drawing(grids), encoding="utf-8")
    print(json.dumps({"benchmark": "cost", "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
