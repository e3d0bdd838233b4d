"""Counts and places along an axis against numpy."""

import jax
import numpy as np
import pytest

from jaxpaged.exact_counts import count, first_place, last_place

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("size", [1, 31, 33, 1000, 49152])
def test_counts_and_places_equal_numpy(size: int) -> None:
    rng = np.random.default_rng(size)
    holds = rng.random((6, size)) < np.array([0.5, 0.01, 0.99, 0, 1, 0])[:, None]
    holds[5, -1] = True
    assert np.array_equal(jax.jit(count)(holds), holds.sum(axis=1))
    first = np.where(holds.any(axis=1), holds.argmax(axis=1), size)
    assert np.array_equal(jax.jit(first_place)(holds), first)
    last = np.where(holds.any(axis=1), size - 1 - holds[:, ::-1].argmax(axis=1), size - 1)
    assert np.array_equal(jax.jit(last_place)(holds), last)
