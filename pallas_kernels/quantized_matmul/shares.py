"""Who multiplies what: the units of all tiles of a matrix form a line, which is cut into equal ranges, one a CTA.

It depends on the matrix and the number of multiprocessors only, not on the rows: so do the order of a sum and its bits.
"""

from typing import NamedTuple

from jax import lax
from jax import numpy as jnp
from jaxtyping import Array

MIN_UNITS = 2
"""Units a CTA takes at least: with fewer, its start and its part of the result cost more than its weights."""


class Shares(NamedTuple):
    """Tiles of outputs, each of the same number of units of inputs, over CTAs."""

    num_out: int
    num_tiles: int
    num_units: int
    num_ctas: int

    @property
    def num_parts(self) -> int:
        """Part c + t is CTA c's of tile t: no other CTA and tile have the same, and the parts of a tile lie side by side."""
        return self.num_tiles + self.num_ctas - 1

    def range_of(self, cta: Array) -> tuple[Array, Array]:
        """The CTA's units, first and behind the last."""
        total, num_ctas = jnp.int32(self.num_tiles * self.num_units), jnp.int32(self.num_ctas)
        return lax.div(cta * total, num_ctas), lax.div((cta + 1) * total, num_ctas)

    def place_of(self, position: Array) -> tuple[Array, Array]:
        """Tile, and unit in the tile."""
        num_units = jnp.int32(self.num_units)
        return lax.div(position, num_units), lax.rem(position, num_units)

    def parts_of(self, tile: int) -> range:
        """The parts that a tile is the sum of."""
        first, last = tile * self.num_units, (tile + 1) * self.num_units - 1
        return range(tile + self._cta_of(first), tile + self._cta_of(last) + 1)

    def _cta_of(self, position: int) -> int:
        # The largest c with c * total // num_ctas <= position.
        return ((position + 1) * self.num_ctas - 1) // (self.num_tiles * self.num_units)


def share_out(num_out: int, tile_out: int, num_units: int, max_ctas: int) -> Shares:
    """Shares of a matrix of so many outputs, whose rows have so many units."""
    num_tiles = -(-num_out // tile_out)
    return Shares(num_out, num_tiles, num_units, max(1, min(max_ctas, num_tiles * num_units // MIN_UNITS)))
