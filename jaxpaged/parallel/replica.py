"""The devices of one copy of a model, and its arrays on them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.parallel.cuts import KV, REPLICA_AXES, Cuts, ReplicaShape, Sliceable, own_part

_POOL_KV_HEADS = 2
"""Dimension of the page pool that lies on `kv`."""


class Replica(NamedTuple):
    """One copy of a model on devices of its own.

    Attributes:
        mesh: axes `REPLICA_AXES`.
        shape: its sizes and the table.
        cuts: parameter path -> how it is cut.
    """

    mesh: Mesh
    shape: ReplicaShape
    cuts: Mapping[str, Cuts]

    @classmethod
    def over(cls, devices: Sequence[jax.Device], shape: ReplicaShape, cuts: Mapping[str, Cuts]) -> "Replica":
        """Lays the devices out, neighbours along `group` first."""
        return cls(Mesh(np.array(devices).reshape(tuple(shape.sizes.values())), REPLICA_AXES), shape, cuts)

    @property
    def devices(self) -> list[jax.Device]:
        """All of them, in order."""
        return list(self.mesh.devices.flat)

    @property
    def whole(self) -> NamedSharding:
        """Of arrays that every device has."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def pool(self) -> NamedSharding:
        """Of the page pool."""
        axis = KV if self.shape.pool_parts > 1 else None
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * _POOL_KV_HEADS, axis))

    def put(self, path: str, array: Sliceable) -> jax.Array:
        """A parameter's parts on their devices, one after another: none of them is on the host for longer than its own transfer."""
        cuts, sizes = self.cuts[path], self.shape.sizes
        parts = [
            jax.device_put(own_part(array, cuts, dict(zip(sizes, place, strict=True)), sizes), device)
            for place, device in np.ndenumerate(self.mesh.devices)
            if device.process_index == jax.process_index()
        ]
        shape = [length if cut is None else cut.size * len(cut.parts) for length, cut in zip(array.shape, cuts, strict=True)]
        spec = PartitionSpec(*(None if cut is None else cut.axes for cut in cuts))
        return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(self.mesh, spec), parts)
