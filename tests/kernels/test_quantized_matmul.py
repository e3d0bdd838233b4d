"""Every implementation of quantized matmul against the matrix that its numbers stand for, in float64, and what makes and repacks them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.native import build
from pallas_kernels.quantized_matmul import MAX_INT8_INPUTS, OP, cpu, quantize_fp8, quantize_int4, quantize_int8, quantized_matmul, xla
from pallas_kernels.quantized_matmul.cases import CASES, Case, make
from pallas_kernels.quantized_matmul.quantize import pack_nibbles, quantize_rows
from pallas_kernels.quantized_matmul.reference import dequantize
from pallas_kernels.quantized_matmul.repack import from_awq, from_gptq
from pallas_kernels.quantized_matmul.weights import LEVELS, ROW_LEVELS, Int4Weights, Int8Weights

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]
CI_CASES = [case for case in CASES if "ci" in case.tags and case.kind in ("int8", "int4", "fp8")]  # others: test_quantized_groups.py
HAS_COMPILER = build.compiler() is not None
# mosaic_gpu is in test_quantized_mosaic.py
IMPLEMENTATIONS = [name for name in OP.implementations if name != "mosaic_gpu" and (name != "cpu" or HAS_COMPILER)]
EXACT = [name for name in IMPLEMENTATIONS if name != "reference"]
BY_NAME = {case.name: case for case in CASES}
RUNS = [
    pytest.param(case, implementation, dtype, id=f"{case.name}-{implementation}-{dtype}")
    for case in CI_CASES
    for implementation in IMPLEMENTATIONS
    if implementation != "cpu" or case.kind == "int8"
    for dtype in ("float32", *(["bfloat16"] if case.name.endswith("primes") and implementation != "reference" else []))
]


def _rows_in_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, number by number; the step is a float32, as the contract has it."""
    values, scales = np.zeros(x.shape), np.zeros(len(x))
    for row, numbers in enumerate(x.astype(np.float32)):
        peak = max(abs(numbers))
        if peak:
            values[row] = [round(float(number * (np.float32(ROW_LEVELS) / peak))) for number in numbers]
            scales[row] = peak / ROW_LEVELS
    return values, scales


def _meant(weights: Any) -> np.ndarray:
    """What the numbers of a matrix, or of a stack of them, stand for, in float64."""
    values, scales = np.asarray(weights.values), np.asarray(weights.scales, np.float64)
    if not isinstance(weights, Int4Weights):
        return values.astype(np.float64) * scales[..., None]
    nibbles = np.zeros((*values.shape[:-1], 2 * values.shape[-1]))
    nibbles[..., 0::2], nibbles[..., 1::2] = values % 16, values // 16
    signed = np.where(nibbles > 7, nibbles - 16, nibbles)
    scales, zeros = (np.swapaxes(part.astype(np.float64), -1, -2) for part in (scales, np.asarray(weights.zeros)))
    group_of = np.arange(nibbles.shape[-1]) // (nibbles.shape[-1] // scales.shape[-1])
    return (signed - zeros[..., group_of]) * scales[..., group_of]


def _expected(case: Case, x: np.ndarray, weights: Any, layer: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The products, and for each the sum of its terms' sizes, which bounds what float32 may err."""
    matrix = _meant(weights) if layer is None else _meant(weights)[layer]
    rows = x.astype(np.float64)
    if case.kind == "int8":
        values, scales = _rows_in_int8(x)
        rows = values * scales[:, None]
    return rows @ matrix.T, np.abs(rows) @ np.abs(matrix).T


def _spoil_others(weights: Any, layer: int) -> Any:
    """Scales of the other layers are NaN."""
    scales = np.full_like(weights.scales, np.nan)
    scales[layer] = weights.scales[layer]
    return weights._replace(scales=scales)


@functools.cache
def _jitted(implementation: str | None):
    return jax.jit(functools.partial(quantized_matmul, implementation=implementation))


@pytest.mark.parametrize(("case", "implementation", "dtype"), RUNS)
def test_equals_the_matrix_that_is_meant(case: Case, implementation: str, dtype: str) -> None:
    x, weights = make(case, dtype=dtype)
    layer = None if case.layers is None else case.layers - 1
    if layer is not None:
        weights = _spoil_others(weights, layer)
    options = {} if layer is None else {"layer": jnp.int32(layer)}
    got = np.asarray(_jitted(implementation)(x, weights, **options))
    assert got.dtype == np.float32
    expected, size = _expected(case, x, weights, layer)
    # Sums in any order of `in` float32 products, each rounded; int8: a few roundings of an exact sum, the reference apart.
    # XLA widens int4 to the rows' type, which rounds each weight once more in bfloat16.
    epsilon = 2.0**-9 if (case.kind, implementation, dtype) == ("int4", "xla", "bfloat16") else 0.0
    assert (np.abs(got - expected) <= size * (epsilon + (case.num_in + 4) * 2.0**-24)).all()
    assert (got[: case.num_rows > 1] == 0).all()
    np.testing.assert_array_equal(got, np.asarray(_jitted(implementation)(x, weights, **options)))


@pytest.mark.parametrize("case", [BY_NAME[name] for name in ("int8_primes", "int8_rows_37")], ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", EXACT)
def test_int8_is_summed_exactly(case: Case, implementation: str) -> None:
    """Int64 sums of the same parts, then three multiplications and a sum in float32, in the order of the contract: equal bits."""
    x, weights = make(case)
    if case.layers is not None:
        weights = Int8Weights(*(np.asarray(part)[0] for part in weights))
    high, low, scales = (np.asarray(part) for part in quantize_rows(jnp.asarray(x)))
    matrix = np.asarray(weights.values).astype(np.int64).T
    of_high, of_low = ((part.astype(np.int64) @ matrix).astype(np.float32) for part in (high, low))
    expected = (of_high * np.float32(128) + of_low) * weights.scales * scales[:, None]
    np.testing.assert_array_equal(np.asarray(_jitted(implementation)(x, weights)), expected)


@pytest.mark.parametrize("implementation", EXACT)
def test_a_row_is_the_same_alone_and_among_others(implementation: str) -> None:
    """Beside rows that hold NaN and infinities too, which come out as NaN themselves."""
    x, weights = make(BY_NAME["int8_primes"])
    expected = np.asarray(_jitted(implementation)(x, weights))
    for row in range(1, len(x)):
        np.testing.assert_array_equal(np.asarray(_jitted(implementation)(x[row : row + 1], weights))[0], expected[row])
    for spoiled, number in ((0, np.nan), (3, np.inf), (7, -np.inf), (12, np.nan)):
        changed = x.copy()
        changed[spoiled, 5] = number
        got = np.asarray(_jitted(implementation)(changed, weights))
        others = np.arange(len(x)) != spoiled
        np.testing.assert_array_equal(got[others], expected[others])
        assert np.isnan(got[spoiled]).all()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 17, 40])
def test_all_instructions_give_equal_bits_for_any_number_of_rows(num_rows: int) -> None:
    """Of the processor's paths, each beside XLA; the rows beside a row change nothing."""
    x, weights = make(BY_NAME["int8_rows_37"]._replace(num_rows=41, layers=2))
    weights = _spoil_others(weights, 1)

    def products(x: jax.Array, weights: Int8Weights) -> list[jax.Array]:
        return [multiply(x, weights, layer=1) for multiply in (xla.quantized_matmul, *natives)]

    natives = [functools.partial(cpu.quantized_matmul, most=path) for path in cpu.paths()]
    assert bool(natives) == HAS_COMPILER
    whole = np.asarray(xla.quantized_matmul(jnp.asarray(x), Int8Weights(*map(jnp.asarray, weights)), layer=1))
    assert np.isfinite(whole).all()
    for got in jax.jit(products)(x[1 : 1 + num_rows], weights):
        np.testing.assert_array_equal(np.asarray(got), whole[1 : 1 + num_rows])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_largest_numbers_do_not_overflow(implementation: str) -> None:
    """All products as large as they get, in the longest sum that is served."""
    x = np.full((2, MAX_INT8_INPUTS), 3.0, np.float32)
    x[1] *= -1
    weights = Int8Weights(np.full((3, MAX_INT8_INPUTS), LEVELS, np.int8), np.full(3, 2.0, np.float32))
    got = np.asarray(_jitted(implementation)(x, weights))
    # Exact in int8; the reference adds 133,144 float32 products.
    np.testing.assert_allclose(got, np.array([[1.0], [-1.0]]) * MAX_INT8_INPUTS * 3.0 * LEVELS * 2.0 * np.ones(3), rtol=1e-4)


def test_rows_are_rounded_to_the_nearest_even_number() -> None:
    x = np.array([[16256.0, 0.5, 1.5, 2.5, -64.5, -65.5, 191.5], [0, 0, 0, 0, 0, 0, 0], [1e-38] * 7], np.float32)
    high, low, scales = (np.asarray(part) for part in quantize_rows(jnp.asarray(x)))
    np.testing.assert_array_equal(high, [[127, 0, 0, 0, 0, -1, 2], [0] * 7, [0] * 7])
    np.testing.assert_array_equal(low, [[0, 0, 2, 2, -64, 62, -64], [0] * 7, [0] * 7])
    np.testing.assert_allclose(scales, [1, 0, 0], rtol=1e-7)


@pytest.mark.parametrize("width", [7, 131, 320, 576])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_none_has_the_scale_nan_wherever_it_stands(width: int, number: float) -> None:
    x = np.zeros((width + 1, width), np.float32)
    x[:-1][np.eye(width, dtype=bool)] = number
    scales = np.asarray(jax.jit(quantize_rows)(x).scales)
    assert np.isnan(scales[:-1]).all()
    assert scales[-1] == 0


def test_parts_of_rows_stay_within_int8() -> None:
    """Every number of 15 bits, so that no part wraps around."""
    x = np.arange(-ROW_LEVELS, ROW_LEVELS + 1, dtype=np.float32)[None]
    high, low, _ = (np.asarray(part).astype(np.int64) for part in quantize_rows(jnp.asarray(x)))
    np.testing.assert_array_equal(high * 128 + low, x)
    assert (high.min(), high.max(), low.min(), low.max()) == (-LEVELS, LEVELS, -64, 63)


def test_int8_weights_err_by_half_a_step_of_their_channel() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 5, 67)).astype(np.float32)
    weight[1, 2] = 0
    weights = quantize_int8(weight)
    assert (weights.values.dtype, weights.values.shape, weights.scales.shape) == (np.int8, weight.shape, weight.shape[:-1])
    error = np.abs(_meant(weights) - weight)
    assert (error <= 0.5001 * weights.scales[..., None]).all()
    assert (np.abs(weights.values).max(-1)[weights.scales > 0] == LEVELS).all()
    assert weights.scales[1, 2] == 0
    np.testing.assert_array_equal(quantize_int8(weight[1]).values, weights.values[1])


def test_int4_and_fp8_weights_err_by_half_a_step() -> None:
    weight = np.random.default_rng(0).standard_normal((3, 5, 128)).astype(np.float32) + 1
    four, eight = quantize_int4(weight, 64), quantize_fp8(weight)
    step = np.repeat(np.swapaxes(four.scales, -1, -2), 64, axis=-1)
    assert four.scales.shape == four.zeros.shape == (3, 2, 5)
    assert np.isin(four.zeros, range(-8, 9)).all()
    # A zero point is rounded as well, and what it cuts off at the ends is half a step more.
    assert (np.abs(_meant(four) - weight) <= 1.001 * step).all()
    # Three bits behind the leading one; the least exponent of the type is -6.
    assert (np.abs(_meant(eight) - weight) <= 2.0**-4 * np.abs(weight) + 2.0**-10 * eight.scales[..., None]).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused(number: float) -> None:
    weight = np.ones((2, 64), np.float32)
    weight[1, 3] = number
    for quantize in (quantize_int8, quantize_fp8, functools.partial(quantize_int4, group_size=32)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantize(weight)


def _words(nibbles: np.ndarray) -> np.ndarray:
    """int32 words of eight nibbles each along the last axis, the first in the lowest bits."""
    shifted = nibbles.reshape(*nibbles.shape[:-1], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)


def _checkpoint(num_out: int = 16, num_in: int = 128, num_groups: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Nibbles [out, in], zero points and scales [groups, out], and the matrix that they mean."""
    random = np.random.default_rng(0)
    nibbles = random.integers(0, 16, (num_out, num_in))
    zeros = random.integers(1, 16, (num_groups, num_out))
    scales = random.uniform(0.5, 2, (num_groups, num_out)).astype(np.float16)
    group_of = np.arange(num_in) // (num_in // num_groups)
    return nibbles, zeros, scales, (nibbles - zeros.T[:, group_of]) * scales.astype(np.float64).T[:, group_of]


def test_gptq_is_repacked() -> None:
    nibbles, zeros, scales, meant = _checkpoint()
    qweight, qzeros = _words(nibbles).T, _words(zeros - 1)  # eight inputs of an output a word; zero points less one
    group_of = np.arange(128) // 64
    weights = from_gptq(np.ascontiguousarray(qweight), qzeros, scales, group_of)
    np.testing.assert_array_equal(_meant(weights), meant)
    np.testing.assert_array_equal(np.asarray(dequantize(weights)), meant.astype(np.float32))
    with pytest.raises(ValueError, match="desc_act"):
        from_gptq(np.ascontiguousarray(qweight), qzeros, scales, group_of[::-1].copy())
    with pytest.raises(ValueError, match="do not fit"):
        from_gptq(np.ascontiguousarray(qweight), qzeros[:, :1], scales)


def test_awq_is_repacked() -> None:
    nibbles, zeros, scales, meant = _checkpoint()
    in_words = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs each nibble of a word is

    def packed(rows: np.ndarray) -> np.ndarray:
        return _words(rows.reshape(len(rows), -1, 8)[..., in_words].reshape(rows.shape))

    weights = from_awq(packed(nibbles.T), packed(zeros), scales)
    np.testing.assert_array_equal(_meant(weights), meant)
    with pytest.raises(ValueError, match="do not fit"):
        from_awq(packed(nibbles.T), packed(zeros), scales[:1])


_INT8, _INT4 = make(BY_NAME["int8_primes"])[1], make(BY_NAME["int4_primes"])[1]
_X = np.zeros((2, 131), np.float32)


@pytest.mark.parametrize(
    ("x", "weights", "options", "words"),
    [
        (_X, _INT8, {"layer": 0}, "leading layers axis"),
        (_X[:, 1:], _INT8, {}, "rows of 130 numbers for a matrix that takes 131"),
        (_X, _INT8._replace(scales=np.zeros(3, np.float32)), {}, r"scales \(3,\) for values \(37, 131\)"),
        (_X, _INT8._replace(values=_INT8.values.astype(np.int16)), {}, "values of Int8Weights are int8, not int16"),
        (_X, _INT4, {}, "rows of 131 numbers for a matrix that takes 192"),
        (np.zeros((2, 192), np.float32), _INT4._replace(zeros=_INT4.zeros[1:]), {}, r"zeros \(2, 37\)"),
        (np.zeros((2, 192), np.float32), Int4Weights(_INT4.values, *(np.zeros((7, 37), np.float32),) * 2), {}, "no multiple of 7 groups"),
        (np.zeros((1, 140_000), np.float32), Int8Weights(np.zeros((1, 140_000), np.int8), np.zeros(1, np.float32)), {}, "at most 133144"),
        (_X, (1, 2), {}, "weights are tuple"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(x: Any, weights: Any, options: dict, words: str) -> None:
    with pytest.raises(UnsupportedKernelError, match=words):
        choose(OP, None, (x, weights), {"layer": None, **options})


def test_nibbles_are_packed_low_first() -> None:
    np.testing.assert_array_equal(pack_nibbles(np.array([[1, 2, 15, 0]])), [[0x21, 0x0F]])


@pytest.mark.parametrize("name", ["int8_two_rows", "int4_layers", "fp8_primes"])
def test_float16_rows_are_taken(name: str) -> None:
    case = BY_NAME[name]
    x, weights = make(case, dtype="float16")
    options = {} if case.layers is None else {"layer": jnp.int32(1)}
    got = np.asarray(_jitted(None)(x, weights, **options))
    expected, size = _expected(case, x, weights, None if case.layers is None else 1)
    assert (np.abs(got - expected) <= size * 2.0**-11).all()


def test_bfloat16_rows_are_quantized_as_their_float32_selves() -> None:
    x, weights = make(BY_NAME["int8_rows_37"], dtype="bfloat16")
    assert x.dtype == ml_dtypes.bfloat16
    first = Int8Weights(*(np.asarray(part)[0] for part in weights))
    narrow, wide = (np.asarray(_jitted(None)(rows, first)) for rows in (x, x.astype(np.float32)))
    np.testing.assert_array_equal(narrow, wide)


def test_with_a_compiler_the_native_kernels_are_there() -> None:
    found = native.library()
    assert (found.missing is None) == HAS_COMPILER, found.missing
    most = cpu.max_rows()
    assert most >= (8 if HAS_COMPILER else 0)
    few, many = (jax.jit(quantized_matmul).lower(np.zeros((rows, 131), np.float32), _INT8).as_text() for rows in (8, 64))
    assert ("jaxpaged_int8_matmul" in few) == HAS_COMPILER
    assert ("jaxpaged_int8_matmul" in many) == (most >= 64)


def test_more_rows_than_pay_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "max_rows", lambda: 12)
    few, many = (jax.jit(quantized_matmul).lower(np.zeros((rows, 131), np.float32), _INT8).as_text() for rows in (12, 13))
    assert ("jaxpaged_int8_matmul" in few) == HAS_COMPILER
    assert "jaxpaged_int8_matmul" not in many
