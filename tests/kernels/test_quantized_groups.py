"""Matrices of groups: what GGUF's blocks become, and every implementation of their product against the numbers that are meant."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.native import build
from pallas_kernels.quantized_matmul import OP, Q4Weights, Q8Weights, quantized_matmul
from pallas_kernels.quantized_matmul.cases import CASES, Case, make
from pallas_kernels.quantized_matmul.group_weights import GROUP, TILE, q4_from_gguf, q8_from_gguf, quantize_q4, quantize_q8
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.reference import dequantize

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]
GROUP_CASES = [case for case in CASES if "ci" in case.tags and case.kind in ("q4", "q8")]
BY_NAME = {case.name: case for case in GROUP_CASES}
HAS_COMPILER = build.compiler() is not None
QUANTIZED = ["xla", *(["cpu"] if HAS_COMPILER else [])]
Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


def _meant(weights: Any) -> np.ndarray:
    """Byte by byte as `group_weights.py` says, one matrix in float64."""
    values, scales = np.asarray(weights.values), np.asarray(weights.scales, np.float64)
    tiles, groups, _ = values.shape
    matrix = np.zeros((tiles * TILE, groups * GROUP))
    for place in np.ndindex(TILE, GROUP):
        lane, i = place
        if isinstance(weights, Q4Weights):
            quad, k = divmod(i % 16, 4)
            stored = values[..., (quad * TILE + lane) * 4 + k]
            number = (stored >> 4 if i >= 16 else stored & 15) * scales[..., lane] + np.asarray(weights.minima, np.float64)[..., lane]
        else:
            quad, k = divmod(i, 4)
            number = values[..., (quad * TILE + lane) * 4 + k] * scales[..., lane]
        matrix[lane::TILE, i::GROUP] = number
    return matrix


def _of_layer(weights: Any, layer: int | None) -> Any:
    return weights if layer is None else type(weights)(*(part[layer] for part in weights))


def _summed(x: np.ndarray, weights: Any) -> np.ndarray:
    """The contract's order, with products that are fused with additions: a long double holds each of them and rounds once."""
    high, low, scales = (np.asarray(part) for part in quantize_rows(jnp.asarray(x)))
    rows = high.astype(np.int64) * 128 + low
    values = np.asarray(weights.values)
    tiles, groups, _ = values.shape
    ones = np.ones_like(np.asarray(weights.scales))
    minima = np.asarray(weights.minima) if isinstance(weights, Q4Weights) else None
    plain = weights._replace(scales=ones) if minima is None else weights._replace(scales=ones, minima=np.zeros_like(ones))
    numbers = _meant(plain).astype(np.int64)
    added = np.zeros((len(x), tiles * TILE), np.float32)
    for group in range(groups):
        own = slice(group * GROUP, (group + 1) * GROUP)
        sums = (rows[:, own] @ numbers[:, own].T).astype(np.float32).astype(np.longdouble)
        added = (sums * np.asarray(weights.scales)[:, group].reshape(-1) + added).astype(np.float32)
        if minima is not None:
            of_rows = rows[:, own].sum(1).astype(np.longdouble)
            added = (of_rows[:, None] * minima[:, group].reshape(-1) + added).astype(np.float32)
    return added * scales[:, None]


@functools.cache
def _jitted(implementation: str | None):
    return jax.jit(functools.partial(quantized_matmul, implementation=implementation))


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        pytest.param(case, implementation, id=f"{case.name}-{implementation}")
        for case in GROUP_CASES
        for implementation in ("reference", *QUANTIZED)
        if implementation == "cpu" or case.name not in ("q4_rows_45", "q8_one_row")
    ],
)
def test_equals_the_matrix_that_is_meant(case: Case, implementation: str) -> None:
    for dtype in ("float32", "bfloat16") if (implementation, case.num_rows) == ("cpu", 13) else ("float32",):
        x, weights = make(case, dtype=dtype)
        options, layer = ({}, None) if case.layers is None else ({"layer": jnp.int32(1)}, 1)
        own = _of_layer(weights, layer)
        if layer is not None:
            spoiled = np.full_like(weights.scales, np.nan)
            spoiled[layer] = weights.scales[layer]
            weights = weights._replace(scales=spoiled)
        got = np.asarray(_jitted(implementation)(x, weights, **options))
        assert (got.dtype, got.shape) == (np.float32, (case.num_rows, case.num_out))
        high, low, scales = (np.asarray(part).astype(np.float64) for part in quantize_rows(jnp.asarray(x)))
        rows, matrix = (high * 128 + low) * scales[:, None], _meant(own)
        # What float32 may err: each group's product and minimum are rounded, and what was added up before them.
        size = np.abs(rows).reshape(case.num_rows, -1, GROUP).sum(-1) @ (np.abs(matrix).reshape(case.num_out, -1, GROUP).max(-1) * 2).T
        assert (np.abs(got - rows @ matrix.T) <= size * (2 * case.num_in / GROUP + 4) * 2.0**-24).all()
        np.testing.assert_array_equal(got, np.asarray(_jitted(implementation)(x, weights, **options)))


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("q4_primes", "xla"), *((name, "cpu") for name in ("q4_primes", "q8_primes", "q4_rows_45") if HAS_COMPILER)],
)
def test_groups_are_summed_in_the_order_of_the_contract(name: str, implementation: str) -> None:
    """Native kernels give equal bits; XLA may round products before it adds them, half a unit of a sum that is no larger than all terms."""
    x, weights = make(BY_NAME[name])
    weights = _of_layer(weights, None if BY_NAME[name].layers is None else 0)
    got, expected = np.asarray(_jitted(implementation)(x, weights)), _summed(x, weights)
    if implementation == "cpu":
        np.testing.assert_array_equal(got, expected)
    assert np.abs(got - expected).max() <= 2.0**-18 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, implementation)
        for name in ("q4_primes", "q8_primes")
        for implementation in QUANTIZED
        if (name, implementation) != ("q8_primes", "xla")
    ],
)
def test_a_row_is_the_same_alone_and_among_others(name: str, implementation: str) -> None:
    """Beside rows that hold NaN and infinities too, which come out as NaN themselves."""
    x, weights = make(BY_NAME[name])
    expected = np.asarray(_jitted(implementation)(x, weights))
    for start, stop in ((1, 2), (2, 9)):
        np.testing.assert_array_equal(np.asarray(_jitted(implementation)(x[start:stop], weights)), expected[start:stop])
    assert (expected[0] == 0).all()
    for spoiled, number in ((0, np.nan), (3, np.inf), (7, -np.inf)):
        changed = x.copy()
        changed[spoiled, 5] = number
        got = np.asarray(_jitted(implementation)(changed, weights))
        others = np.arange(len(x)) != spoiled
        np.testing.assert_array_equal(got[others], expected[others])
        assert np.isnan(got[spoiled]).all()


@pytest.mark.parametrize("implementation", ["reference", *QUANTIZED])
def test_the_largest_numbers_do_not_overflow(implementation: str) -> None:
    x = np.full((2, 2 * GROUP), 3.0, np.float32)
    x[1] *= -1
    ones = np.ones((1, 2, TILE), np.float16)
    four = Q4Weights(np.full((1, 2, 256), 255, np.uint8), ones, np.zeros_like(ones))
    eight = Q8Weights(np.full((1, 2, 512), -128, np.int8), ones)
    for weights, number in ((four, 15), (eight, -128)):
        expected = np.array([[1.0], [-1.0]]) * 2 * GROUP * 3.0 * number * np.ones(TILE)
        np.testing.assert_allclose(np.asarray(_jitted(implementation)(x, weights)), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0], ids=lambda kind: kind.name)
def test_blocks_of_a_file_stand_for_what_the_gguf_package_makes_of_them(kind: GGMLQuantizationType) -> None:
    """Bit for bit; every byte occurs as a pair of nibbles or as a number."""
    random = np.random.default_rng(0)
    stored = gguf_quantize(random.standard_normal((48, 192)).astype(np.float32) * 10.0 ** random.uniform(-4, 2, (48, 1)), kind)
    stored = stored.reshape(48, 6, -1)
    stored[:8, :, -16:] = np.arange(8 * 6 * 16, dtype=np.uint16).reshape(8, 6, 16).astype(np.uint8)
    stored = stored.reshape(48, -1)
    weights = q8_from_gguf(stored) if kind == Q8_0 else q4_from_gguf(stored, has_minima=kind == Q4_1)
    expected = gguf_dequantize(stored, kind)
    np.testing.assert_array_equal(np.asarray(jax.jit(dequantize)(weights)), expected)
    np.testing.assert_array_equal(_meant(weights).astype(np.float32), expected)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0], ids=lambda kind: kind.name)
def test_scales_that_are_no_numbers_are_refused(kind: GGMLQuantizationType) -> None:
    stored = gguf_quantize(np.ones((16, 32), np.float32), kind)
    stored[3, 1] = 0x7C
    with pytest.raises(ValueError, match="NaN or infinite"):
        q8_from_gguf(stored) if kind == Q8_0 else q4_from_gguf(stored, has_minima=kind == Q4_1)


def test_our_own_numbers_err_by_half_a_step() -> None:
    random = np.random.default_rng(1)
    weight = (random.standard_normal((32, 96)) * 10.0 ** random.uniform(-3, 2, (32, 1))).astype(np.float32) + 1
    weight[3] = 0
    weight[4] = 2.5
    for weights, levels in ((quantize_q4(weight), 15), (quantize_q8(weight), 127)):
        groups = weight.reshape(32, 3, GROUP)
        step = (groups.max(-1) - groups.min(-1)) / levels if levels == 15 else np.abs(groups).max(-1) / levels
        # Scale and minimum are rounded to float16, eleven bits.
        slack = 2.0**-11 * 2 * np.abs(groups).max(-1)
        error = np.abs(_meant(weights).reshape(groups.shape) - groups).max(-1)
        assert (error <= 0.5 * step + slack).all()
        assert (_meant(weights)[3] == 0).all()
        np.testing.assert_allclose(_meant(weights)[4], 2.5, rtol=1e-3)
    for number in (np.nan, np.inf, -np.inf, 1e38):
        weight[5, 40] = number
        for quantize in (quantize_q4, quantize_q8):
            with pytest.raises(ValueError, match="NaN or infinite"):
                quantize(weight)


_Q4, _Q8 = make(BY_NAME["q4_one_row"])[1], make(BY_NAME["q8_one_row"])[1]
_X = np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
    ("x", "weights", "options", "words"),
    [
        (_X, _Q4, {"layer": 0}, "leading layers axis"),
        (_X[:, 1:], _Q4, {}, "rows of 31 numbers for a matrix that takes 32"),
        (_X, _Q4._replace(minima=_Q4.minima.astype(np.float32)), {}, r"float16 \(1, 1, 16\), not float32"),
        (_X, _Q4._replace(scales=_Q4.scales[..., 1:]), {}, r"not float16 \(1, 1, 15\)"),
        (_X, _Q4._replace(values=_Q4.values.view(np.int8)), {}, "values of Q4Weights are uint8, not int8"),
        (_X, _Q8, {}, "rows of 32 numbers for a matrix that takes 64"),
        (_X, Q8Weights(_Q4.values.view(np.int8), _Q4.scales), {}, "512 bytes a tile and group, not 256"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(x: Any, weights: Any, options: dict, words: str) -> None:
    with pytest.raises(UnsupportedKernelError, match=words):
        choose(OP, None, (x, weights), {"layer": None, **options})


def test_a_gpu_kernel_that_is_asked_for_is_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="Q4Weights are left to XLA"):
        choose(OP, "mosaic_gpu", (_X, _Q4), {"layer": None})


def test_float16_rows_are_left_to_xla() -> None:
    x, weights = make(BY_NAME["q4_primes"], dtype="float16")
    np.testing.assert_array_equal(np.asarray(_jitted(None)(x, weights)), np.asarray(_jitted("xla")(x.astype(np.float32), weights)))


def test_many_rows_run_by_the_same_kernel_as_few() -> None:
    lowered = [jax.jit(quantized_matmul).lower(np.zeros((rows, 32), np.float32), _Q4).as_text() for rows in (1, 300)]
    assert [("jaxpaged_q4_matmul" in text) for text in lowered] == [HAS_COMPILER] * 2
