"""How large a model's parameters are on each device, from their shapes alone."""

from collections.abc import Mapping
from math import gcd, prod

import msgspec
import numpy as np

from jaxpaged.loading.fill import ShapeDtype
from jaxpaged.parallel.cuts import ALIASES, axis_words
from jaxpaged.parallel.mesh_config import MeshShape

_PAIRS = "gate_up"
"""The axis word of numbers that lie side by side in pairs, which are never parted."""


class ParameterSize(msgspec.Struct, frozen=True, array_like=True):
    """One parameter.

    Attributes:
        shape: of the whole.
        axes: for each dimension the axis word by which it may be split, or "".
        dtype_name: as numpy calls it.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype_name: str

    def num_bytes(self, parts: Mapping[str, int]) -> int:
        """Bytes of one device's share.

        Args:
            parts: axis word -> devices that it is split over.
        """
        dims = (_share(size, parts.get(axis, 1), 2 if axis == _PAIRS else 1) for size, axis in zip(self.shape, self.axes, strict=True))
        return prod(dims) * np.dtype(self.dtype_name).itemsize


def parameter_sizes(expected: Mapping[str, ShapeDtype], weights_table: Mapping[str, tuple[str, str]]) -> tuple[ParameterSize, ...]:
    """The sizes of all parameters, in their order.

    Args:
        expected: parameter path -> shape and type.
        weights_table: a family's `WEIGHTS`, whose patterns name the axes; what is not in it is never split.
    """
    axes = {path: tuple(first for first, *_ in axis_words(name, pattern)) for name, (path, pattern) in weights_table.items()}
    sizes = []
    for path, like in expected.items():
        own = axes.get(path, ())
        # A matrix in tiles has an axis more than the pattern tells of.
        words = own if len(own) == len(like.shape) else ("",) * len(like.shape)
        sizes.append(ParameterSize(tuple(like.shape), words, str(np.dtype(like.dtype))))
    return tuple(sizes)


def mesh_parts(mesh: MeshShape, kv_heads: int) -> dict[str, int]:
    """Axis word -> parts that a mesh splits it into; what does not come out even is padded. KV heads are on several devices if need be."""
    counts = {"tensor": mesh.tensor, "expert": mesh.expert}
    parts = {word: counts[axis] for word, axis in mesh.table.items()}
    if "kv_heads" in parts:
        parts["kv_heads"] = gcd(mesh.tensor, kv_heads)
    return parts | {word: parts[alias] for word, alias in ALIASES.items() if alias in parts}


def weight_bytes(sizes: tuple[ParameterSize, ...], parts: Mapping[str, int]) -> int:
    """Bytes of all weights on one device; `parts` as for `ParameterSize.num_bytes`."""
    return sum(size.num_bytes(parts) for size in sizes)


def _share(size: int, parts: int, unit: int) -> int:
    return -(-(size // unit) // parts) * unit
