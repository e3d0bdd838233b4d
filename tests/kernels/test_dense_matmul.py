"""Every implementation of the dense matmul against float64, and rows of the native one alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_matmul import OP, dense_matmul
from pallas_kernels.dispatch import UnsupportedKernelError, selecting

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]

SIZES = [
    (1, 1, 1),
    (1, 7, 5),
    (2, 64, 4),
    (3, 65, 63),
    (5, 131, 37),
    (7, 200, 130),
    (13, 15, 66),
    (16, 193, 97),
    (17, 64, 16),
    (70, 96, 80),
]
"""Rows, inputs, outputs."""


def made(num_rows: int, num_in: int, num_out: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and three layers of which the first and the last are NaN."""
    rng = np.random.default_rng(num_rows * 7919 + num_in)
    x = rng.standard_normal((num_rows, num_in)).astype(np.dtype(dtype))
    matrix = np.full((3, num_out, num_in), np.nan, np.dtype(dtype))
    matrix[1] = rng.standard_normal((num_out, num_in))
    return x, matrix


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", list(OP.implementations))
def test_equals_float64_in_each_size(implementation: str, dtype: str) -> None:
    for size in SIZES:
        x, stacked = made(*size, dtype)
        expected = x.astype(np.float64) @ stacked[1].astype(np.float64).T
        # Products are exact to 2**-24 of themselves, sums of n numbers to n times that.
        largest = np.abs(x.astype(np.float64)) @ np.abs(stacked[1].astype(np.float64)).T
        tolerance = (size[1] + 1) * 2.0**-24 * largest
        run = jax.jit(functools.partial(dense_matmul, implementation=implementation))
        for got in (run(x, stacked, layer=jnp.int32(1)), run(x, stacked[1])):
            assert got.dtype == jnp.float32
            assert (np.abs(np.asarray(got, np.float64) - expected) <= tolerance).all(), size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_rows_are_the_same_bits_alone(dtype: str) -> None:
    x, stacked = made(70, 193, 97, dtype)
    run = jax.jit(functools.partial(dense_matmul, implementation="cpu"))
    together = np.asarray(run(x, stacked[1]))
    for count in (1, 2, 3, 8, 15, 69):
        np.testing.assert_array_equal(np.asarray(run(x[:count], stacked[1])), together[:count])
    x[3] = np.nan
    beside = np.asarray(run(x, stacked[1]))
    assert np.isnan(beside[3]).all()
    np.testing.assert_array_equal(np.delete(beside, 3, 0), np.delete(together, 3, 0))


def test_any_number_of_rows_is_native_and_what_cannot_be_done_is_refused() -> None:
    x, stacked = (jnp.asarray(array) for array in made(600, 15, 66, "float32"))
    with selecting({}) as taken:
        dense_matmul(x[:1], stacked[1])
        dense_matmul(x, stacked[1])
    assert {choice.implementation for choice in taken} == {"cpu"}
    half = x.astype(jnp.bfloat16)
    with pytest.raises(UnsupportedKernelError, match="rows are bfloat16 and the matrix is float32"):
        dense_matmul(half, stacked[1], implementation="cpu")
    with pytest.raises(UnsupportedKernelError, match="numbers are float32 or bfloat16, not float16"):
        dense_matmul(x.astype(jnp.float16), stacked[1].astype(jnp.float16), implementation="cpu")
    with pytest.raises(UnsupportedKernelError, match="exactly when a layer is given"):
        dense_matmul(x, stacked[1], layer=0)
