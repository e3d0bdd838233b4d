"""The device of an engine in several processes: process 0 hands every call of its runner out, and the others make the same call.

A call is all that the others are told: they have no clock, no scheduler and no randomness, and whatever a step needs is in its blob.
"""

import struct
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.batch import BatchLayout
from jaxpaged.distributed.follower import Follower
from jaxpaged.distributed.frames import Kind
from jaxpaged.distributed.jax_processes import stop_jax
from jaxpaged.distributed.leader import Leader
from jaxpaged.errors import StreamError
from jaxpaged.model_runner import Runner
from jaxpaged.slot_rows import SlotRow

MAX_IN_FLIGHT = 2
"""Steps that one of the others has on its device: as many as process 0."""
_NUMBER = struct.Struct("!I")


class LeadingRunner:
    """Process 0's runner; see `Runner`. What the others do follows from the order of the calls alone.

    Args:
        runner: the device's.
        leader: the others.
    """

    def __init__(self, runner: Runner, leader: Leader) -> None:
        self._runner, self._leader = runner, leader
        self.limits, self.page_size, self.num_pages = runner.limits, runner.page_size, runner.num_pages
        self.vocab, self.kv_groups = runner.vocab, runner.kv_groups

    def layout_for(self, num_tokens: int) -> BatchLayout:
        """See `Runner`, as for all below. Raises StreamError when another process is gone."""
        return self._runner.layout_for(num_tokens)

    def run(self, layout: BatchLayout, blob: np.ndarray) -> Any:
        self._leader.send(Kind.RUN, _NUMBER.pack(layout.num_tokens), blob.tobytes())
        return self._runner.run(layout, blob)

    def write_slot(self, slot: int, row: SlotRow) -> None:
        self._leader.send(Kind.WRITE_SLOT, _NUMBER.pack(slot), row.counts.tobytes(), row.bias.tobytes())
        self._runner.write_slot(slot, row)

    @property
    def is_awake(self) -> bool:
        return self._runner.is_awake

    def sleep(self, *, keeps_weights: bool) -> None:
        self._leader.send(Kind.SLEEP, bytes([keeps_weights]))
        self._runner.sleep(keeps_weights=keeps_weights)

    def wake_weights(self) -> None:
        self._leader.send(Kind.WAKE_WEIGHTS)
        self._runner.wake_weights()

    def wake_pool(self) -> None:
        self._leader.send(Kind.WAKE_POOL)
        self._runner.wake_pool()

    def close(self) -> None:
        self._leader.close(meanwhile=self._runner.close)
        if self._leader.death is None:
            stop_jax()


def replay(runner: Runner, follower: Follower) -> None:
    """Makes process 0's calls until it stops, and closes the runner.

    Args:
        runner: the device's; as process 0's.
        follower: process 0.

    Raises:
        StreamError: process 0 asks for what cannot be.
    """
    follower.follow(_call_bytes(runner))
    layouts = {layout.num_tokens: layout for layout in map(runner.layout_for, runner.limits.token_buckets)}
    started: deque[Any] = deque()
    while True:
        kind, payload = follower.next_call()
        match kind:
            case Kind.RUN:
                layout = layouts.get(_number(payload))
                if layout is None or len(payload) != _NUMBER.size + 4 * layout.blob_size:
                    raise StreamError("process 0 asks for a step of another size than any here")
                started.append(runner.run(layout, np.frombuffer(payload, np.int32, offset=_NUMBER.size)))
                if len(started) >= MAX_IN_FLIGHT:
                    # What failed on the device shows here, and no more steps wait there than at process 0.
                    np.asarray(started.popleft())
            case Kind.WRITE_SLOT:
                if len(payload) != _NUMBER.size + 8 * runner.vocab or _number(payload) >= runner.limits.max_num_seqs:
                    raise StreamError("process 0 writes a slot of another size than any here")
                counts, bias = np.frombuffer(payload, np.uint32, offset=_NUMBER.size).reshape(2, runner.vocab)
                runner.write_slot(_number(payload), SlotRow(counts.view(np.int32), bias.view(np.float32)))
            case Kind.SLEEP:
                runner.sleep(keeps_weights=payload != bytes([False]))
            case Kind.WAKE_WEIGHTS:
                runner.wake_weights()
            case Kind.WAKE_POOL:
                runner.wake_pool()
            case _:
                while started:
                    np.asarray(started.popleft())
                runner.close()
                return


def _call_bytes(runner: Runner) -> Mapping[Kind, int]:
    largest = runner.layout_for(runner.limits.token_buckets[-1])
    # Each field of a blob grows with the bucket.
    return {Kind.RUN: _NUMBER.size + 4 * largest.blob_size, Kind.WRITE_SLOT: _NUMBER.size + 8 * runner.vocab, Kind.SLEEP: 1}


def _number(payload: bytes) -> int:
    return int(_NUMBER.unpack_from(payload)[0])
