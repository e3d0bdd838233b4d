"""Arrays as columns of one, and back."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxpaged.packed_columns import as_columns, from_columns

pytestmark = pytest.mark.jax


class Mixed(NamedTuple):
    """Types in any order."""

    first: np.ndarray
    second: np.ndarray
    wide: np.ndarray
    flag: np.ndarray
    last: np.ndarray


def test_every_bit_comes_back() -> None:
    """NaN with its payload, zeros of both signs and the least numbers among them; of some of the rows alone, too."""
    bits = np.array([0x7FC01234, 0x80000000, 1, 0xFF800000], np.uint32)
    arrays = Mixed(
        np.array([3, -1, 2**31 - 1, -(2**31)], np.int32),
        bits.view(np.float32),
        np.stack([np.arange(4, dtype=np.float32), bits.view(np.float32)], axis=1),
        np.array([True, False, False, True]),
        -bits.view(np.float32),
    )
    for rows in (slice(None), [2, 0]):
        got = jax.jit(lambda arrays, rows=rows: from_columns(as_columns(arrays)[np.arange(4)[rows]], arrays))(arrays)
        for own, wanted in zip(got, arrays, strict=True):
            wanted = wanted[rows]
            assert own.dtype == wanted.dtype
            assert np.asarray(own).tobytes() == wanted.tobytes()
