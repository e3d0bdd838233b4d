"""Inputs of grouped matmul, shared by the tests and the benchmark: odd and prime sizes first, then what served models use."""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """`group_sizes`: rows of each group; `tags` say where the case runs: ci, bench, gpu (the GPU interpreter), gpu_first (in every run)."""

    name: str
    group_sizes: tuple[int, ...]
    num_in: int
    num_out: int
    num_padding: int = 0
    tags: tuple[str, ...] = ("ci",)

    @property
    def num_rows(self) -> int:
        return sum(self.group_sizes) + self.num_padding


def _ragged(num_groups: int, num_rows: int, seed: int) -> tuple[int, ...]:
    """Rows drawn into groups, some groups far likelier than others."""
    random = np.random.default_rng(seed)
    drawn = random.choice(num_groups, size=num_rows, p=random.dirichlet(np.full(num_groups, 0.5)))
    return tuple(np.bincount(drawn, minlength=num_groups).tolist())


_PLAIN = (
    Case("one_row", (1,), 7, 5),
    Case("one_group", (67,), 13, 11),
    Case("nothing", (0, 0, 0), 7, 5, num_padding=3),
    Case("empty_groups", (0, 3, 0, 0, 19, 0), 17, 13, num_padding=5),
    Case("all_in_the_last", (0, 0, 0, 0, 131), 17, 13, num_padding=2),
    Case("all_in_the_first", (131, 0, 0, 0, 0), 17, 13),
    Case("block_edges", (8, 7, 9, 16, 1, 0, 24), 17, 13, num_padding=1),
    Case("large_blocks", (64, 65, 1, 127), 29, 31, num_padding=7),
    *(Case(f"ragged_{seed}", _ragged(11, 97, seed), 19, 23, num_padding=3) for seed in range(4)),
    Case("more_groups_than_rows", _ragged(61, 17, 5), 37, 41, num_padding=1),
)

_WHOLE_TILES = ((64, 64), (96, 160), (128, 32), (128, 64), (64, 128), (192, 96), (96, 64), (64, 192))
"""Sides of matrices that the Hopper kernel takes."""

_GPU = tuple(
    case._replace(
        name=f"gpu_{case.name}",
        num_in=_WHOLE_TILES[index % len(_WHOLE_TILES)][0],
        num_out=_WHOLE_TILES[index % len(_WHOLE_TILES)][1],
        tags=("gpu", "gpu_first") if case.name == "block_edges" else ("gpu",),
    )
    for index, case in enumerate(_PLAIN)
)

CASES = (
    *_PLAIN,
    *_GPU,
    Case("gpu_two_warpgroups", (70, 0, 129, 3, 90), 128, 128, num_padding=4, tags=("gpu", "gpu_first")),
    Case("gpu_ring_goes_round", (3, 0, 20, 1), 1536, 64, num_padding=3, tags=("gpu",)),
    Case("gpu_two_warpgroups_wide", (70, 128, 0, 66), 64, 512, num_padding=1, tags=("gpu",)),
    Case("mixtral_decode_8", _ragged(8, 16, 6), 4096, 14336, tags=("bench",)),
    Case("qwen3_30b_decode_1", _ragged(128, 8, 7), 2048, 768, tags=("bench",)),
    Case("qwen3_30b_decode_16", _ragged(128, 128, 8), 2048, 768, tags=("bench",)),
    Case("qwen3_30b_prefill_512", _ragged(128, 4096, 9), 2048, 768, tags=("bench",)),
)


def make(case: Case, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Operands of a case, with NaN in the rows that are padding and in the matrices of empty groups."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((case.num_rows, case.num_in)).astype(np.float32)
    x[sum(case.group_sizes) :] = np.nan
    weights = random.standard_normal((len(case.group_sizes), case.num_out, case.num_in)).astype(np.float32)
    weights *= np.float32(case.num_in**-0.5)
    weights[[size == 0 for size in case.group_sizes]] = np.nan
    return {"x": x.astype(dtype), "weights": weights.astype(dtype), "group_sizes": np.array(case.group_sizes, np.int32)}
