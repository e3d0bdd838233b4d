"""Weights and page pool that leave the device for a while, and come back."""

import jax
import numpy as np


class HostWeights:
    """Copies of weights in host memory; making them gives the device's memory back.

    Args:
        arrays: on the device; each is deleted as soon as it is copied, so that there are never two of more than one.
    """

    def __init__(self, arrays: tuple[jax.Array, ...]) -> None:
        self._copies: list[_WholeCopy | _PartsCopy] = []
        for array in arrays:
            self._copies.append(_WholeCopy(array) if array.is_fully_addressable else _PartsCopy(array))
            array.delete()

    def to_device(self) -> tuple[jax.Array, ...]:
        """The same bits on the device again. If there is no room for all, none is left there and the copies stay."""
        arrays: list[jax.Array] = []
        try:
            for copy in self._copies:
                arrays.append(jax.block_until_ready(copy.to_device()))
        except BaseException:
            for array in arrays:
                array.delete()
            raise
        return tuple(arrays)


class _WholeCopy:
    """Of an array whose devices are all this process's."""

    def __init__(self, array: jax.Array) -> None:
        # A copy in any case: on CPU the array itself is a view of the device's buffer.
        self._copy, self._sharding = np.array(array), array.sharding

    def to_device(self) -> jax.Array:
        return jax.device_put(self._copy, self._sharding)


class _PartsCopy:
    """Of an array over several processes: what is here of it, device by device."""

    def __init__(self, array: jax.Array) -> None:
        self._shape, self._sharding = array.shape, array.sharding
        self._parts = [(np.array(shard.data), shard.device) for shard in array.addressable_shards]

    def to_device(self) -> jax.Array:
        parts = [jax.device_put(part, device) for part, device in self._parts]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)
