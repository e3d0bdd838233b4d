"""Norms and gated products: every implementation against float64, and rows of the native ones alone."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_product, rms_norm
from pallas_kernels.dispatch import UnsupportedKernelError

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]

SIZES = [(1, 1), (3, 144), (67, 603)]
"""Rows and their widths: of one vector, of parts of one, and more than a chunk of the native norm."""
EPS = 1e-5
NORMS = [{}, {"is_scaled_wide": True}, {"is_scaled_wide": True, "offset": 1.0}]


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.dtype(dtype))


def tolerance_of(dtype: str) -> float:
    """A few roundings of the type, and of float32."""
    return 2.0 * float(jnp.finfo(dtype).eps) + 8 * float(jnp.finfo(jnp.float32).eps)


def in_float64(activation: str, x: np.ndarray) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("options", NORMS, ids=["narrow", "wide", "offset"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", list(rms_norm.OP.implementations))
def test_norms_equal_float64(implementation: str, dtype: str, options: dict[str, Any]) -> None:
    run = jax.jit(functools.partial(rms_norm.rms_norm, eps=EPS, implementation=implementation, **options))
    for num_rows, width in SIZES:
        x, weight = normal((num_rows, width), dtype, width), normal((3, width), dtype, 1)
        weight[[0, 2]] = np.nan
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * (weight[1].astype(np.float64) + options.get("offset", 0))
        for got in (run(x, weight, layer=jnp.int32(1)), run(x[:, None], weight[1])[:, 0]):
            assert got.dtype == dtype
            np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance_of(dtype), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", list(gated_product.ACTIVATIONS))
@pytest.mark.parametrize("implementation", list(gated_product.OP.implementations))
def test_gated_products_equal_float64(implementation: str, activation: str, dtype: str) -> None:
    if implementation == "cpu" and activation == "gelu":
        with pytest.raises(UnsupportedKernelError, match="gelu is left to XLA"):
            gated_product.gated_product(*jnp.ones((2, 1, 1)), activation=activation, dtype=dtype, implementation=implementation)
        return
    run = jax.jit(functools.partial(gated_product.gated_product, activation=activation, dtype=dtype, implementation=implementation))
    for num_rows, width in SIZES:
        gate, up = normal((num_rows, width), dtype, width) * np.asarray(4, dtype), normal((num_rows, width), dtype, 1)
        activated = in_float64(activation, gate.astype(np.float64))
        from_wide = run(gate.astype(np.float32), up.astype(np.float32))
        got = run(gate, up)
        np.testing.assert_array_equal(np.asarray(from_wide), np.asarray(got))
        assert got.dtype == dtype
        expected = activated * up.astype(np.float64)
        # Where the activation nears 0 it is a small difference, of numbers that XLA rounds to the type after every operation.
        operands = np.abs(gate.astype(np.float64) * up)
        tolerance = (
            2 * tolerance_of(dtype) * np.abs(expected) + 2 * tolerance_of(dtype if implementation == "xla" else "float32") * operands
        )
        assert (np.abs(np.asarray(got, np.float64) - expected) <= tolerance).all()


def test_sums_are_rounded_to_the_results_type_first() -> None:
    run = functools.partial(gated_product.gated_product, activation="silu", dtype=jnp.bfloat16)
    gate, up = jnp.asarray(normal((4, 50), "float32", 1)), jnp.asarray(normal((4, 50), "float32", 2))
    for implementation in ("cpu", "xla"):
        rounded = run(gate.astype(jnp.bfloat16), up.astype(jnp.bfloat16), implementation=implementation)
        np.testing.assert_array_equal(np.asarray(run(gate, up, implementation=implementation)), np.asarray(rounded))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_rows_are_the_same_bits_alone_and_nan_stays_in_its_row(dtype: str) -> None:
    x, up, weight = normal((67, 603), dtype, 1), normal((67, 603), dtype, 2), normal((603,), dtype, 3)
    norm = jax.jit(functools.partial(rms_norm.rms_norm, eps=EPS, implementation="cpu"))
    gated = jax.jit(functools.partial(gated_product.gated_product, activation="silu", dtype=dtype, implementation="cpu"))
    for run in (lambda rows: norm(x[rows], weight), lambda rows: gated(x[rows], up[rows])):
        together = np.asarray(run(slice(None)))
        for rows in (slice(1), slice(41, 44), slice(66, 67)):
            np.testing.assert_array_equal(np.asarray(run(rows)), together[rows])
        before, x[3, 5] = x[3, 5], np.nan
        beside = np.asarray(run(slice(None)))
        x[3, 5] = before
        assert np.isnan(beside[3, 5])
        np.testing.assert_array_equal(np.delete(beside, 3, 0), np.delete(together, 3, 0))


def test_what_cannot_be_done_is_refused() -> None:
    x = jnp.ones((2, 8))
    for x_of, weight, layer, reason in (
        (x, jnp.ones((1, 8)), None, "exactly when a layer is given"),
        (x, jnp.ones(8, jnp.bfloat16), None, "rows are float32 and the weight is bfloat16"),
        (x.astype(jnp.float16), jnp.ones(8, jnp.float16), None, "numbers are float32 or bfloat16, not float16"),
    ):
        with pytest.raises(UnsupportedKernelError, match=reason):
            rms_norm.rms_norm(x_of, weight, eps=EPS, layer=layer, implementation="cpu")
    for up, dtype, activation, reason in (
        (x.astype(jnp.bfloat16), "float32", "silu", "differ"),
        (x, "float16", "silu", "not float16 of float32"),
        (x, "float32", "relu", "not relu"),
    ):
        with pytest.raises(UnsupportedKernelError, match=reason):
            gated_product.gated_product(x, up, activation=activation, dtype=dtype, implementation="cpu")
