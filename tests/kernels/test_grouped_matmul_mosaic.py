"""The Hopper kernel of grouped matmul in Pallas' GPU interpreter, with its race detector, and lowered for CUDA: no GPU is needed.

Shared memory that nothing was copied to is NaN in the interpreter, as are the weights of groups without rows and the rows of no group.
"""

import functools
import inspect
import linecache
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.grouped_matmul import OP, block_work, grouped_matmul, mosaic_gpu, reference
from pallas_kernels.grouped_matmul.cases import CASES, Case, make
from pallas_kernels.grouped_matmul.mosaic_gpu import MatmulShape, block_rows, plan

pytestmark = [pytest.mark.jax]

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
NUM_CTAS = 3
BY_NAME = {case.name: case for case in CASES}
FIRST_CASES = [pytest.param(case, id=case.name) for case in CASES if "gpu_first" in case.tags]
OTHER_CASES = [pytest.param(case, id=case.name) for case in CASES if "gpu" in case.tags and "gpu_first" not in case.tags]


def mesh_of(kind: str) -> AbstractMesh:
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, 132, "gpu"))


def multiply(operands: dict[str, Any], layer: Any = None) -> np.ndarray:
    """The operation, interpreted on 3 CTAs."""
    run = functools.partial(mosaic_gpu.grouped_matmul, layer=layer, num_ctas=NUM_CTAS, interpret=INTERPRETER)
    return np.asarray(run(**jax.tree.map(jnp.asarray, operands)))


def expected(operands: dict[str, Any]) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(reference.grouped_matmul, layer=None))(**operands))


def tolerance(case: Case, operands: dict[str, Any]) -> np.ndarray:
    """Products of two numbers of at most 11 bits are exact in float32; n of them summed in any order are wrong by at most n - 1 halves of a
    unit of the last place of the sum of their magnitudes, and two orders differ by twice that."""
    own_weights = np.abs(operands["weights"].astype(np.float32))[np.repeat(np.arange(len(case.group_sizes)), case.group_sizes)]
    rows = np.abs(operands["x"].astype(np.float32))[: sum(case.group_sizes)]
    magnitudes = np.einsum("ri,roi->ro", rows, own_weights)
    padding = np.zeros((case.num_padding, case.num_out))
    return case.num_in * float(jnp.finfo(jnp.float32).eps) * np.concatenate([magnitudes, padding])


def assert_right(case: Case, operands: dict[str, Any], got: np.ndarray) -> None:
    assert (np.abs(got - expected(operands)) <= tolerance(case, operands)).all()
    assert (got[sum(case.group_sizes) :] == 0).all()


class FetchLog:
    """Counts the tiles that bulk copies read: of the weights by (matrix, output, input), of the rows by (row, input)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: Counter[tuple[int, int, int]] = Counter()
        self.rows: Counter[tuple[int, int]] = Counter()
        copy = gpu_callbacks.copy_gmem_to_smem

        def logged(**arguments: Any) -> Any:
            places = tuple(int(getattr(index, "start", index)) for index in arguments["src_transforms"][0].indices)
            (self.weights if len(places) == 3 else self.rows)[places] += 1
            return copy(**arguments)

        monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", logged)
        # Programs that were traced before would go on with what they were traced with.
        mosaic_gpu.multiply_blocks.clear_cache()


def planned(case: Case) -> MatmulShape:
    return plan(case.num_rows, len(case.group_sizes), case.num_in, case.num_out, jnp.dtype("bfloat16"), NUM_CTAS)


def blocks_of_groups(sizes: tuple[int, ...], rows: int) -> list[tuple[int, int, int, int]]:
    """First block, number of blocks, first row and rows of each group, one after the other."""
    found, first_block, start = [], 0, 0
    for size in sizes:
        count = len({(row - start // 8 * 8) // rows for row in range(start, start + size)})
        found.append((first_block, count, start, size))
        first_block, start = first_block + count, start + size
    return found


def weights_wanted(case: Case, first_matrix: int = 0) -> Counter[tuple[int, int, int]]:
    """Every tile of the matrix of a group with rows, once for each block of its rows, and of no other matrix."""
    shape = planned(case)
    return Counter(
        {
            (first_matrix + group, column, step): num_blocks
            for group, num_blocks in enumerate(count for _, count, _, _ in blocks_of_groups(case.group_sizes, shape.block_rows))
            for column in range(0, case.num_out, shape.columns)
            for step in range(0, case.num_in, shape.depth)
            if num_blocks
        }
    )


def check(case: Case, dtype: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, without races, padding 0, equal bits again, and each tile of the weights of groups with rows fetched once a block."""
    log = FetchLog(monkeypatch)
    operands = make(case, dtype=dtype)
    got = multiply(operands)
    assert_right(case, operands, got)
    assert "RACE" not in capfd.readouterr().out
    assert log.weights == weights_wanted(case)
    np.testing.assert_array_equal(multiply(operands), got)


@pytest.mark.min_jax
@pytest.mark.parametrize("case", FIRST_CASES)
def test_equals_reference_without_races(case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, "bfloat16", capfd, monkeypatch)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("case", OTHER_CASES)
def test_equals_reference_without_races_on_more_cases(
    case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, "float16" if case.num_in % 64 else "bfloat16", capfd, monkeypatch)


@pytest.mark.tier("kernels")
def test_a_row_and_a_layer_do_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits beside rows of NaN, and with the matrices in a stack of layers, the others NaN."""
    case = BY_NAME["gpu_block_edges"]
    operands = make(case, dtype="bfloat16")
    alone = multiply(operands)
    log = FetchLog(monkeypatch)
    changed = operands | {"x": operands["x"].copy(), "weights": np.stack([np.full_like(operands["weights"], np.nan), operands["weights"]])}
    spoiled = [0, 8, 23, 40]
    changed["x"][spoiled] = np.nan
    got = multiply(changed, layer=jnp.int32(1))
    others = np.setdiff1d(np.arange(case.num_rows), spoiled)
    np.testing.assert_array_equal(got[others], alone[others])
    assert np.isnan(got[spoiled]).all()
    assert log.weights == weights_wanted(case, first_matrix=len(case.group_sizes))


class Planted:
    """`plgpu` of the kernel with one of its functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plant(name: str, value: Any) -> None:
        monkeypatch.setattr(mosaic_gpu, name, value)
        mosaic_gpu.multiply_blocks.clear_cache()

    yield plant
    mosaic_gpu.multiply_blocks.clear_cache()
    gpu_callbacks.reset_gpu_interpret_mode_state()


SMALL = Case("small", (3, 0, 2), 64, 64, num_padding=1)


def wait_unless_full(barrier: Any) -> None:
    """Waits for room in the ring, not for what was copied to it."""
    caller = inspect.currentframe().f_back
    if "ring.full" not in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
        plgpu.barrier_wait(barrier)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize(
    ("left_out", "case"),
    [
        # The ring goes round: a phase of a barrier then ends that nobody has seen.
        pytest.param({"barrier_wait": wait_unless_full}, BY_NAME["gpu_ring_goes_round"], id="copies to the ring"),
        pytest.param({"wait_smem_to_gmem": lambda *args, **options: None}, SMALL._replace(num_out=512), id="copies of results"),
    ],
)
def test_a_copy_that_is_not_waited_for_is_noticed(
    planted: Any, capfd: pytest.CaptureFixture[str], left_out: dict[str, Any], case: Case
) -> None:
    planted("plgpu", Planted(**left_out))
    try:
        multiply(make(case, dtype="bfloat16"))
    except jax.errors.JaxRuntimeError as error:  # jax 0.11 prints a race, jax 0.12 raises it
        report = str(error)
    else:
        report = capfd.readouterr().out
    assert "RACE DETECTED" in report or "no threads observed" in report


@pytest.mark.tier("kernels")
def test_weights_that_nobody_needs_are_noticed(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of work in which every group has a block, rows or none: the result is the same, and more is read."""

    def with_empty(group_sizes: Any, *, num_rows: int, block_rows: int) -> block_work.BlockWork:
        owners = jnp.arange(len(SMALL.group_sizes) + 1)
        first = jnp.cumsum(jnp.array((*SMALL.group_sizes, 1))) - jnp.array((*SMALL.group_sizes, 1))
        sizes = jnp.array((*SMALL.group_sizes, SMALL.num_padding))
        return block_work.BlockWork(
            jnp.stack([owners, owners, jnp.ones_like(owners), first, sizes], axis=1).astype(jnp.int32), jnp.array([4], jnp.int32)
        )

    log = FetchLog(monkeypatch)
    operands = make(SMALL, dtype="bfloat16")
    planted("cut_into_blocks", with_empty)
    # A warpgroup without rows of its own skips the products, where there are two.
    planted("block_rows", lambda num_rows, num_groups: 128)
    assert_right(SMALL, operands, multiply(operands))
    assert log.weights != weights_wanted(SMALL)


@pytest.mark.tier("kernels")
def test_rows_of_others_that_are_written_are_noticed(planted: Any) -> None:
    """All rows of a tile written, not those of the group alone."""
    operands = make(case := SMALL._replace(group_sizes=(9, 7), num_padding=0), dtype="bfloat16")
    assert_right(case, operands, multiply(operands))
    write_rows = mosaic_gpu._write_rows

    def write_all(source: Any, target: Any, first: Any, row: Any, num_rows: Any, shape: Any) -> None:
        write_rows(source, target, first * 0, row - first, num_rows * 0 + 16, shape)

    planted("_write_rows", write_all)
    try:
        got = multiply(operands)
    except jax.errors.JaxRuntimeError:  # two CTAs write the same row
        return
    assert not np.allclose(got, expected(operands), atol=1e-3)


@pytest.mark.parametrize("rows", [16, pytest.param(32, marks=pytest.mark.tier("kernels")), 128])
def test_blocks_hold_each_row_once_and_are_no_more_than_needed(rows: int) -> None:
    num_rows, num_groups = 320, 128
    cut = jax.jit(functools.partial(block_work.cut_into_blocks, num_rows=num_rows, block_rows=rows))
    for case in (case for case in CASES if "ci" in case.tags or case.name == "qwen3_30b_decode_16"):
        # More groups without rows and more padding, so that one program does for all.
        sizes = (*case.group_sizes, *(0,) * (num_groups - len(case.group_sizes)), num_rows - sum(case.group_sizes))
        work = cut(np.array(sizes[:-1], np.int32))
        num_blocks = int(work.num_blocks[0])
        blocks = np.asarray(work.blocks)
        assert num_blocks <= len(blocks) == block_work.most_blocks(num_rows, num_groups, rows)
        wanted = [
            (group, first_block, count, start, size)
            for group, (first_block, count, start, size) in enumerate(blocks_of_groups(sizes, rows))
            for _ in range(count)
        ]
        assert [tuple(row) for row in blocks[:num_blocks].tolist()] == wanted


def test_no_sharing_out_makes_more_blocks_than_there_is_room_for() -> None:
    for num_rows, rows in ((40, 16), (33, 32), (7, 16), (200, 128)):
        for sizes in ((1,) * num_rows, (7, *(9,) * ((num_rows - 7) // 9)), (num_rows,), (5, num_rows - 5)):
            padded = (*sizes, num_rows - sum(sizes))
            most = block_work.most_blocks(num_rows, len(sizes), rows)
            assert sum(count for _, count, _, _ in blocks_of_groups(padded, rows)) <= most


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "rows"), [(8, 128, 16), (128, 128, 16), (4096, 128, 64), (64, 8, 16), (512, 8, 64), (520, 8, 128)]
)
def test_blocks_are_about_twice_as_large_as_even_groups(num_rows: int, num_groups: int, rows: int) -> None:
    assert block_rows(num_rows, num_groups) == rows


@pytest.mark.parametrize("num_rows", [8, 128, 4096])
def test_weights_in_flight_cover_the_latency_and_columns_divide_the_outputs(num_rows: int) -> None:
    for num_out in (32, 96, 352, 768, 1408, 2880, 14336):
        shape = plan(num_rows, 32, 2048, num_out, jnp.dtype("bfloat16"), 132)
        assert num_out % shape.columns == 0 == shape.columns % shape.staged
        assert shape.in_flight_bytes >= 64 * 1024


def shapes(case: Case, dtype: str, layers: int | None = None) -> dict[str, Any]:
    weights = (len(case.group_sizes), case.num_out, case.num_in)
    return {
        "x": jax.ShapeDtypeStruct((case.num_rows, case.num_in), dtype),
        "weights": jax.ShapeDtypeStruct(weights if layers is None else (layers, *weights), dtype),
        "group_sizes": jax.ShapeDtypeStruct(weights[:1], jnp.int32),
    }


def lower(case: Case, dtype: str) -> str:
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        run = jax.jit(functools.partial(grouped_matmul, implementation="mosaic_gpu"))
        traced = run.trace(**shapes(case, dtype, layers=4), layer=jax.ShapeDtypeStruct((), jnp.int32))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def grid() -> list[Case]:
    """From one row to a prompt, for experts as served models have them and for parts of them."""
    sizes = ((2048, 768, 128), (768, 2048, 128), (4096, 14336, 8), (2880, 5760, 32), (352, 2048, 60), (2048, 96, 60))
    return [
        Case(f"{num_rows}_rows_{num_groups}_of_{num_in}_{num_out}", (num_rows, *(0,) * (num_groups - 1)), num_in, num_out)
        for num_in, num_out, num_groups in sizes
        for num_rows in (1, 77, 8192)
    ]


def test_the_kernel_lowers_for_hopper_and_is_not_chosen_unasked() -> None:
    """Lowering runs layout inference and the check of shared memory."""
    case = BY_NAME["qwen3_30b_decode_16"]
    assert "mosaic_gpu" in lower(case, "bfloat16")
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert choose(OP, None, tuple(shapes(case, "bfloat16").values()), {"layer": None}).name == "xla"


@pytest.mark.tier("kernels")
@pytest.mark.min_jax
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in grid()])
def test_the_whole_grid_lowers(case: Case) -> None:
    assert "mosaic_gpu" in lower(case, "float16" if case.num_rows == 77 else "bfloat16")


BAD = {
    "another GPU": ("NVIDIA A100 80GB PCIe", SMALL, "bfloat16", "it needs compute capability 9.0, and NVIDIA A100 80GB PCIe has 8.0"),
    "float32": ("NVIDIA H200", SMALL, "float32", "rows are bfloat16 or float16, not float32"),
    "inputs": ("NVIDIA H200", SMALL._replace(num_in=48), "bfloat16", "a matrix has a multiple of 32 inputs, not 48"),
    "outputs": ("NVIDIA H200", SMALL._replace(num_out=80), "float16", "a matrix has a multiple of 32 outputs, not 80"),
    "no rows": ("NVIDIA H200", SMALL._replace(group_sizes=(0,), num_padding=0), "float16", "there are no rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_lies_outside_the_domain_is_refused_and_left_to_xla(name: str) -> None:
    kind, case, dtype, words = BAD[name]
    operands = tuple(shapes(case, dtype).values())
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        with pytest.raises(UnsupportedKernelError, match=f"takes these operands: mosaic_gpu: {words}"):
            choose(OP, "mosaic_gpu", operands, {"layer": None})
        assert choose(OP, None, operands, {"layer": None}).name == "xla"


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="it needs an NVIDIA GPU of compute capability 9.0"):
        choose(OP, "mosaic_gpu", tuple(shapes(SMALL, "bfloat16").values()), {"layer": None})
