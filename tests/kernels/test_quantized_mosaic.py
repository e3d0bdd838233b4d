"""The Hopper kernel of quantized matmul in Pallas' GPU interpreter, with its race detector, and lowered for CUDA: no GPU is needed.

Shared memory and parts that nothing was written to are NaN in the interpreter (the largest number in int32).
"""

import functools
import inspect
import itertools
import linecache
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.dispatch import UnsupportedKernelError, choose, selecting
from pallas_kernels.quantized_matmul import OP, Fp8Weights, Int4Weights, Int8Weights, mosaic_gpu, mosaic_kernel, quantized_matmul, xla
from pallas_kernels.quantized_matmul.cases import CASES, Case, make
from pallas_kernels.quantized_matmul.mosaic_kernel import TILE_OUT
from pallas_kernels.quantized_matmul.quantize import quantize_rows
from pallas_kernels.quantized_matmul.reference import dequantize
from pallas_kernels.quantized_matmul.shares import Shares, share_out

pytestmark = [pytest.mark.jax]

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
GPU_CASES = [case for case in CASES if "gpu" in case.tags]
BY_NAME = {case.name: case for case in CASES}
OTHER_CASES = [case for case in GPU_CASES if "gpu_first" not in case.tags] + [BY_NAME["int8_smollm2_down"]]
FIRST_RUNS = [pytest.param(case, "bfloat16", id=case.name) for case in GPU_CASES if "gpu_first" in case.tags]
OTHER_RUNS = [
    *(pytest.param(case, "bfloat16", id=case.name) for case in OTHER_CASES),
    *(pytest.param(BY_NAME[f"gpu_{kind}"], "float16", id=f"gpu_{kind}-float16") for kind in ("int4", "fp8")),
    pytest.param(BY_NAME["gpu_int8"], "float32", id="gpu_int8-float32"),
]


def operands(case: Case, dtype: str) -> tuple[Any, Any, int | None]:
    """Rows, weights and the last layer; of the other layers what can be is NaN. Scales of float16 rows are float16, as in checkpoints."""
    x, weights = make(case, dtype=dtype)
    if case.kind == "int4" and dtype == "float16":
        weights = weights._replace(scales=weights.scales.astype(np.float16), zeros=weights.zeros.astype(np.float16))
    if case.layers is None:
        return x, weights, None
    layer = case.layers - 1
    spoiled = np.full_like(weights.scales, np.nan)
    spoiled[layer] = weights.scales[layer]
    values = weights.values.copy()
    values[:layer] = np.nan if case.kind == "fp8" else 0x77
    return x, weights._replace(scales=spoiled, values=values), layer


def multiply(x: Any, weights: Any, layer: int | None, num_ctas: int = 3) -> np.ndarray:
    """The operation as the engine calls it, interpreted on few CTAs."""
    index = None if layer is None else jnp.int32(layer)
    arrays = jax.tree.map(jnp.asarray, (x, weights))
    return np.asarray(mosaic_gpu.quantized_matmul(*arrays, layer=index, num_ctas=num_ctas, interpret=INTERPRETER))


def expected(x: np.ndarray, weights: Any, layer: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The products in float64, and for each the sum of its terms' sizes."""
    if layer is not None:
        weights = type(weights)(*(part[layer] for part in weights))
    matrix = np.asarray(dequantize(jax.tree.map(jnp.asarray, weights))).astype(np.float64)
    rows = x.astype(np.float64)
    if isinstance(weights, Int8Weights):
        high, low, scales = (np.asarray(part).astype(np.float64) for part in quantize_rows(jnp.asarray(x)))
        rows = (high * 128 + low) * scales[:, None]
    return rows @ matrix.T, np.abs(rows) @ np.abs(matrix).T


class FetchLog:
    """Counts what bulk copies read, by the shape of the copy and the place that it begins at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: Counter[tuple[Any, ...]] = Counter()
        copy = gpu_callbacks.copy_gmem_to_smem

        def logged(**arguments: Any) -> Any:
            (indexer,) = arguments["src_transforms"]
            self.places[tuple((int(index.start), index.size) if hasattr(index, "start") else int(index) for index in indexer.indices)] += 1
            return copy(**arguments)

        monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", logged)
        mosaic_gpu._multiply.clear_cache()  # what was traced before would go on with what it was traced with

    def of_weights(self) -> Counter[tuple[int, int, int]]:
        """Copies of weights by layer, output and input."""
        found: Counter[tuple[int, int, int]] = Counter()
        for place, count in self.places.items():
            if len(place) == 3 and place[1][1] == TILE_OUT:
                found[place[0], place[1][0], place[2][0]] += count
        return found


def wanted_copies(case: Case, layer: int, unit_in: int) -> Counter[tuple[int, int, int]]:
    outs = [min(start, case.num_out - TILE_OUT) for start in range(0, case.num_out, TILE_OUT)]
    return Counter(itertools.product([layer], outs, range(0, case.num_in, unit_in)))


def check(case: Case, dtype: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, without races, the same bits twice, and each weight of the layer fetched once."""
    log = FetchLog(monkeypatch)
    x, weights, layer = operands(case, dtype)
    got = multiply(x, weights, layer)
    assert (got.dtype, got.shape) == (np.float32, (case.num_rows, case.num_out))
    products, size = expected(x, weights, layer)
    # Products of 8 and 11 bits are exact in float32 and are summed there, in some order; a scale rounds each sum of a group once more.
    assert (np.abs(got - products) <= size * (case.num_in + 8) * 2.0**-24).all()
    assert "RACE" not in capfd.readouterr().out
    unit_in = mosaic_gpu.matmul_shape(weights, case.num_rows, x.dtype, 3).unit_in
    assert log.of_weights() == wanted_copies(case, layer or 0, unit_in)
    np.testing.assert_array_equal(got, multiply(x, weights, layer))
    if case.kind == "int8":
        named = {"layer": None if layer is None else jnp.int32(layer)}
        exact = jax.jit(functools.partial(xla.quantized_matmul, **named))(*jax.tree.map(jnp.asarray, (x, weights)))
        np.testing.assert_array_equal(got, np.asarray(exact))


@pytest.mark.min_jax
@pytest.mark.parametrize(("case", "dtype"), FIRST_RUNS)
def test_equals_reference_without_races(case: Case, dtype: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, dtype, capfd, monkeypatch)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize(("case", "dtype"), OTHER_RUNS)
def test_equals_reference_without_races_on_more_cases(
    case: Case, dtype: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, dtype, capfd, monkeypatch)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_row_is_the_same_alone_and_among_others(kind: str) -> None:
    """Among rows that hold NaN and infinities too, and on any number of rows."""
    x, weights, layer = operands(BY_NAME[f"gpu_{kind}"], "bfloat16")
    rows = np.concatenate([x] * 7)[:19]
    whole = multiply(rows, weights, layer)
    np.testing.assert_array_equal(multiply(rows[2:3], weights, layer)[0], whole[2])
    spoiled = rows.copy()
    spoiled[0, 5], spoiled[7, 6], spoiled[18, 7] = np.nan, np.inf, -np.inf
    got = multiply(spoiled, weights, layer)
    others = ~np.isin(np.arange(19), [0, 7, 18])
    np.testing.assert_array_equal(got[others], whole[others])
    assert np.isnan(got[0]).all()
    assert not np.isfinite(got[[7, 18]]).any()


def _looped(shares: Shares) -> dict[int, set[int]]:
    """Tile -> its parts, by going along the line unit by unit."""
    total = shares.num_tiles * shares.num_units
    parts: dict[int, set[int]] = {tile: set() for tile in range(shares.num_tiles)}
    done = []
    begins, ends = map(np.asarray, shares.range_of(jnp.arange(shares.num_ctas, dtype=jnp.int32)))
    tiles, units = map(np.asarray, shares.place_of(jnp.arange(total, dtype=jnp.int32)))
    assert list(zip(tiles, units, strict=True)) == [divmod(position, shares.num_units) for position in range(total)]
    assert (ends - begins).max() <= -(-total // shares.num_ctas)
    for cta, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        done += range(begin, end)
        for position in range(begin, end):
            parts[int(tiles[position])].add(int(tiles[position]) + cta)
    assert done == list(range(total))
    return parts


@pytest.mark.parametrize(("num_out", "num_units", "max_ctas"), [(128, 1, 132), (136, 7, 5), (576, 9, 132), (1024, 4, 3), (256, 100, 132)])
def test_every_unit_is_done_once_and_parts_are_found(num_out: int, num_units: int, max_ctas: int) -> None:
    shares = share_out(num_out, TILE_OUT, num_units, max_ctas)
    parts = _looped(shares)
    assert 1 <= shares.num_ctas <= max_ctas
    assert {tile: set(shares.parts_of(tile)) for tile in parts} == parts
    assert len(set().union(*parts.values())) == sum(map(len, parts.values()))
    assert max(map(max, parts.values())) < shares.num_parts
    # What is no part may hold anything.
    held = np.full((shares.num_parts, 8, TILE_OUT), np.nan, np.float32)
    for tile, own in parts.items():
        held[list(own)] = tile + np.arange(TILE_OUT, dtype=np.float32) / TILE_OUT
    got = np.asarray(mosaic_gpu.add_parts(shares, jnp.asarray(held)))
    assert got.shape == (8, num_out)
    for tile, own in parts.items():
        first = min(tile * TILE_OUT, num_out - TILE_OUT)
        outs = np.arange(tile * TILE_OUT, min((tile + 1) * TILE_OUT, num_out))
        np.testing.assert_allclose(got[0, outs], len(own) * (tile + (outs - first) / TILE_OUT), rtol=1e-6)


class Planted:
    """`plgpu` of the kernel with one of its functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plant(**replaced: Any) -> None:
        monkeypatch.setattr(mosaic_kernel, "plgpu", Planted(**replaced))
        mosaic_gpu._multiply.clear_cache()

    yield plant
    mosaic_gpu._multiply.clear_cache()
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("words", ["ring.full", "ring.free"])
def test_a_wait_that_is_left_out_is_noticed(words: str, planted: Any, capfd: pytest.CaptureFixture[str]) -> None:

    def wait(barrier: Any) -> None:
        caller = inspect.currentframe().f_back
        if words not in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
            plgpu.barrier_wait(barrier)

    planted(barrier_wait=wait)
    try:
        multiply(*operands(BY_NAME["gpu_fp8_ring_goes_round"], "bfloat16"), num_ctas=1)
    except jax.errors.JaxRuntimeError as error:  # jax 0.11 prints a race, jax 0.12 raises it
        report = str(error)
    else:
        report = capfd.readouterr().out
    assert "RACE DETECTED" in report or "no threads observed" in report


@pytest.mark.tier("kernels")
def test_weights_that_are_fetched_twice_or_from_another_place_are_noticed(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["gpu_int4"]
    x, weights, layer = operands(case, "bfloat16")
    products, size = expected(x, weights, layer)
    unit_in = mosaic_gpu.matmul_shape(weights, case.num_rows, x.dtype, 3).unit_in
    log = FetchLog(monkeypatch)
    # The race detector would see the second copy as well: here the count has to.
    monkeypatch.setattr(sys.modules[__name__], "INTERPRETER", plgpu.InterpretGPUParams())

    def copy_twice(source: Any, target: Any, barrier: Any) -> None:
        for _ in range(2 if source.shape == (TILE_OUT, unit_in) else 1):
            plgpu.copy_gmem_to_smem(source, target, barrier)

    def barrier_of_twice(num_arrivals: int, **rest: Any) -> Any:  # four copies a unit
        return plgpu.Barrier(num_arrivals=num_arrivals + (num_arrivals == 4), **rest)

    planted(copy_gmem_to_smem=copy_twice, Barrier=barrier_of_twice)
    got = multiply(x, weights, layer)
    assert (np.abs(got - products) <= size * (case.num_in + 8) * 2.0**-24).all()
    assert log.of_weights() == wanted_copies(case, layer, unit_in) + wanted_copies(case, layer, unit_in)

    log.places.clear()
    planted()
    monkeypatch.setattr(mosaic_kernel, "_first_out", lambda shape, index: jnp.int32(0))
    got = multiply(x, weights, layer)
    assert not (np.abs(got - products) <= size * (case.num_in + 8) * 2.0**-24).all()
    assert log.of_weights() != wanted_copies(case, layer, unit_in)


def mesh_of(kind: str) -> AbstractMesh:
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, 132, "gpu"))


def shapes(case: Case, dtype: str, scale_dtype: str = "float32") -> tuple[Any, Any]:
    """Rows and weights without numbers."""
    layers = () if case.layers is None else (case.layers,)
    kind, values_dtype = {"int8": (Int8Weights, "int8"), "int4": (Int4Weights, "uint8"), "fp8": (Fp8Weights, "float8_e4m3fn")}[case.kind]
    is_int4 = kind is Int4Weights
    values = jax.ShapeDtypeStruct((*layers, case.num_out, case.num_in // 2 if is_int4 else case.num_in), values_dtype)
    groups = (case.num_in // case.group_size,) if is_int4 else ()
    scales = jax.ShapeDtypeStruct((*layers, *groups, case.num_out), scale_dtype)
    return jax.ShapeDtypeStruct((case.num_rows, case.num_in), dtype), kind(values, *[scales] * (2 if is_int4 else 1))


def lower(x: Any, weights: Any, layer: int | None) -> str:
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        run = functools.partial(quantized_matmul, implementation="mosaic_gpu", layer=layer)
        return jax.jit(run).trace(x, weights).lower(lowering_platforms=("cuda",)).as_text()


def grid() -> list[Any]:
    """Kinds, types, widths of a unit, with tiles that overlap, up to the most rows; llama's widest product last."""
    runs = []
    for kind, group_size, scale_dtype in (
        ("int8", 64, "float32"),
        ("fp8", 64, "float32"),
        ("int4", 64, "float16"),
        ("int4", 128, "float32"),
    ):
        for num_rows, num_in, num_out in ((1, 384, 576), (9, 576, 1536), (40, 4096, 1000), (64, 14336, 4096)):
            for dtype in ("bfloat16",) if kind == "int8" else ("bfloat16", "float16"):
                if num_in % group_size == 0:
                    case = Case(f"{kind}_{group_size}_{num_rows}_{dtype}", kind, num_rows, num_in, num_out, group_size, layers=2)
                    runs.append(pytest.param(case, dtype, scale_dtype, id=case.name))
    return runs


def test_the_kernel_lowers_for_hopper_and_is_not_chosen_unasked() -> None:
    """Lowering runs layout inference and the check of shared memory."""
    x, weights = shapes(BY_NAME["gpu_int4"], "bfloat16")
    assert "mosaic_gpu" in lower(x, weights, 0)
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert choose(OP, None, (x, weights), {"layer": 0}).name == "xla"


@pytest.mark.tier("kernels")
@pytest.mark.min_jax
@pytest.mark.parametrize(("case", "dtype", "scale_dtype"), grid())
def test_the_whole_grid_lowers(case: Case, dtype: str, scale_dtype: str) -> None:
    assert "mosaic_gpu" in lower(*shapes(case, dtype, scale_dtype), 0)


def test_who_asks_for_the_kernel_gets_it_for_few_rows_and_xla_for_many() -> None:
    case = BY_NAME["gpu_int8"]
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")), selecting({"quantized_matmul": "mosaic_gpu"}) as taken:
        for num_rows in (64, 65):
            x, weights = shapes(case._replace(num_rows=num_rows), "bfloat16")
            jax.jit(functools.partial(quantized_matmul, layer=0)).trace(x, weights)
    assert {(choice.op, choice.implementation) for choice in taken} == {
        ("quantized_matmul", "mosaic_gpu"),
        ("quantized_matmul_of_many_rows", "xla"),
    }
    (of_many,) = (choice for choice in taken if choice.implementation == "xla")
    assert "mosaic_gpu: 1 to 64 rows, not 65" in of_many.refused


INT8, INT4, FP8 = (BY_NAME[f"gpu_{kind}"] for kind in ("int8", "int4", "fp8"))


@pytest.mark.parametrize(
    ("kind", "case", "dtype", "words"),
    [
        ("NVIDIA A100 80GB PCIe", INT8, "bfloat16", "it needs compute capability 9.0, and NVIDIA A100 80GB PCIe has 8.0"),
        ("NVIDIA H200", FP8, "float32", "rows beside Fp8Weights are bfloat16 or float16, not float32"),
        ("NVIDIA H200", INT8._replace(num_rows=65), "bfloat16", "1 to 64 rows, not 65"),
        ("NVIDIA H200", INT8._replace(num_in=96), "bfloat16", "inputs are a multiple of 64, not 96"),
        ("NVIDIA H200", FP8._replace(num_out=120), "bfloat16", "outputs are a multiple of 8 and at least 128, not 120"),
        ("NVIDIA H200", FP8._replace(num_out=132), "bfloat16", "outputs are a multiple of 8 and at least 128, not 132"),
        ("NVIDIA H200", INT4._replace(group_size=32), "bfloat16", "groups are of 64 or 128 inputs, not of 32"),
    ],
)
def test_what_lies_outside_the_domain_is_refused_and_left_to_xla(kind: str, case: Case, dtype: str, words: str) -> None:
    operands = shapes(case, dtype)
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        with pytest.raises(UnsupportedKernelError, match=f"takes these operands: mosaic_gpu: .*{words}"):
            choose(OP, "mosaic_gpu", operands, {"layer": 0})
        assert choose(OP, None, operands, {"layer": 0}).name == "xla"


def test_groups_of_other_types_are_refused() -> None:
    x, weights = shapes(INT4, "bfloat16")
    mixed = weights._replace(zeros=jax.ShapeDtypeStruct(weights.zeros.shape, "int8"))
    assert mosaic_gpu.domain_refusals(x, mixed) == ["scales and zero points are float32, bfloat16 or float16 alike, not float32 and int8"]


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="mosaic_gpu: it needs an NVIDIA GPU of compute capability 9.0"):
        choose(OP, "mosaic_gpu", shapes(INT8, "bfloat16"), {"layer": 0})
