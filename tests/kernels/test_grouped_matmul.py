"""Every implementation of grouped matmul against a loop over rows, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.dense_matmul import dense_matmul
from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.grouped_matmul import OP, grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case, make
from pallas_kernels.grouped_matmul.xla import block_rows

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]
CI_CASES = [pytest.param(case, id=case.name) for case in CASES if "ci" in case.tags]
PORTABLE = ("reference", "xla", "cpu")
"""What runs on a CPU; the Mosaic kernel has tests of its own."""

BY_NAME = {case.name: case for case in CASES}


def _by_loop(case: Case, operands: dict[str, np.ndarray]) -> np.ndarray:
    """One row after the other, in float64."""
    out = np.zeros((case.num_rows, case.num_out))
    groups = np.repeat(np.arange(len(case.group_sizes)), case.group_sizes)
    for row, group in enumerate(groups):
        out[row] = operands["weights"][group].astype(np.float64) @ operands["x"][row].astype(np.float64)
    return out


@functools.cache
def _jitted(implementation: str):
    return jax.jit(functools.partial(grouped_matmul, implementation=implementation))


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("case", CI_CASES)
def test_equals_a_loop_over_rows_with_nan_in_what_is_not_read(case: Case, implementation: str) -> None:
    operands = make(case)
    got = np.asarray(_jitted(implementation)(**operands))
    assert got.dtype == np.float32
    # Sums of at most 37 products of size 1 / sqrt(37), in float32.
    np.testing.assert_allclose(got, _by_loop(case, operands), atol=2e-6, rtol=2e-6)
    assert (got[sum(case.group_sizes) :] == 0).all()
    np.testing.assert_array_equal(got, np.asarray(_jitted(implementation)(**operands)))


@pytest.mark.parametrize("implementation", PORTABLE)
def test_bfloat16_is_summed_in_float32(implementation: str) -> None:
    case = BY_NAME["ragged_3"]
    operands = make(case, dtype="bfloat16")
    got = np.asarray(_jitted(implementation)(**operands))
    assert operands["x"].dtype == ml_dtypes.bfloat16
    # The products of two numbers of 8 bits are exact in float32: only the order of the sum may differ.
    np.testing.assert_allclose(got, _by_loop(case, operands), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_a_layer_of_stacked_weights_is_the_layer_alone(implementation: str) -> None:
    operands = make(BY_NAME["ragged_1"])
    expected = np.asarray(_jitted(implementation)(**operands))
    operands["weights"] = np.stack([np.full_like(operands["weights"], np.nan), operands["weights"]])
    got = np.asarray(_jitted(implementation)(**operands, layer=jnp.int32(1)))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_a_row_does_not_depend_on_the_others(implementation: str) -> None:
    """The same rows beside others that hold NaN and infinity."""
    case = BY_NAME["block_edges"]
    operands = make(case)
    expected = np.asarray(_jitted(implementation)(**operands))
    for spoiled in (0, 8, 23, 40):
        changed = operands | {"x": operands["x"].copy()}
        changed["x"][spoiled] = np.nan if spoiled % 2 else np.inf
        got = np.asarray(_jitted(implementation)(**changed))
        others = np.arange(case.num_rows) != spoiled
        np.testing.assert_array_equal(got[others], expected[others])
        assert not np.isfinite(got[spoiled]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_rows_are_the_same_bits_alone_and_those_of_the_dense_product(dtype: str) -> None:
    case = Case("company", (1, 70, 0, 9), 193, 97)
    operands = make(case, dtype=dtype)
    together = np.asarray(_jitted("cpu")(**operands))
    for row, group in ((0, 0), (1, 1), (50, 1), (75, 3)):
        alone = {"x": operands["x"][row : row + 1], "group_sizes": np.eye(4, dtype=np.int32)[group]}
        np.testing.assert_array_equal(np.asarray(_jitted("cpu")(**operands | alone))[0], together[row])
        dense = dense_matmul(jnp.asarray(alone["x"]), jnp.asarray(operands["weights"][group]), implementation="cpu")
        np.testing.assert_array_equal(np.asarray(dense)[0], together[row])


@pytest.mark.parametrize("sizes", [(70, 0, 12, -1), (40, 40, 0, 2), (2**31 - 1, 2**31 - 1, 1, 1)])
def test_sizes_that_cannot_be_are_refused_by_the_native_kernel(sizes: tuple[int, ...]) -> None:
    operands = make(Case("sizes", (1, 70, 0, 9), 7, 5)) | {"group_sizes": np.array(sizes, np.int32)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="groups have more rows than there are, or fewer than none"):
        jax.block_until_ready(_jitted("cpu")(**operands))


def _compiled(num_groups: int, num_rows: int = 64, layers: int | None = None) -> jax.stages.Compiled:
    operands = make(Case("cost", (num_rows, *(0,) * (num_groups - 1)), 96, 64))
    if layers is None:
        return jax.jit(functools.partial(grouped_matmul, implementation="xla")).lower(**operands).compile()
    operands["weights"] = np.stack([operands["weights"]] * layers)
    return jax.jit(functools.partial(grouped_matmul, implementation="xla")).lower(**operands, layer=jnp.int32(0)).compile()


def test_the_work_does_not_grow_with_the_number_of_experts() -> None:
    """The loop's body, counted once, is one block's product; 8 rows x 96 x 64 x 2 operations for 8 experts and for 128."""
    few, many = (_compiled(num_groups).cost_analysis()["flops"] for num_groups in (8, 128))
    of_a_block = 2 * block_rows(64, 8) * 96 * 64
    assert block_rows(64, 8) == block_rows(64, 128) == 8
    assert of_a_block <= few < 1.1 * of_a_block
    assert of_a_block <= many < 1.1 * of_a_block  # cumulative sums over the experts are the rest


def test_no_program_holds_a_copy_of_the_experts() -> None:
    """Beside operands and result there is room for one block and one matrix, however many experts and layers there are."""
    one_matrix, rows = 96 * 64 * 4, (64 + 8) * (96 + 64) * 4
    for layers in (None, 5):
        assert _compiled(128, layers=layers).memory_analysis().temp_size_in_bytes < 2 * (one_matrix + rows)


@pytest.mark.parametrize(("num_rows", "num_groups", "rows"), [(1, 8, 8), (64, 8, 8), (512, 8, 64), (128, 8, 16), (4096, 8, 64)])
def test_blocks_are_about_as_large_as_even_groups(num_rows: int, num_groups: int, rows: int) -> None:
    assert block_rows(num_rows, num_groups) == rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer": 0}, "leading layers axis"),
        ({"group_sizes": np.zeros(7, np.int32)}, "11 matrices for 7 groups"),
        ({"x": np.zeros((100, 18), np.float32)}, "rows of 18 numbers for matrices that take 19"),
        ({"x": np.zeros((100, 19), ml_dtypes.bfloat16)}, "x is bfloat16, weights are float32"),
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(change: dict, words: str) -> None:
    asked = {"layer": None, "implementation": None, **make(BY_NAME["ragged_0"]), **change}
    with pytest.raises(UnsupportedKernelError, match=words):
        choose(OP, asked["implementation"], [asked[name] for name in ("x", "weights", "group_sizes")], {"layer": asked["layer"]})
