"""Weights and page pool that leave the device for a while, and come back."""

import jax
import numpy as np


class HostWeights:
    """Copies of weights in host memory; making them gives the device's memory back.

    Args:
        arrays: on the device; each is deleted as soon as it is copied, so that there are never two of more than one.
    """

    def __init__(self, arrays: tuple[jax.Array, ...]) -> None:
        self._copies: list[tuple[np.ndarray, jax.sharding.Sharding]] = []
        for array in arrays:
            # A copy in any case: on CPU the array itself is a view of the device's buffer.
            self._copies.append((np.array(array), array.sharding))
            array.delete()

    def to_device(self) -> tuple[jax.Array, ...]:
        """The same bits on the device again. If there is no room for all, none is left there and the copies stay."""
        arrays: list[jax.Array] = []
        try:
            for copy, sharding in self._copies:
                arrays.append(jax.block_until_ready(jax.device_put(copy, sharding)))
        except BaseException:
            for array in arrays:
                array.delete()
            raise
        return tuple(arrays)
