"""`cp.async` for Pallas' GPU interpreter, which has none: a copy arrives at the last moment that the waits of its thread allow.

What is read too early is then NaN or of an older block. The other extreme, that a copy arrives at once, is what plain loads are.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import callback
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.sm80_decode import AsyncCopies, commit_nothing


def register_mma() -> None:
    """Lets the interpreter compute `plgpu.mma`: float32 sums of products, as on a card but for the order."""
    multiply = mlir.lower_fun(lambda c, a, b: c + jax.numpy.dot(a, b, preferred_element_type=c.dtype), multiple_results=False)
    mlir.register_lowering(primitives.mma_p, multiply, platform="cpu")


class Wait:
    """What `LateCopies.wait` asks of the interpreter."""

    def __init__(self, num_newer: int) -> None:
        self.num_newer = num_newer
        self.__qualname__ = type(self).__qualname__

    def __call__(self, _: Any) -> None:
        raise AssertionError("for the interpreter only")


class LateCopies(AsyncCopies):
    """The kernel's own copies; the wait is one that the interpreter can be taught."""

    def wait(self, num_newer: int) -> None:
        plgpu.inline_mgpu()(Wait(num_newer))()


class Queue:
    """Copies under way, by warpgroup, oldest first; a None is a piece that was left out.

    Attributes:
        rows: how often each row was copied, by array.
    """

    def __init__(self) -> None:
        self.pieces: dict[str, list[Any]] = {}
        self.rows: dict[tuple[int, ...], Counter[int]] = {}

    def push(self, token: Any, thread: Any, piece: Any = None, source: Any = None) -> Any:
        self.pieces.setdefault(repr(thread), []).append(piece)
        if source is not None:
            array, row = source
            self.rows.setdefault(tuple(map(int, array)), Counter())[int(row)] += 1
        return token

    def wait(self, token: Any, place: Any, thread: Any, num_newer: int) -> Any:
        mine = self.pieces.setdefault(repr(thread), [])
        while len(mine) > num_newer:
            key, transforms, values = mine.pop(0) or (None, None, None)
            # What CTAs that have ended never waited for is no matter any more: one thread interprets them one after another.
            if key is not None and gpu_callbacks.HostAllocationKey.from_array(key) in gpu_callbacks._get_shared_memory().mem:
                token, _ = gpu_callbacks._swap(token, place, thread, key, transforms, values, None)
        return token


@contextlib.contextmanager
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """While inside, programs that are traced anew and interpreted may copy with `LateCopies`."""
    queue = Queue()
    interpreter = jaxpr_interpret.JaxprInterpreter
    bulk_copy = interpreter._interpret_copy_gmem_to_smem_p

    def copy(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
        if eqn.params["has_barrier"]:
            return bulk_copy(self, eqn, token, get_invals)
        source, target, *rest = get_invals()
        source_tree, target_tree = eqn.params["src_transforms_treedef"], eqn.params["dst_transforms_treedef"]
        of_source = jax.tree.unflatten(source_tree, rest[: source_tree.num_leaves])
        of_target = jax.tree.unflatten(target_tree, rest[source_tree.num_leaves :])
        array = eqn.invars[0].aval
        token, values = gpu_callbacks.call_get(
            token=token,
            # Sources are rows of the first axis.
            result_shape_and_dtype=jax.ShapeDtypeStruct(array.shape[1:], array.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=source,
            transforms=of_source,
            source_info=eqn.source_info,
        )
        piece, row = (target, of_target, values), (source, of_source[0].indices[0])
        return callback.io_callback(queue.push, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, piece, row), []

    def inline(self: Any, eqn: Any, token: Any, get_invals: Any) -> Any:
        asked = eqn.params["mgpu_fn"]
        if asked is commit_nothing:
            return callback.io_callback(queue.push, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread), []
        assert isinstance(asked, Wait)

        def wait(token: Any, place: Any, thread: Any) -> Any:
            return queue.wait(token, place, thread, asked.num_newer)

        return callback.io_callback(wait, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.mesh_location, self.thread), []

    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_interpret_copy_gmem_to_smem_p", copy)
        patch.setattr(interpreter, "_interpret_inline_mgpu_p", inline)
        yield queue
