"""Which page table and which layer of the pool each layer of a model uses.

The pool has one numbering of pages, and every page has room for the same number of layers. Layers that see alike are cut into
groups of that many; a page belongs to one group at a time and holds the keys and values of its layers. So a windowed group gives
whole pages back, which any other group can take.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpaged.kv_groups import KVGroup

MOST_PADDING = 1 / 8
"""Of the layers of one kind, how many may be added so that groups are of one size. Padding costs memory, more groups more page tables."""


class KVLayout(NamedTuple):
    """The KV groups of a model.

    Attributes:
        groups: what each group sees.
        layers_per_group: the pool's layers.
        group_of: each layer's group.
        pool_layer_of: each layer's layer of the pool.
    """

    groups: tuple[KVGroup, ...]
    layers_per_group: int
    group_of: tuple[int, ...]
    pool_layer_of: tuple[int, ...]


def lay_out(windows: Sequence[int | None]) -> KVLayout:
    """Cuts layers into groups of one size: as few groups as `MOST_PADDING` allows.

    Args:
        windows: for each layer, the positions that a token sees, itself included; None: all.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = next(size for size in range(max(counts), 0, -1) if all(-count % size <= count * MOST_PADDING for count in counts))
    groups: list[KVGroup] = []
    group_of, pool_layer_of = [0] * len(windows), [0] * len(windows)
    # Full groups come first: how far a prefix is cached is asked of them first.
    for window in sorted(kinds, key=lambda window: 0 if window is None else window):
        for number, layer in enumerate(kinds[window]):
            if number % size == 0:
                groups.append(KVGroup(window))
            group_of[layer], pool_layer_of[layer] = len(groups) - 1, number % size
    return KVLayout(tuple(groups), size, tuple(group_of), tuple(pool_layer_of))
