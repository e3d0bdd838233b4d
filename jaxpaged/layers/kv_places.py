"""Where each layer of a stack keeps its keys and values, and how far it looks back: data, so that a stack is traced once."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxpaged.kv_layout import lay_out
from pallas_kernels.paged_attention import NO_WINDOW


class KVPlace(NamedTuple):
    """Of one layer: its layer of the pool, the group whose page tables it reads, and its window."""

    layer: Int32[Array, ""]
    group: int | Int32[Array, ""]
    window: int | Int32[Array, ""] | None


class KVPlaces:
    """The places of a model's layers.

    Args:
        windows: for each layer, the positions that a token sees, itself included; None: all.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._layout = lay_out(windows)
        self._windows = tuple(windows)

    def of(self, layer: Int32[Array, ""]) -> KVPlace:
        """The place of one layer, by its index in the model."""
        layout, windows = self._layout, self._windows
        if len(layout.groups) == 1:
            return KVPlace(layer, 0, windows[0])
        window: int | jax.Array | None = windows[0]
        if len(set(windows)) > 1:
            window = jnp.asarray([NO_WINDOW if window is None else window for window in windows], jnp.int32)[layer]
        pool_layer = jnp.asarray(layout.pool_layer_of, jnp.int32)[layer]
        return KVPlace(pool_layer, jnp.asarray(layout.group_of, jnp.int32)[layer], window)
