"""How the parameters of a model are cut, from the axis words of its `WEIGHTS` alone.

A replica's devices have three axes: `expert`, and the two that `tensor` falls into, `kv` x `group` with `kv = gcd(tensor, kv_heads)`.
Key and value heads lie on `kv` and are the same all over `group`; query heads, feed-forward blocks and the vocabulary lie on both. So a
device holds whole heads, and the query heads that it holds belong to its own key and value heads: where both axes are more than 1
and there are several of those, its query heads are not neighbours, but an equal share of each key head's.
"""

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpaged.parallel.mesh_config import MeshShape

KV, GROUP, EXPERT = "kv", "group", "expert"
TENSOR_AXES = (KV, GROUP)
REPLICA_AXES = (EXPERT, KV, GROUP)

_STACKED = {"{layer}": "layers", "{expert}": "experts"}
ALIASES: Mapping[str, str] = MappingProxyType({"shared_ffw": "ffw", "gate_up": "ffw"})
"""Words of single families -> those of the mesh's table. `gate_up` is two numbers for each of ffw, side by side."""


class Sliceable(Protocol):
    """A parameter of which parts can be taken: a numpy array, or one in a file, which `np.asarray` reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Any: ...

    def __array__(self) -> np.ndarray: ...


class Cut(NamedTuple):
    """One dimension of a parameter, dealt out.

    Attributes:
        axes: of the replica's mesh; the last one changes fastest.
        parts: for each device along them, what it holds: runs [first, stop).
        size: numbers that each holds; those beyond its runs are 0.
    """

    axes: tuple[str, ...]
    parts: tuple[tuple[tuple[int, int], ...], ...]
    size: int


Cuts = tuple[Cut | None, ...]
"""For each dimension of a parameter; None: whole on every device."""


class ReplicaShape(NamedTuple):
    """Devices along the axes of one replica, and the table of the mesh file."""

    expert: int
    kv: int
    group: int
    table: Mapping[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """By axis, in the order of `REPLICA_AXES`."""
        return {EXPERT: self.expert, KV: self.kv, GROUP: self.group}

    @property
    def pool_parts(self) -> int:
        """Parts that the KV heads of the page pool are cut into."""
        return self.kv if "kv_heads" in self.table else 1


def replica_shape(mesh: MeshShape, kv_heads: int) -> ReplicaShape:
    """Cuts `tensor` in two. Devices beyond the number of key and value heads hold copies of them."""
    kv = math.gcd(mesh.tensor, kv_heads)
    return ReplicaShape(mesh.expert, kv, mesh.tensor // kv, mesh.table)


def cut_parameters(weights_table: Mapping[str, tuple[str, str]], axis_sizes: Mapping[str, int], replica: ReplicaShape) -> dict[str, Cuts]:
    """Parameter path -> how it is cut.

    Args:
        weights_table: a family's `WEIGHTS`.
        axis_sizes: sizes of its axis words.
    """
    cuts: dict[str, Cuts] = {}
    for name, (path, pattern) in weights_table.items():
        cuts[path] = tuple(_cut(words, axis_sizes, replica) for words in axis_words(name, pattern))
    return cuts


def axis_words(name: str, pattern: str) -> list[list[str]]:
    """For each dimension of a parameter the axis words that it is made of, as an entry of `WEIGHTS` says."""
    return [[axis] for word, axis in _STACKED.items() if word in name] + _dims(pattern.split("->")[1])


def own_part(array: Sliceable, cuts: Cuts, at: Mapping[str, int], sizes: Mapping[str, int]) -> np.ndarray:
    """What one device holds of a parameter: a view of it where it can be.

    Args:
        array: the whole parameter, as the checkpoint has it. Of one in a file nothing is read but the part.
        at: the device's place along each axis of the replica's mesh.
        sizes: of those axes.
    """
    narrowed: list[tuple[int, tuple[tuple[int, int], ...], int]] = []
    gathered: list[tuple[int, tuple[tuple[int, int], ...], int]] = []
    for dim, cut in enumerate(cuts):
        if cut is not None:
            index = 0
            for axis in cut.axes:
                index = index * sizes[axis] + at[axis]
            runs = cut.parts[index]
            missing = cut.size - sum(stop - first for first, stop in runs)
            (gathered if missing or len(runs) > 1 else narrowed).append((dim, runs, missing))
    # Parts are put together last, for that reads what is in a file.
    for dim, runs, missing in (*narrowed, *gathered):
        parts: list[Any] = [array[(slice(None),) * dim + (slice(*run),)] for run in runs]
        if missing:
            parts.append(np.zeros((*array.shape[:dim], missing, *array.shape[dim + 1 :]), array.dtype))
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)
    return np.asarray(array)


def _dims(side: str) -> list[list[str]]:
    """ "(heads head_dim) embed" -> [["heads", "head_dim"], ["embed"]]."""
    dims: list[list[str]] = []
    is_inside = False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            is_inside = word == "("
            if is_inside:
                dims.append([])
        elif is_inside:
            dims[-1].append(word)
        else:
            dims.append([word])
    return dims


def _cut(words: list[str], axis_sizes: Mapping[str, int], replica: ReplicaShape) -> Cut | None:
    word = ALIASES.get(words[0], words[0])
    if word not in replica.table:
        return None
    axes = {"kv_heads": (KV,), "experts": (EXPERT,)}.get(word, TENSOR_AXES)
    num_parts = math.prod(replica.sizes[axis] for axis in axes)
    num_units = axis_sizes[words[0]] // (2 if words[0] == "gate_up" else 1)
    if num_parts == 1 or num_units == 1:
        # An axis of one is never cut: a layer knows a part by its being smaller than the whole.
        return None
    unit = math.prod(axis_sizes[inner] for inner in words[1:]) * (2 if words[0] == "gate_up" else 1)
    if word == "heads":
        runs = _runs_of_heads(num_units, axis_sizes["kv_heads"], replica)
    else:
        each = -(-num_units // num_parts)
        runs = [[(min(part * each, num_units), min((part + 1) * each, num_units))] for part in range(num_parts)]
    size = max(sum(stop - first for first, stop in part) for part in runs) * unit
    return Cut(axes, tuple(tuple((first * unit, stop * unit) for first, stop in part) for part in runs), size)


def _runs_of_heads(heads: int, kv_heads: int, replica: ReplicaShape) -> list[list[tuple[int, int]]]:
    """Each device's share of the query heads of each of its key heads. `group` divides those of one: it has no part in common with kv."""
    per_kv_head, own_kv_heads = heads // kv_heads, kv_heads // replica.kv
    share = per_kv_head // replica.group
    runs: list[list[tuple[int, int]]] = []
    for kv, group in itertools.product(range(replica.kv), range(replica.group)):
        own: list[tuple[int, int]] = []
        for kv_head in range(kv * own_kv_heads, (kv + 1) * own_kv_heads):
            first = kv_head * per_kv_head + group * share
            # Neighbours are one run, so that a part is a view of the whole.
            own = [*own[:-1], (own[-1][0], first + share)] if own and own[-1][1] == first else [*own, (first, first + share)]
        runs.append(own)
    return runs
