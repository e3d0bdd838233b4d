"""Inputs of kv_write, shared by the tests and the scripts: odd and prime sizes first, then what served models use."""

from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by name once it is imported)
import numpy as np


class Case(NamedTuple):
    """A step's tokens and their places.

    Attributes:
        half_dim: angles of a head; 0: nothing is turned.
        num_padding: tokens of no page, at the end.
        tags: where the case runs: ci, gpu (in the interpreter), gpu_first (of those, in `make test`), bench.
    """

    name: str
    num_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    half_dim: int
    dtype: str = "float32"
    page_dtype: str | None = None
    num_padding: int = 0
    magnitude: float = 1.0
    tags: tuple[str, ...] = ("ci",)


GPU, GPU_FIRST = ("ci", "gpu"), ("ci", "gpu", "gpu_first")

CASES = (
    Case("one_token", 1, 1, 1, 2, 1, 1),
    Case("primes", 7, 9, 3, 14, 5, 7, num_padding=3),
    Case("partly_turned", 5, 4, 2, 12, 3, 3, num_padding=1),
    Case("not_turned", 5, 4, 4, 10, 3, 0),
    Case("magnitude", 5, 4, 2, 8, 3, 4, magnitude=1.19),
    Case("only_padding", 0, 4, 2, 8, 3, 4, num_padding=4),
    Case("bf16", 6, 8, 2, 16, 4, 8, "bfloat16", num_padding=2),
    Case("f32_in_bf16", 6, 8, 2, 16, 4, 8, page_dtype="bfloat16"),
    Case("too_large_for_fp8", 6, 8, 2, 16, 4, 8, page_dtype="float8_e4m3fn", magnitude=400.0),
    Case("too_large_for_f16", 6, 8, 2, 16, 4, 8, "bfloat16", page_dtype="float16", magnitude=60_000.0),
    Case("gpu_odd_heads", 5, 9, 3, 64, 8, 32, "bfloat16", num_padding=2, tags=GPU_FIRST),
    Case("gpu_fp8_partly_turned", 3, 4, 1, 64, 16, 16, "bfloat16", "float8_e4m3fn", magnitude=400.0, tags=GPU_FIRST),
    Case("gpu_not_turned", 3, 4, 4, 32, 8, 0, "bfloat16", tags=GPU_FIRST),
    Case("gpu_llama_8b", 3, 32, 8, 128, 16, 64, "bfloat16", num_padding=1, tags=GPU),
    Case("gpu_wide_heads", 2, 4, 2, 256, 8, 128, "float16", tags=GPU),
    Case("gpu_more_than_64_heads", 2, 71, 1, 64, 8, 32, "bfloat16", tags=GPU),
    Case("gpu_phi_3", 3, 24, 8, 96, 8, 48, "bfloat16", magnitude=1.19, tags=GPU),
    Case("llama_8b_decode_32", 32, 32, 8, 128, 16, 64, "bfloat16", tags=("bench",)),
    Case("llama_8b_decode_256", 256, 32, 8, 128, 16, 64, "bfloat16", tags=("bench",)),
    Case("llama_8b_prefill_2048", 2048, 32, 8, 128, 16, 64, "bfloat16", tags=("bench",)),
)


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """Operands of a case: pools of NaN, places in any order."""
    random = np.random.default_rng(seed)
    num_rows = case.num_tokens + case.num_padding
    num_pages = -(-case.num_tokens // case.page_size) + 2
    page_dtype = case.page_dtype or case.dtype

    def normal(heads: int) -> np.ndarray:
        return random.standard_normal((num_rows, heads, case.head_dim)).astype(np.float32).astype(case.dtype)

    pool = np.full((num_pages, case.kv_heads, case.page_size, case.head_dim), np.nan, np.float32).astype(page_dtype)
    places = random.permutation(num_pages * case.page_size)[:num_rows]
    pages, offsets = np.divmod(places, case.page_size)
    # Each padding token has a page of its own, beyond the pool.
    pages[case.num_tokens :] = num_pages + np.arange(case.num_padding)
    angles = random.uniform(0, 2 * np.pi, (num_rows, case.half_dim)).astype(np.float32)
    return {
        "q": normal(case.heads),
        "k": normal(case.kv_heads),
        "v": normal(case.kv_heads) * np.asarray(case.magnitude, case.dtype),
        "k_pages": pool,
        "v_pages": pool.copy(),
        "write_pages": pages.astype(np.int32),
        "write_offsets": offsets.astype(np.int32),
        "cos": np.cos(angles) * np.float32(case.magnitude) if case.half_dim else None,
        "sin": np.sin(angles) * np.float32(case.magnitude) if case.half_dim else None,
    }
