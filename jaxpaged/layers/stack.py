"""Running a stack of equal layers whose weights are stacked on a leading axis.

The pool travels in the loop's carry, so that it is updated in place: as a scan's input and output it would be copied every step.
On CPU, unrolling the layers would compile six times longer per bucket; on a GPU they are unrolled (`docs/kernels.md`, a whole step).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import lax

from jaxpaged.counted_loops import counted_loop


class WholeStack(nnx.Param):
    """A parameter that a layer is given as `OfLayer`, the whole stack: for weights of which a step reads a part, such as experts'."""


class OfLayer(NamedTuple):
    """The place of a layer's weights, `stacked[layer]`, without the copy that taking them out would be."""

    stacked: jax.Array
    layer: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the layer's weights."""
        return self.stacked.shape[1:]


def make_stack[M: nnx.Module](make_layer: Callable[[], M], num_layers: int) -> M:
    """One module of `make_layer`'s kind whose every parameter has a leading `layers` axis."""
    return nnx.vmap(make_layer, axis_size=num_layers)()


def run_stack[C](layers: nnx.Module, num_layers: int, run_layer: Callable[[Any, C, jax.Array], C], carry: C) -> C:
    """Calls `run_layer(layer, carry, index)` for each layer in turn; it is traced once."""
    graphdef, whole, sliced = nnx.split(layers, WholeStack, ...)

    def step(index: jax.Array, carry: C) -> C:
        own = jax.tree.map(lambda stacked: lax.dynamic_index_in_dim(stacked, index, keepdims=False), sliced)
        places = jax.tree.map(lambda stacked: OfLayer(stacked, index), whole)
        return run_layer(nnx.merge(graphdef, own, places), carry, index)

    return counted_loop(num_layers, step, carry)
