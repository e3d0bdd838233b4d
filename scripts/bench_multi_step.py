"""Whether several decode steps inside one call would gain: k steps in a loop on the device against k calls with two in flight.

    python scripts/bench_multi_step.py [--rounds 15] [--batches 1,16] [--steps 1,2,4,8] [--context 200] [--host-ms 0.2,0.35]

SmolLM2's shape with random int8 weights. The loop is the engine's own step function (model, sampler, state), with what the host would do
between two steps done on the device: the next position, page and offset, and a stop when every row has said an end token or is full.
The calls are the engine's as well: each is started before the one before it is waited for. Both make the same tokens, which is checked.

The second table is arithmetic, for a device that is quicker: a step of some milliseconds, and the host's work a step (`--host-ms`, from
bench_host.py) beside it, hidden behind the device's (as with two in flight) and not hidden. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from bench_step import random_model, rows_of, runner_for
from jax import lax

from jaxpaged.batch import BatchLayout
from jaxpaged.model_runner import ModelRunner
from jaxpaged.step_packer import pack_alone
from jaxpaged.step_program import DeviceState

END_ID = 2
DEVICE_MS = (1.0, 2.0, 4.0, 8.0)


def fields_of(layout: BatchLayout) -> dict[str, tuple[int, int]]:
    """Where each array lies in the blob."""
    places, start = {}, 0
    for name, shape in layout.fields:
        places[name] = (start, start + int(np.prod(shape)))
        start = places[name][1]
    return places


def next_blob(blob: Any, layout: BatchLayout) -> Any:
    """The blob of the decode step after this one: what the host would pack, from what is in it."""
    places = fields_of(layout)

    def part(name: str) -> Any:
        return blob[slice(*places[name])]

    positions, slots = part("positions") + 1, part("target_slots")
    is_live = jnp.arange(layout.num_tokens) < part("cu_q_lens")[-1]
    tables = part("page_tables").reshape(layout.num_seqs, layout.max_pages)
    pages = tables[jnp.arange(layout.num_tokens), positions // layout.page_size]
    changed = {
        "positions": jnp.where(is_live, positions, part("positions")),
        "write_pages": jnp.where(is_live, pages, part("write_pages")),
        "write_offsets": jnp.where(is_live, positions % layout.page_size, part("write_offsets")),
        "kv_lens": jnp.where(is_live, part("kv_lens") + 1, 0),
        "position": jnp.where(is_live, part("position") + 1, 0),
        "source_slots": jnp.where(is_live, slots, -1),
    }
    for name, array in changed.items():
        blob = blob.at[slice(*places[name])].set(array)
    return blob


def multi_step(runner: ModelRunner, layout: BatchLayout, num_steps: int) -> Any:
    """Compiles a program of up to `num_steps` decode steps, which ends when every row has ended."""
    step = runner._step.function(layout)
    ends = fields_of(layout)["cu_q_lens"][1]

    def steps(params: Any, state: DeviceState, blob: Any) -> tuple[Any, DeviceState]:
        def goes_on(carry: Any) -> Any:
            index, _, _, _, is_open = carry
            return (index < num_steps) & jnp.any(is_open)

        def once(carry: Any) -> Any:
            index, state, blob, ids, is_open = carry
            result, state = step(params, state, blob)
            is_open &= (result.ids != END_ID) & (index + 1 < num_steps)
            return index + 1, state, next_blob(blob, layout), ids.at[index].set(result.ids), is_open

        ids = jnp.full((num_steps, layout.num_seqs), -1, jnp.int32)
        is_open = jnp.arange(layout.num_seqs) < blob[ends - 1]
        _, state, _, ids, _ = lax.while_loop(goes_on, once, (jnp.int32(0), state, blob, ids, is_open))
        return ids, state

    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), runner._state)
    blob = jax.ShapeDtypeStruct((layout.blob_size,), jnp.int32)
    params = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in runner._model.params)
    return jax.jit(steps, donate_argnums=1).lower(params, state, blob).compile()


def blobs_for(runner: ModelRunner, batch: int, context: int, num_steps: int) -> list[np.ndarray]:
    """The blobs of consecutive decode steps, as the host packs them; the ids of later ones come from the device."""
    layout, rows = runner.layout_for(batch), rows_of([(1, context + num_steps)] * batch, runner.page_size)
    blobs = []
    for index in range(num_steps):
        moved = [msgspec.structs.replace(row, start=context - 1 + index, takes_from_slot=index > 0) for row in rows]
        blobs.append(pack_alone(moved, layout, no_token=runner.vocab))
    return blobs


def by_calls(runner: ModelRunner, layout: BatchLayout, blobs: list[np.ndarray]) -> np.ndarray:
    """One call a step, two in flight."""
    started: deque[Any] = deque()
    ids = []
    for blob in blobs:
        started.append(runner.run(layout, blob.copy()))
        if len(started) == 2:
            ids.append(np.asarray(started.popleft()))
    return np.stack([*ids, *(np.asarray(result) for result in started)])


def by_loops(runner: ModelRunner, program: Any, blobs: list[np.ndarray], num_steps: int) -> np.ndarray:
    """One call for `num_steps` steps, two in flight."""
    started: deque[Any] = deque()
    ids = []
    for blob in blobs[::num_steps]:
        result, runner._state = program(runner._model.params, runner._state, blob.copy())
        started.append(result)
        if len(started) == 2:
            ids.append(np.asarray(started.popleft()))
    return np.concatenate([*ids, *(np.asarray(result) for result in started)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--steps", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--host-ms", default="0.2,0.35", help="the host's work a step, one for each batch")
    args = parser.parse_args()
    batches, counts = ([int(word) for word in words.split(",")] for words in (args.batches, args.steps))
    num_steps = 2 * max(counts)
    runner = runner_for(random_model("float32", "int8"), tuple(sorted({max(2, batch) for batch in batches})), max(2, *batches))
    ways: dict[tuple[int, int], Any] = {}
    for batch in batches:
        for count in counts:
            ways[batch, count] = multi_step(runner, runner.layout_for(batch), count)
    seconds: dict[tuple[int, int], list[float]] = {}
    spent: dict[tuple[int, int], list[float]] = {}
    for turn in range(args.rounds + 1):
        for batch in batches:
            blobs, layout = blobs_for(runner, batch, args.context, num_steps), runner.layout_for(batch)
            told = []
            for count in (0, *counts):  # 0: the engine's calls
                begun, cpu_begun = time.perf_counter(), time.process_time()
                told.append(by_loops(runner, ways[batch, count], blobs, count) if count else by_calls(runner, layout, blobs))
                if turn:  # the first turn warms up
                    seconds.setdefault((batch, count), []).append((time.perf_counter() - begun) / num_steps)
                    spent.setdefault((batch, count), []).append((time.process_time() - cpu_begun) / num_steps)
            for ids in told[1:]:
                np.testing.assert_array_equal(ids[:, :batch], told[0][:, :batch])
    results = []
    print("ms a step: wall and CPU time, medians; gain: medians and quartiles of the same rounds' ratios, calls / loop")
    for (batch, count), values in seconds.items():
        gains, told_gains = [], []
        for calls, own in ((seconds[batch, 0], values), (spent[batch, 0], spent[batch, count])):
            low, median, high = statistics.quantiles([one / other - 1 for one, other in zip(calls, own, strict=True)], n=4)
            gains.append(median)
            told_gains.append(f"{median:+.1%} ({low:+.1%} to {high:+.1%})")
        wall_ms, cpu_ms = statistics.median(values) * 1e3, statistics.median(spent[batch, count]) * 1e3
        name = f"{count} in a loop" if count else "calls"
        gain = f"gain {told_gains[0]}, of CPU time {told_gains[1]}" if count else ""
        print(f"batch {batch:3} {name:12} wall {wall_ms:7.2f}, CPU {cpu_ms:7.2f}   {gain}")
        results.append({"batch": batch, "steps": count, "wall_ms": wall_ms, "cpu_ms": cpu_ms, "gain": gains[0], "cpu_gain": gains[1]})
    print("\ngain of 8 steps a call on a device whose step takes so many ms, by arithmetic: host's work hidden / not hidden")
    for host_ms in map(float, args.host_ms.split(",")):
        told_gains = []
        for device_ms in DEVICE_MS:
            hidden = max(device_ms, host_ms) / max(device_ms, host_ms / 8) - 1
            bare = (device_ms + host_ms) / (device_ms + host_ms / 8) - 1
            told_gains.append(f"{device_ms:g} ms {hidden:.1%} / {bare:.1%}")
        print(f"host {host_ms:.2f} ms a step: " + ", ".join(told_gains))
    print(json.dumps({"benchmark": "multi_step", **vars(args), "results": results}))


if __name__ == "__main__":
    main()
