"""Tiny models' programs, compiled with little optimisation: where seconds of compiling would buy microseconds of running."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

from jaxpaged import model_runner
from jaxpaged.batch import BatchLayout
from jaxpaged.config import MIB
from jaxpaged.programs import Compiled, compile_all

TINY_BYTES = 16 * MIB
"""Of a program's weights, its first argument. Models as wide as SmolLM2 have more: their programs are compiled as users' are, as are all
that started processes compile."""
QUICKLY = {"xla_backend_optimization_level": 0}
"""Of machine code alone: what XLA makes of the arrays (fusions, layouts, buffers) is the same at every level."""


def compile_one(lowered: jax.stages.Lowered) -> Any:
    """Compiles a program: quickly that of a tiny model."""
    num_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in jax.tree.leaves(lowered.in_avals[0][0]))
    return lowered.compile(compiler_options=QUICKLY if num_bytes < TINY_BYTES else None)


@contextlib.contextmanager
def quick_runners() -> Iterator[None]:
    """While inside, model runners compile tiny models quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "compile_all", compile_all_quickly)
        yield


class _Lowered:
    """A lowered program that `compile_all` compiles by `compile_one`."""

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._lowered = lowered

    def compile(self) -> Any:
        """See `jax.stages.Lowered`."""
        return compile_one(self._lowered)


def compile_all_quickly(
    lower: Callable[[BatchLayout], jax.stages.Lowered],
    layouts: Sequence[BatchLayout],
    *,
    max_parallel: int,
    on_compiled: Callable[[Compiled], None],
) -> dict[BatchLayout, Any]:
    """`jaxpaged.programs.compile_all`, by `compile_one`."""

    def lower_one(layout: BatchLayout) -> Any:
        return _Lowered(lower(layout))

    return compile_all(lower_one, layouts, max_parallel=max_parallel, on_compiled=on_compiled)
