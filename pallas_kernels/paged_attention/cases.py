"""Inputs of paged attention, shared by the tests and the benchmark: odd and prime sizes first, then what served models use."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """`spans` holds one (query rows, tokens in the pool) a sequence; `tags` say where the case runs: ci, bench, or
    gpu for what Mosaic GPU kernels take (gpu_first: of these the ones that every test run looks at)."""

    name: str
    spans: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_causal: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0
    dtype: str = "float32"
    page_dtype: str | None = None
    num_padding_tokens: int = 0
    num_padding_seqs: int = 0
    tags: tuple[str, ...] = ("ci",)


CASES = (
    Case("one_token", ((1, 1),), 1, 1, 16, 1),
    Case("one_token_page_edge", ((1, 16),), 3, 1, 16, 16, num_padding_tokens=1, num_padding_seqs=1),
    Case("decode_primes", ((1, 7), (1, 31), (1, 17), (1, 127), (1, 131)), 6, 2, 32, 16, num_padding_tokens=3, num_padding_seqs=3),
    Case("decode_lengths_every_order", tuple((1, n) for n in (100, 1, 33, 15, 31, 17, 16)), 9, 3, 64, 16, num_padding_tokens=9),
    Case("prefill_whole", ((67, 67),), 3, 3, 32, 5),
    Case("prefill_chunk", ((13, 149),), 9, 3, 64, 16, num_padding_tokens=3),
    Case("prefill_many_blocks", ((129, 257), (2, 2), (65, 300)), 4, 2, 16, 8, num_padding_tokens=60),
    Case(
        "mixed", ((1, 45), (19, 19), (1, 300), (70, 200), (1, 1), (3, 64), (1, 129)), 9, 3, 64, 16, num_padding_tokens=7, num_padding_seqs=4
    ),
    Case("page_64", ((1, 129), (31, 190), (1, 64)), 9, 3, 64, 64, num_padding_tokens=2),
    Case("page_1", ((1, 33), (5, 9), (1, 140)), 4, 4, 16, 1),
    Case("page_256", ((1, 300), (5, 9)), 4, 2, 16, 256),
    Case("window_8", ((1, 7), (1, 8), (1, 9), (17, 17), (20, 60), (1, 300)), 4, 2, 16, 4, sliding_window=8),
    Case("window_1", ((1, 7), (9, 30)), 4, 2, 16, 16, sliding_window=1),
    Case("window_over_chunks", ((150, 400), (1, 500)), 4, 1, 16, 16, sliding_window=130),
    Case("window_far_apart", ((1, 700), (1, 33), (1, 1), (70, 900), (1, 256), (3, 3)), 4, 2, 16, 8, sliding_window=32),
    Case("soft_cap", ((1, 77), (33, 90)), 4, 2, 32, 16, soft_cap=5.0),
    Case("sinks", ((1, 7), (1, 131), (33, 90), (2, 2), (5, 5)), 6, 2, 16, 8, has_sinks=True, num_padding_tokens=3, num_padding_seqs=2),
    Case("sinks_window", ((1, 300), (1, 1), (70, 200)), 3, 3, 16, 8, sliding_window=32, has_sinks=True, num_padding_tokens=2),
    Case("bidirectional", ((67, 67), (1, 1), (2, 2), (130, 130)), 4, 2, 16, 8, is_causal=False, num_padding_tokens=2, num_padding_seqs=1),
    Case("multi_query_head_dim_odd", ((1, 50), (7, 20)), 5, 1, 20, 16),
    Case("scales", ((1, 77), (9, 90)), 4, 2, 32, 16, k_scale=0.5, v_scale=3.0),
    Case(
        "gpu_ragged",
        ((1, 1), (1, 129), (3, 5), (1, 64), (1, 65)),
        6,
        2,
        64,
        16,
        num_padding_tokens=2,
        num_padding_seqs=1,
        tags=("gpu",),
        dtype="bfloat16",
    ),
    Case(
        "gpu_window_cap_sinks",
        ((1, 1), (1, 70), (9, 137), (1, 300)),
        3,
        1,
        64,
        8,
        sliding_window=70,
        soft_cap=5.0,
        has_sinks=True,
        tags=("gpu", "gpu_first"),
        dtype="float16",
    ),
    Case(
        "gpu_fp8",
        ((1, 63), (5, 150)),
        4,
        2,
        64,
        32,
        k_scale=0.5,
        v_scale=2.0,
        tags=("gpu", "gpu_first"),
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
    ),
    Case(
        "gpu_mixed",
        ((50, 170), (1, 5), (3, 3), (1, 70)),
        8,
        2,
        64,
        16,
        num_padding_tokens=3,
        num_padding_seqs=1,
        tags=("gpu", "gpu_first"),
        dtype="bfloat16",
    ),
    Case(
        "gpu_few_rows",
        ((1, 70), (1, 1)),
        8,
        4,
        64,
        16,
        has_sinks=True,
        num_padding_tokens=1,
        num_padding_seqs=1,
        tags=("gpu", "gpu_first"),
        dtype="bfloat16",
    ),
    Case("gpu_longer_window_cap_sinks", ((70, 150), (9, 9)), 3, 1, 64, 8, 40, 5.0, has_sinks=True, tags=("gpu",), dtype="float16"),
    Case("gpu_longer_window_far", ((40, 330),), 8, 1, 64, 32, sliding_window=65, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_longer_head_dim_128_page_64", ((33, 140),), 4, 1, 128, 64, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_longer_head_dim_256_page_128", ((5, 260), (2, 130)), 4, 2, 256, 128, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_longer_ring_goes_round", ((4, 700),), 4, 1, 64, 64, tags=("gpu",), dtype="float16"),
    Case(
        "gpu_longer_fp8",
        ((20, 150), (1, 9)),
        4,
        1,
        64,
        32,
        k_scale=0.5,
        v_scale=2.0,
        tags=("gpu",),
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
    ),
    Case("gpu_longer_fp8_head_dim_256", ((20, 80),), 2, 1, 256, 64, tags=("gpu",), dtype="bfloat16", page_dtype="float8_e4m3fn"),
    Case("gpu_multi_head_page_64", ((1, 64), (1, 191)), 3, 3, 64, 64, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_page_128", ((1, 128), (1, 129), (1, 60)), 8, 1, 128, 128, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_page_128_window", ((1, 400), (1, 129)), 8, 1, 128, 128, sliding_window=100, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_head_dim_96", ((1, 200), (1, 33)), 4, 2, 96, 16, tags=("gpu",), dtype="float16"),
    Case("gpu_head_dim_256", ((1, 300), (1, 3)), 4, 1, 256, 16, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_64_heads_share", ((1, 100),), 64, 1, 64, 32, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_long_splits", ((1, 1500), (1, 2)), 8, 1, 64, 32, has_sinks=True, tags=("gpu",), dtype="bfloat16"),
    Case("gpu_fp8_head_dim_256", ((1, 140), (1, 1)), 2, 1, 256, 64, tags=("gpu",), dtype="bfloat16", page_dtype="float8_e4m3fn"),
    Case(
        "gpu_fp8_head_dim_96_window",
        ((1, 140), (1, 9)),
        2,
        1,
        96,
        8,
        sliding_window=11,
        tags=("gpu",),
        dtype="float16",
        page_dtype="float8_e4m3fn",
    ),
    *(
        Case(f"smollm2_decode_{batch}_ctx{context}", ((1, context),) * batch, 9, 3, 64, 16, tags=("bench",))
        for batch in (1, 8, 16)
        for context in (64, 200, 1000)
    ),
    *(
        Case(f"smollm2_prefill_{rows}_after_{before}", ((rows, before + rows),), 9, 3, 64, 16, tags=("bench",))
        for rows, before in ((64, 0), (128, 0), (256, 0), (64, 512), (512, 512))
    ),
    Case("smollm2_decode_16", tuple((1, 271 + 13 * i) for i in range(16)), 9, 3, 64, 16, tags=("bench",)),
    Case("smollm2_decode_32_ctx2k", tuple((1, 2000 + i) for i in range(32)), 9, 3, 64, 16, tags=("bench",)),
    Case("smollm2_prefill_512", ((512, 512),), 9, 3, 64, 16, tags=("bench",)),
    Case("smollm2_15_decodes_497_prefill", (*((1, 271 + 13 * i) for i in range(15)), (497, 497)), 9, 3, 64, 16, tags=("bench",)),
    Case("llama3_8b_decode_8", tuple((1, 1000 + 31 * i) for i in range(8)), 32, 8, 128, 16, tags=("bench",)),
)


def make(case: Case, seed: int = 0, dtype: str | None = None) -> dict[str, np.ndarray]:
    """Operands of a case: pages in shuffled order, and NaN wherever no sequence owns the memory (page 0, spare pages, rests).

    Pages behind the window of a sequence's rows have been given back: their entries are 0. With `dtype`, everything is of that type
    instead of the case's own.
    """
    rng = np.random.default_rng(seed)
    q_lens = [q for q, _ in case.spans] + [0] * case.num_padding_seqs
    kv_lens = [kv for _, kv in case.spans] + [0] * case.num_padding_seqs
    pages_of = [-(-n // case.page_size) for n in kv_lens]
    num_pages = sum(pages_of) + 4
    order = rng.permutation(np.arange(1, num_pages))
    shape = (num_pages, case.kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    page_tables = np.zeros((len(q_lens), max(pages_of) + 2), np.int32)
    used = 0
    for seq, (length, count) in enumerate(zip(kv_lens, pages_of, strict=True)):
        pages = order[used : used + count]
        used += count
        page_tables[seq, :count] = pages
        for array in (k_pages, v_pages):
            history = rng.standard_normal((length, case.kv_heads, case.head_dim)).astype(np.float32)
            for token in range(length):
                array[pages[token // case.page_size], :, token % case.page_size] = history[token]
        if case.sliding_window is not None and length:
            behind = max(0, length - q_lens[seq] - case.sliding_window + 1) // case.page_size
            k_pages[pages[:behind]] = v_pages[pages[:behind]] = np.nan
            page_tables[seq, :behind] = 0
    num_tokens = sum(q_lens) + case.num_padding_tokens
    q = rng.standard_normal((num_tokens, case.heads, case.head_dim)).astype(np.float32)
    # Padding rows may hold anything as well.
    q[sum(q_lens) :] = np.nan
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    q_dtype, page_dtype = dtype or case.dtype, dtype or case.page_dtype or case.dtype
    # As large as the largest logits, so that they take a share that shows.
    sinks = {"sinks": (1 + rng.standard_normal(case.heads)).astype(q_dtype)} if case.has_sinks else {}
    return {
        "q": q.astype(q_dtype),
        "k_pages": k_pages.astype(page_dtype),
        "v_pages": v_pages.astype(page_dtype),
        "page_tables": page_tables,
        "kv_lens": np.array(kv_lens, np.int32),
        "cu_q_lens": cu_q_lens,
        **sinks,
    }


def options(case: Case) -> dict[str, float | int | None]:
    """Keyword arguments of a case."""
    named: dict[str, float | int | None] = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap}
    scales = {"scale": case.head_dim**-0.5, "k_scale": case.k_scale, "v_scale": case.v_scale}
    return {"is_causal": case.is_causal, **scales, **named}
