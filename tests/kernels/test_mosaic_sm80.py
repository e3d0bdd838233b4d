"""The Ampere kernel of paged attention: interpreted, with copies as late as its waits allow, and lowered for CUDA; no GPU is needed."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.dispatch import UnsupportedKernelError, choose
from pallas_kernels.paged_attention import OP, mosaic_sm80, paged_attention, reference
from pallas_kernels.paged_attention.cases import CASES, Case, make, options
from pallas_kernels.paged_attention.sm80_decode import Copies, PlainLoads, shared_bytes
from tests.kernels.late_copies import LateCopies, late_copies, register_mma

pytestmark = [pytest.mark.jax]

FIRST = Case(
    "window_cap_sinks",
    ((1, 1), (1, 200)),
    3,
    1,
    64,
    16,
    sliding_window=140,
    soft_cap=5.0,
    has_sinks=True,
    k_scale=0.5,
    v_scale=2.0,
    dtype="float16",
    num_padding_tokens=2,
    num_padding_seqs=1,
)
RING_GOES_ROUND = Case("ring_goes_round", ((1, 300), (1, 70), (1, 1)), 4, 2, 128, 64, dtype="bfloat16")
TWO_TILES = Case("two_tiles_of_rows", ((1, 200), (1, 33)), 17, 1, 96, 16, dtype="float16")
OTHERS = {"gpu_page_128_window", "gpu_ragged"}
OTHER_CASES = [RING_GOES_ROUND, TWO_TILES, *(case for case in CASES if case.name in OTHERS)]
SMALL = RING_GOES_ROUND._replace(name="small", spans=((1, 300),), heads=4, kv_heads=1)


def mesh_of(kind: str) -> AbstractMesh:
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(kind, 108, "gpu"))


def shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in make(case).items()}


def attend(case: Case, operands: dict[str, Any], copies: Copies) -> np.ndarray:
    """The operation as the engine calls it, interpreted on 2 CTAs."""
    register_mma()
    run = functools.partial(mosaic_sm80.paged_attention, layer=None, group=None, num_ctas=2, copies=copies)
    operands = jax.tree.map(jnp.asarray, operands)
    return np.asarray(run(**operands, **options(case), interpret=plgpu.InterpretGPUParams())).astype(np.float32)


def expected(case: Case, operands: dict[str, Any]) -> np.ndarray:
    as_float32 = {k: v.astype(np.float32) if k in ("q", "k_pages", "v_pages") else v for k, v in operands.items()}
    named = {"sinks": None, **jax.tree.map(jnp.asarray, as_float32)}
    return np.asarray(reference.paged_attention(**named, **options(case), layer=None, group=None))


def tolerance(case: Case, operands: dict[str, Any]) -> float:
    """The weights, whose sum is at most 1, are rounded to the type of the values, and the result to the same: each time by at most half a
    unit in the last place of 1, of values below `largest`. Sums are float32: some 1e-6."""
    largest = float(np.nanmax(np.abs(operands["v_pages"].astype(np.float32)))) * case.v_scale
    return largest * float(jnp.finfo(case.dtype).eps) + 1e-5


def pages_seen(case: Case, operands: dict[str, Any]) -> Counter[int]:
    """Rows of the pool, seen as [pages * kv_heads * parts], that one-token sequences see; a page of more than 64 tokens has parts of 64."""
    wanted: Counter[int] = Counter()
    unit = min(case.page_size, 64)
    parts = case.page_size // unit
    for seq, (q_len, kv_len) in enumerate(case.spans):
        first = 0 if case.sliding_window is None else max(0, kv_len - case.sliding_window)
        for index in range(first // unit, -(-kv_len // unit)) if q_len == 1 else ():
            page = int(operands["page_tables"][seq, index // parts])
            wanted.update((page * case.kv_heads + kv_head) * parts + index % parts for kv_head in range(case.kv_heads))
    return wanted


def check(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, padding 0, what rows see copied once for keys and once for values."""
    operands = make(case)
    with late_copies(monkeypatch) as queue:
        got = attend(case, operands, LateCopies())
    np.testing.assert_allclose(got, expected(case, operands), rtol=0, atol=tolerance(case, operands))
    assert not got[operands["cu_q_lens"][-1] :].any()
    assert sum(rows == pages_seen(case, operands) for rows in queue.rows.values()) == 2


@pytest.mark.min_jax
def test_equals_reference_however_late_copies_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    check(FIRST, monkeypatch)


@pytest.mark.tier("kernels")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OTHER_CASES])
def test_equals_reference_however_late_copies_arrive_on_more_cases(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.tier("kernels")
def test_a_second_run_gives_equal_bits_and_a_page_that_is_not_owned_is_noticed() -> None:
    """With copies that arrive at once: what they would overwrite too early is wrong then."""
    operands = make(SMALL)
    got = attend(SMALL, operands, PlainLoads())
    np.testing.assert_allclose(got, expected(SMALL, operands), rtol=0, atol=tolerance(SMALL, operands))
    np.testing.assert_array_equal(got, attend(SMALL, operands, PlainLoads()))
    stolen = operands | {"page_tables": np.where(operands["page_tables"] == operands["page_tables"][0, 0], 0, operands["page_tables"])}
    assert np.isnan(attend(SMALL, stolen, PlainLoads())).any()


class TooShort(LateCopies):
    """Waits that let one piece too many be under way."""

    def wait(self, num_newer: int) -> None:
        super().wait(num_newer + 1)


@pytest.mark.tier("kernels")
def test_a_wait_that_is_too_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with late_copies(monkeypatch):
        assert np.isnan(attend(SMALL, make(SMALL), TooShort())).any()


@pytest.fixture
def for_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mosaic takes any device that is not there for a Hopper."""
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: (8, 0))


def lower(case: Case) -> str:
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA A100-SXM4-80GB")):
        run = functools.partial(paged_attention, implementation="mosaic_sm80", **options(case))
        return jax.jit(run).trace(**shapes(case)).lower(lowering_platforms=("cuda",)).as_text()


def grid() -> list[Case]:
    cases = []
    for dtype, head_dim, page_size, heads, window, cap in (
        ("bfloat16", 64, 8, 8, None, None),
        ("float16", 64, 16, 6, 50, 30.0),
        ("bfloat16", 64, 64, 64, 50, None),
        ("float16", 96, 16, 8, None, 30.0),
        ("bfloat16", 96, 128, 40, None, None),
        ("float16", 128, 8, 2, 50, None),
        ("bfloat16", 128, 16, 128, None, 30.0),
        ("bfloat16", 160, 32, 8, None, None),
        ("bfloat16", 256, 16, 8, 50, 30.0),
        ("float16", 256, 64, 32, None, None),
    ):
        name = f"{dtype}_{head_dim}_{page_size}_{heads}"
        cases.append(Case(name, ((1, 100), (20, 30)), heads, 2, head_dim, page_size, window, cap, bool(window), dtype=dtype))
    return cases


def test_the_kernel_lowers_for_ampere_and_is_not_chosen_unasked(for_ampere: None) -> None:
    assert lower(FIRST).count("mosaic_gpu") >= 2  # the walk and the combination
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA A100-SXM4-80GB")):
        assert choose(OP, None, tuple(shapes(FIRST).values()), options(FIRST)).name == "xla"


@pytest.mark.tier("kernels")
@pytest.mark.min_jax
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in grid()])
def test_the_whole_grid_lowers(case: Case, for_ampere: None) -> None:
    assert "mosaic_gpu" in lower(case)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "heads", "capability", "plan"),
    [
        (64, 16, 4, (8, 0), (2, 4)),
        (128, 16, 4, (8, 0), (2, 2)),
        (256, 16, 4, (8, 0), (1, 2)),
        (64, 8, 4, (8, 0), (2, 3)),  # of 4 blocks the copies could not be counted
        (64, 16, 4, (8, 6), (2, 2)),
        (128, 64, 4, (8, 9), (1, 2)),
        (256, 64, 4, (8, 9), None),
    ],
)
def test_shared_memory_and_the_count_of_copies_bound_the_blocks_under_way(
    head_dim: int, page_size: int, heads: int, capability: tuple[int, int], plan: tuple[int, int] | None
) -> None:
    operands = shapes(SMALL._replace(head_dim=head_dim, page_size=page_size, heads=heads, kv_heads=1))
    assert mosaic_sm80.occupancy(operands["q"], operands["k_pages"], capability) == plan
    if plan:
        assert plan[0] * (shared_bytes(16, head_dim, plan[1]) + 1024) <= mosaic_sm80.SHARED_BYTES[capability]


A100 = "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("kind", "case", "words"),
    [
        ("NVIDIA H200", SMALL, "it needs compute capability 8.0, 8.6, 8.7 or 8.9, and NVIDIA H200 has 9.0"),
        ("Tesla T4", SMALL, "and Tesla T4 has an unknown one"),
        (A100, SMALL._replace(dtype="float32"), "queries are bfloat16 or float16, not float32"),
        (A100, SMALL._replace(page_dtype="float8_e4m3fn"), "pages are of the queries' dtype, not float8_e4m3fn beside bfloat16"),
        (A100, SMALL._replace(head_dim=80), "head_dim is a multiple of 32, not 80"),
        (
            A100,
            SMALL._replace(head_dim=96, page_size=8),
            "cannot share out a copy of 8 tokens of a head_dim of 96: larger pages are needed",
        ),
        (A100, SMALL._replace(page_size=24), "page_size is 8, 16, 32 or a multiple of 64, not 24"),
        (A100, SMALL._replace(is_causal=False), "its rows see no later positions"),
        (A100, SMALL._replace(heads=65), "at most 64 query heads share a KV head with a head_dim of 128, not 65"),
        (A100, SMALL._replace(heads=33, head_dim=256), "at most 32 query heads share a KV head with a head_dim of 256, not 33"),
        (
            "NVIDIA RTX A6000",
            SMALL._replace(head_dim=256),
            "it needs 151552 bytes of shared memory for a head_dim of 256, .* 101376",
        ),
    ],
)
def test_what_lies_outside_the_domain_is_refused_and_left_to_xla(kind: str, case: Case, words: str) -> None:
    operands = shapes(case)
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        with pytest.raises(UnsupportedKernelError, match=f"takes these operands: mosaic_sm80: .*{words}"):
            choose(OP, "mosaic_sm80", tuple(operands.values()), options(case))
        assert choose(OP, None, tuple(operands.values()), options(case)).name == "xla"


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"8\.0, 8\.6, 8\.7 or 8\.9, and this program is for another device"):
        choose(OP, "mosaic_sm80", tuple(shapes(SMALL).values()), options(SMALL))
