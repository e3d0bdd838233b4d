"""Every implementation of paged attention against the reference, and the reference against a loop in numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedKernelError
from pallas_kernels.paged_attention import NO_WINDOW, OP, paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case, make, options

pytestmark = [pytest.mark.jax, pytest.mark.min_jax]
ANYWHERE = ("reference", "xla", "cpu")
"""Implementations that run on any device; those for GPUs have tests of their own."""

CI_CASES = [pytest.param(case, id=case.name) for case in CASES if "ci" in case.tags]


def _by_loop(case: Case, operands: dict[str, np.ndarray]) -> np.ndarray:
    """One row after the other, in float64."""
    out = np.zeros(operands["q"].shape)
    group = case.heads // case.kv_heads
    for seq, (q_len, kv_len) in enumerate(case.spans):
        for row in range(q_len):
            token = operands["cu_q_lens"][seq] + row
            position = kv_len - q_len + row
            low = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            seen = np.arange(low, position + 1) if case.is_causal else np.arange(kv_len)
            pages = operands["page_tables"][seq][seen // case.page_size]
            for head in range(case.heads):
                keys = operands["k_pages"][pages, head // group, seen % case.page_size].astype(np.float64) * case.k_scale
                values = operands["v_pages"][pages, head // group, seen % case.page_size].astype(np.float64) * case.v_scale
                logits = keys @ operands["q"][token, head].astype(np.float64) * case.head_dim**-0.5
                if case.soft_cap is not None:
                    logits = case.soft_cap * np.tanh(logits / case.soft_cap)
                sink = float(operands["sinks"][head]) if case.has_sinks else -np.inf
                peak = max(logits.max(), sink)
                weights = np.exp(logits - peak)
                out[token, head] = weights @ values / (weights.sum() + np.exp(sink - peak))
    return out


@functools.cache
def _jitted(implementation: str, **named):
    return jax.jit(functools.partial(paged_attention, implementation=implementation, **named))


def _run(implementation: str, case: Case, operands: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(_jitted(implementation, **options(case))(**operands))


@pytest.mark.parametrize("case", CI_CASES)
def test_reference_equals_a_loop_over_rows(case: Case) -> None:
    operands = make(case)
    np.testing.assert_allclose(_run("reference", case, operands), _by_loop(case, operands), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("implementation", [name for name in ANYWHERE if name != "reference"])
@pytest.mark.parametrize("case", CI_CASES)
def test_equals_reference_with_nan_in_unowned_memory(case: Case, implementation: str) -> None:
    operands = make(case)
    expected = _run("reference", case, operands)
    got = _run(implementation, case, operands)
    np.testing.assert_allclose(got, expected, atol=3e-6, rtol=3e-5)
    num_live = operands["cu_q_lens"][-1]
    assert (got[num_live:] == 0).all()  # padding rows are exactly 0, though their queries are NaN
    np.testing.assert_array_equal(got, _run(implementation, case, operands))
    # The same tokens in other pages give the same bits.
    moved = make(case, seed=0)
    permutation = np.random.default_rng(1).permutation(len(moved["k_pages"]) - 1) + 1
    inverse = np.concatenate([[0], permutation])
    for name in ("k_pages", "v_pages"):
        pages = np.empty_like(moved[name])
        pages[inverse] = moved[name]
        moved[name] = pages
    moved["page_tables"] = inverse[moved["page_tables"]].astype(np.int32)
    np.testing.assert_array_equal(got, _run(implementation, case, moved))


@pytest.mark.parametrize("implementation", ANYWHERE)
@pytest.mark.parametrize("name", ["mixed", "decode_primes", "page_1", "sinks_window"])
def test_bfloat16_is_near_float32(name: str, implementation: str) -> None:
    case = next(c for c in CASES if c.name == name)
    operands = make(case, dtype="bfloat16")
    as_float32 = {k: v.astype(np.float32) if v.dtype == ml_dtypes.bfloat16 else v for k, v in operands.items()}
    got = _run(implementation, case, operands)
    assert got.dtype == ml_dtypes.bfloat16
    # Inputs are equal; what differs is rounding of weights and of the result to 8 bits of mantissa.
    np.testing.assert_allclose(got.astype(np.float32), _run("reference", case, as_float32), atol=2e-2, rtol=2e-2)


def test_a_layer_of_a_stacked_pool_is_the_layer_alone() -> None:
    case = next(c for c in CASES if c.name == "mixed")
    operands = make(case)
    expected = _run("xla", case, operands)
    for name in ("k_pages", "v_pages"):
        operands[name] = np.stack([np.full_like(operands[name], np.nan), operands[name]])
    for implementation in ANYWHERE:
        run = functools.partial(paged_attention, implementation=implementation, **options(case))
        got = np.asarray(jax.jit(run)(**operands, layer=jnp.int32(1)))
        np.testing.assert_allclose(got, expected, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize("implementation", ANYWHERE)
@pytest.mark.parametrize("name", ["mixed", "window_over_chunks", "window_far_apart"])
def test_a_window_and_a_group_can_be_data(name: str, implementation: str) -> None:
    """As in a stack whose layers differ: the same program serves both windows, and reads one group's tables of two."""
    case = next(c for c in CASES if c.name == name)
    operands = make(case)
    expected = _run(implementation, case, operands)
    operands["page_tables"] = np.stack([np.full_like(operands["page_tables"], 2**31 - 1), operands["page_tables"]])
    rest = options(case)
    window = jnp.int32(NO_WINDOW if case.sliding_window is None else case.sliding_window)
    run = functools.partial(paged_attention, implementation=implementation, scale=rest["scale"], soft_cap=rest["soft_cap"])
    got = jax.jit(run)(**operands, sliding_window=window, group=jnp.int32(1))
    np.testing.assert_array_equal(np.asarray(got), expected)


def test_the_512_token_program_gathers_no_row_per_token() -> None:
    """The gather of one row of pages per token would be 512 x chunk positions; the largest allowed is one block's chunk."""
    case = Case("t512", ((512, 512),), 9, 3, 64, 16, num_padding_seqs=31)
    operands = make(case)
    text = jax.jit(functools.partial(paged_attention, implementation="xla", **options(case))).lower(**operands).as_text()
    results = [line.rsplit("->", 1)[1] for line in text.splitlines() if '"stablehlo.gather"' in line]
    sizes = [int(np.prod([int(n) for n in line.split("<")[1].split("x")[:-1]] or [1])) for line in results]
    assert sizes, "the program gathers pages"
    assert max(sizes) <= 8 * 3 * 128 * 64  # DECODE_BLOCK_SEQS sequences x KV heads x chunk x head_dim


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 7}, "7 heads are no multiple of 3"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"layer": 0}, "leading layers axis"),
        ({"group": 0}, "leading groups axis"),
        ({"sliding_window": 7, "is_causal": False}, "a sliding window looks back"),
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
        ({"implementation": "mosaic_gpu"}, "it needs an NVIDIA GPU of compute capability 9.0, and this program is for another device"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(change: dict, words: str) -> None:
    case = next(c for c in CASES if c.name == "mixed")
    operands = make(case)
    if heads := change.pop("heads", None):
        operands["q"] = operands["q"][:, :heads]
    with pytest.raises(UnsupportedKernelError, match=words):
        paged_attention(**jax.tree.map(jnp.asarray, operands), **(options(case) | change))


def test_sinks_for_another_number_of_heads_are_refused() -> None:
    operands = list(make(next(c for c in CASES if c.name == "mixed")).values())
    for implementation in OP.implementations.values():
        assert implementation.refusals(*operands, sinks=np.zeros(3, np.float32)) == ["sinks of shape (3,) for 9 heads"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_rows_are_the_same_bits_alone_and_decoded(dtype: str) -> None:
    """Whatever the company, and whether a row comes in a prompt's chunk or by itself."""
    case = next(c for c in CASES if c.name == "mixed")
    operands = make(case, dtype=dtype)
    together = _run("cpu", case, operands)
    starts = operands["cu_q_lens"]
    for seq, (q_len, kv_len) in enumerate(case.spans):
        for row in sorted({0, q_len // 2, q_len - 1}):
            token = starts[seq] + row
            alone = {**operands, "q": operands["q"][token : token + 1], "page_tables": operands["page_tables"][seq : seq + 1]}
            alone |= {"kv_lens": np.array([kv_len - q_len + row + 1], np.int32), "cu_q_lens": np.array([0, 1], np.int32)}
            np.testing.assert_array_equal(_run("cpu", case, alone)[0], together[token])
