"""The calls of process 0's runner come to the others as they were made, and only as they could have been made."""

import threading
from typing import Any

import numpy as np
import pytest

from jaxpaged.batch import BatchLayout
from jaxpaged.build import _check_company_mesh
from jaxpaged.distributed.frames import Kind
from jaxpaged.distributed.runners import MAX_IN_FLIGHT, LeadingRunner, replay
from jaxpaged.errors import ConfigError, StreamError
from jaxpaged.kv_groups import KVGroup
from jaxpaged.model_runner import Runner
from jaxpaged.parallel.mesh_config import MeshShape
from jaxpaged.settings import StepLimits
from jaxpaged.slot_rows import SlotRow
from tests.distributed.company import pair

pytestmark = pytest.mark.jax
VOCAB = 7


class Recorder:
    """A runner that notes its calls; each of its results, once it is looked at."""

    def __init__(self) -> None:
        self.limits, self.page_size, self.num_pages, self.vocab = StepLimits(64, 4, 16, (2, 16)), 4, 9, VOCAB
        self.kv_groups: tuple[KVGroup, ...] = ()
        self.layouts = {size: BatchLayout(size, 2, 3, 4, 9, 4, 1) for size in (2, 16)}
        self.calls: list[Any] = []
        self.looks: list[int] = []
        self.most_in_flight = 0
        self.is_awake = True

    def layout_for(self, num_tokens: int) -> BatchLayout:
        return self.layouts[self.limits.bucket_for(num_tokens)]

    def run(self, layout: BatchLayout, blob: np.ndarray) -> "Result":
        self.calls.append(("run", layout, blob.dtype, blob.tolist()))
        number = sum(call[0] == "run" for call in self.calls)
        self.most_in_flight = max(self.most_in_flight, number - len(self.looks))
        return Result(self, number)

    def write_slot(self, slot: int, row: SlotRow) -> None:
        self.calls.append(("write_slot", slot, row.counts.dtype, row.counts.tolist(), row.bias.dtype, row.bias.tolist()))

    def sleep(self, *, keeps_weights: bool) -> None:
        self.calls.append(("sleep", keeps_weights))

    def wake_weights(self) -> None:
        self.calls.append(("wake_weights",))

    def wake_pool(self) -> None:
        self.calls.append(("wake_pool",))

    def close(self) -> None:
        self.calls.append(("close",))


class Result:
    """Of one step."""

    def __init__(self, runner: Recorder, number: int) -> None:
        self._runner, self._number = runner, number

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._runner.looks.append(self._number)
        return np.zeros(1, np.int32)


def test_a_recorder_is_a_runner() -> None:
    assert isinstance(Recorder(), Runner)


def test_calls_come_in_their_order_and_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = Recorder(), Recorder()
    with pair() as (made, leader, follower, end):
        thread = threading.Thread(target=replay, args=(theirs, follower))
        thread.start()
        leader.serve()
        leading = LeadingRunner(ours, leader)
        assert isinstance(leading, Runner)
        for _ in range(20):
            layout = leading.layout_for(int(rng.integers(1, 17)))
            leading.run(layout, rng.integers(-(2**31), 2**31, layout.blob_size, dtype=np.int32))
            bias = rng.standard_normal(VOCAB).astype(np.float32)
            bias[0] = -np.inf
            leading.write_slot(int(rng.integers(0, 4)), SlotRow(rng.integers(0, 9, VOCAB, dtype=np.int32), bias))
        leading.sleep(keeps_weights=True)
        leading.wake_weights()
        leading.wake_pool()
        leading.sleep(keeps_weights=False)
        leading.run(leading.layout_for(1), np.zeros(leading.layout_for(1).blob_size, np.int32))
        stopping = threading.Thread(target=leading.close)
        stopping.start()
        thread.join()
        follower.close()
        stopping.join()
        assert (made.end.reasons, end.reasons) == ([], [])
    assert len(ours.calls) == 46
    assert theirs.calls == ours.calls
    assert theirs.calls[-1] == ("close",)
    assert theirs.looks == list(range(1, 22)), "what failed on the device is seen, in the order of the steps"
    assert theirs.most_in_flight == MAX_IN_FLIGHT


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.RUN, b"\0\0\0\3" + bytes(4)),  # no such bucket
        (Kind.RUN, b"\0\0\0\2" + bytes(4)),  # a blob too short
        (Kind.WRITE_SLOT, b"\0\0\0\4" + bytes(8 * VOCAB)),  # no such slot
        (Kind.WRITE_SLOT, b"\0\0\0\0" + bytes(8 * VOCAB - 4)),
    ],
)
def test_calls_of_another_size_are_refused(kind: Kind, payload: bytes) -> None:
    recorder = Recorder()
    with pair() as (_, leader, follower, _end):
        leader.send(kind, payload)
        with pytest.raises(StreamError, match="of another size than any here"):
            replay(recorder, follower)
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        (MeshShape(data=2, tensor=4), "the mesh axis data is 2, and copies of a model are served by one process, not by 2"),
        (MeshShape(tensor=4), "the mesh has 4 devices and the 2 processes have 8: it must have them all"),
        (MeshShape(expert=2, tensor=2), "the mesh has 4 devices"),
    ],
)
def test_a_mesh_that_leaves_somebody_out_is_refused(mesh: MeshShape, sentence: str) -> None:
    with pair() as (_, leader, *_rest):
        _check_company_mesh(MeshShape(tensor=8), leader, 8)
        with pytest.raises(ConfigError, match=sentence):
            _check_company_mesh(mesh, leader, 8)


def test_no_call_is_made_once_another_process_is_gone() -> None:
    ours = Recorder()
    with pair() as (made, leader, follower, _):
        leading = LeadingRunner(ours, leader)
        follower.fail("process 1: a bad day")
        made.end.reason()
        layout = leading.layout_for(1)
        for call in (lambda: leading.run(layout, np.zeros(layout.blob_size, np.int32)), leading.wake_pool, leading.wake_weights):
            with pytest.raises(StreamError, match="a bad day"):
                call()
    assert ours.calls == []
