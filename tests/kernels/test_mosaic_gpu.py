"""The Hopper kernels of paged attention in Pallas' GPU interpreter, with its race detector, and lowered for CUDA: no GPU is needed.

Shared memory that nothing was copied to is NaN in the interpreter, as is pool memory that no sequence owns.
"""

import functools
import inspect
import linecache
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.paged_attention import OP, mosaic_decode, mosaic_gpu, mosaic_prefill, paged_attention, reference
from pallas_kernels.paged_attention.cases import CASES, Case, make, options

pytestmark = [pytest.mark.jax]

INTERPRETER = plgpu.InterpretGPUParams(detect_races=True)
GPU_CASES = [case for case in CASES if "gpu" in case.tags]
MIXED = next(case for case in GPU_CASES if case.name == "gpu_mixed")
FIRST_CASES = [pytest.param(case, id=case.name) for case in GPU_CASES if "gpu_first" in case.tags]
OTHER_CASES = [pytest.param(case, id=case.name) for case in GPU_CASES if "gpu_first" not in case.tags]


def attend(case: Case, operands: dict[str, Any], **changes: Any) -> np.ndarray:
    """The operation as the engine calls it, interpreted on 3 CTAs."""
    run = functools.partial(mosaic_gpu.paged_attention, layer=None, group=None, num_ctas=3, interpret=INTERPRETER)
    return np.asarray(run(**jax.tree.map(jnp.asarray, operands), **(options(case) | changes))).astype(np.float32)


def expected(case: Case, operands: dict[str, Any]) -> np.ndarray:
    as_float32 = {k: v.astype(np.float32) if k in ("q", "k_pages", "v_pages") else v for k, v in operands.items()}
    named = {"sinks": None, **jax.tree.map(jnp.asarray, as_float32)}
    return np.asarray(reference.paged_attention(**named, **options(case), layer=None, group=None))


def tolerance(case: Case, operands: dict[str, Any]) -> float:
    """Of values below `largest`, the weights (whose sum is at most 1) are rounded to the compute type, and the result to the queries' type;
    each rounding is at most half a unit in the last place of 1. Sums are float32: some 1e-6."""
    largest = float(np.nanmax(np.abs(operands["v_pages"].astype(np.float32)))) * case.v_scale
    compute_dtype = jnp.float16 if case.page_dtype else jnp.dtype(case.dtype)
    return largest * (float(jnp.finfo(compute_dtype).eps) + float(jnp.finfo(case.dtype).eps)) / 2 + 1e-5


class FetchLog:
    """Counts what bulk copies read, by array and row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[Any, ...], Counter[int]] = {}
        copy = gpu_callbacks.copy_gmem_to_smem

        def logged(**arguments: Any) -> Any:
            # Two kernels may give their arrays the same numbers: the line of the copy tells them apart.
            line = source_info_util.summarize(arguments["source_info"])
            key = (line, *np.asarray(arguments["src_allocation_key_as_array"]).ravel().tolist())
            index = int(arguments["src_transforms"][0].indices[0])
            self.rows.setdefault(key, Counter())[index] += 1
            return copy(**arguments)

        monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", logged)
        # Programs that were traced before would go on with what they were traced with.
        mosaic_decode.decode.clear_cache()
        mosaic_prefill.prefill.clear_cache()

    def of_pools(self, wanted: Counter[int]) -> int:
        """How many arrays were read exactly as wanted."""
        return sum(rows == wanted for rows in self.rows.values())


def pages_seen(case: Case, operands: dict[str, Any], is_longer: bool) -> Counter[int]:
    """Rows of the pool, seen as [pages * kv_heads * parts], that must be read for one-token or for longer sequences.

    Those are the pages that rows see, once a KV head and tile of rows; of pages of more than 64 tokens, only the parts of 64 that they see.
    """
    wanted: Counter[int] = Counter()
    unit = min(case.page_size, 64)
    parts = case.page_size // unit
    tile_tokens = 128 // (case.heads // case.kv_heads)
    for seq, (q_len, kv_len) in enumerate(case.spans):
        for begin in range(0, q_len, tile_tokens) if (q_len > 1) == is_longer else ():
            position = kv_len - q_len + begin
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            for index in range(first // unit, -(-(position + min(tile_tokens, q_len - begin)) // unit)):
                page = int(operands["page_tables"][seq, index // parts])
                wanted.update((page * case.kv_heads + kv_head) * parts + index % parts for kv_head in range(case.kv_heads))
    return wanted


def check(case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, without races, padding 0, and what rows see fetched once for keys and once for values."""
    log = FetchLog(monkeypatch)
    operands = make(case)
    got = attend(case, operands)
    np.testing.assert_allclose(got, expected(case, operands), rtol=0, atol=tolerance(case, operands))
    assert "RACE" not in capfd.readouterr().out
    assert not got[operands["cu_q_lens"][-1] :].any()
    for is_longer in (False, True):
        wanted = pages_seen(case, operands, is_longer)
        is_by_xla = is_longer and case.page_dtype is not None and case.head_dim > mosaic_prefill.MAX_WIDENED_HEAD_DIM
        assert log.of_pools(wanted) == (2 if wanted and not is_by_xla else 0)


@pytest.mark.min_jax
@pytest.mark.parametrize("case", FIRST_CASES)
def test_equals_reference_without_races(case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, capfd, monkeypatch)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("case", OTHER_CASES)
def test_equals_reference_without_races_on_more_cases(
    case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, capfd, monkeypatch)


@pytest.mark.tier("kernels")
def test_moved_pages_layers_and_groups_give_equal_bits() -> None:
    operands = make(case := MIXED)
    got = attend(case, operands)
    np.testing.assert_array_equal(got, attend(case, operands))
    permutation = np.concatenate([[0], np.random.default_rng(1).permutation(len(operands["k_pages"]) - 1) + 1])
    for name in ("k_pages", "v_pages"):
        moved = np.empty_like(operands[name])
        moved[permutation] = operands[name]
        operands[name] = np.stack([np.full_like(moved, np.nan), moved])
    tables = permutation[operands["page_tables"]].astype(np.int32)
    operands["page_tables"] = np.stack([np.full_like(tables, 2**30), tables])
    np.testing.assert_array_equal(got, attend(case, operands, layer=jnp.int32(1), group=jnp.int32(1)))


class Planted:
    """`plgpu` of a kernel with one of its functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plant(**replaced: Any) -> None:
        monkeypatch.setattr(mosaic_decode, "plgpu", Planted(**replaced))
        mosaic_decode.decode.clear_cache()

    yield plant
    mosaic_decode.decode.clear_cache()
    gpu_callbacks.reset_gpu_interpret_mode_state()


SMALL = Case("planted", ((1, 150),), 2, 1, 64, 16, dtype="bfloat16")


@pytest.mark.tier("kernels")
def test_a_copy_that_is_not_waited_for_is_noticed(planted: Any, capfd: pytest.CaptureFixture[str]) -> None:

    def wait(barrier: Any) -> None:
        caller = inspect.currentframe().f_back
        if "rings.k_full" not in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
            plgpu.barrier_wait(barrier)

    planted(barrier_wait=wait)
    # So long that the ring of shared memory goes round: a phase of a barrier then ends that nobody has seen.
    long = Case("planted_long", ((1, 700),), 2, 1, 64, 64, dtype="bfloat16")
    try:
        attend(long, make(long), num_ctas=1)
    except jax.errors.JaxRuntimeError as error:  # jax 0.11 prints a race, jax 0.12 raises it
        report = str(error)
    else:
        report = capfd.readouterr().out
    assert "RACE DETECTED" in report or "no threads observed" in report


@pytest.mark.tier("kernels")
def test_pages_that_are_fetched_twice_or_are_not_owned_are_noticed(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = FetchLog(monkeypatch)
    operands = make(SMALL)
    # A page of nobody's in the place of the first: NaN, or another result, and a row that is not wanted.
    stolen = operands | {"page_tables": np.where(operands["page_tables"] == operands["page_tables"][0, 0], 0, operands["page_tables"])}
    got = attend(SMALL, stolen)
    assert not np.allclose(got, expected(SMALL, operands), atol=tolerance(SMALL, operands))
    assert log.of_pools(pages_seen(SMALL, operands, False)) == 0

    log.rows.clear()
    # The race detector would see the second copy as well: here the count has to.
    monkeypatch.setattr(sys.modules[__name__], "INTERPRETER", plgpu.InterpretGPUParams())
    planted(copy_gmem_to_smem=_copy_twice, Barrier=_barrier_of_twice)
    whole = Case("planted_whole_blocks", ((1, 128),), 2, 1, 64, 16, dtype="bfloat16")
    operands = make(whole)
    np.testing.assert_allclose(attend(whole, operands), expected(whole, operands), rtol=0, atol=tolerance(whole, operands))
    assert log.of_pools(pages_seen(whole, operands, False)) == 0


def _copy_twice(source: Any, target: Any, barrier: Any) -> None:
    for _ in range(2 if source.shape == (SMALL.page_size, SMALL.head_dim) else 1):
        plgpu.copy_gmem_to_smem(source, target, barrier)


def _barrier_of_twice(num_arrivals: int = 1, **rest: Any) -> Any:
    return plgpu.Barrier(num_arrivals=num_arrivals * (2 if num_arrivals > 1 else 1), **rest)


def mesh_of(kind: str) -> AbstractMesh:
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, 132, "gpu"))


def shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in make(case).items()}


def grid() -> list[Case]:
    cases = []
    for dtype, page_dtype in (("bfloat16", None), ("float16", None), ("bfloat16", "float8_e4m3fn")):
        for head_dim in (64, 96, 128, 256):
            for page_size, window, cap in ((8, None, None), (16, 50, None), (32, None, 30.0), (64, 50, 30.0), (128, None, None)):
                name = f"{dtype}_{page_dtype or dtype}_{head_dim}_{page_size}"
                spans = ((1, 100), (20, 30))
                cases.append(Case(name, spans, 8, 2, head_dim, page_size, window, cap, dtype=dtype, page_dtype=page_dtype))
    return cases


def lower(case: Case) -> str:
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        run = functools.partial(paged_attention, implementation="mosaic_gpu", **options(case))
        return jax.jit(run).trace(**shapes(case)).lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernel_lowers_for_hopper_and_is_not_chosen_unasked() -> None:
    """Lowering runs layout inference and the check of shared memory."""
    assert lower(MIXED).count("mosaic_gpu") >= 3  # the two walks and the combination
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert choose(OP, None, tuple(shapes(MIXED).values()), options(MIXED)).name == "xla"


@pytest.mark.tier("kernels")
@pytest.mark.min_jax
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in grid()])
def test_the_whole_grid_lowers(case: Case) -> None:
    assert "mosaic_gpu" in lower(case)


@pytest.mark.parametrize(
    ("kind", "case", "words"),
    [
        ("Tesla T4", SMALL, "it needs compute capability 9.0, and Tesla T4 has an unknown one"),
        ("NVIDIA A100 80GB PCIe", SMALL, "it needs compute capability 9.0, and NVIDIA A100 80GB PCIe has 8.0"),
        ("NVIDIA H200", SMALL._replace(dtype="float32"), "queries are bfloat16 or float16, not float32"),
        ("NVIDIA H200", SMALL._replace(page_dtype="float8_e5m2"), "or float8_e4m3fn, not float8_e5m2 beside bfloat16"),
        ("NVIDIA H200", SMALL._replace(head_dim=72), "head_dim is a multiple of 16 and at most 256 with bfloat16 pages, not 72"),
        ("NVIDIA H200", SMALL._replace(head_dim=80, page_dtype="float8_e4m3fn"), "head_dim is a multiple of 32 and at most 256"),
        ("NVIDIA H200", SMALL._replace(head_dim=512), "at most 256 with bfloat16 pages, not 512"),
        ("NVIDIA H200", SMALL._replace(page_size=24), "page_size is 8, 16, 32 or a multiple of 64, not 24"),
        ("NVIDIA H200", SMALL._replace(page_size=4), "page_size is 8, 16, 32 or a multiple of 64, not 4"),
        ("NVIDIA H200", SMALL._replace(is_causal=False), "its rows see no later positions"),
        ("NVIDIA H200", SMALL._replace(heads=65), "at most 64 query heads share a KV head, not 65"),
    ],
)
def test_what_lies_outside_the_domain_is_refused_and_left_to_xla(kind: str, case: Case, words: str) -> None:
    operands = shapes(case)
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        with pytest.raises(UnsupportedKernelError, match=f"takes these operands: mosaic_gpu: .*{words}"):
            choose(OP, "mosaic_gpu", tuple(operands.values()), options(case))
        assert choose(OP, None, tuple(operands.values()), options(case)).name == "xla"
