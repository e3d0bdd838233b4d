"""Inputs of quantized matmul, shared by the tests and the benchmark: odd and prime sizes first, then what served models use."""

from typing import NamedTuple

import numpy as np

from pallas_kernels.quantized_matmul.group_weights import Q4Weights, Q8Weights, quantize_q4, quantize_q8
from pallas_kernels.quantized_matmul.quantize import quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.quantized_matmul.weights import Fp8Weights, Int4Weights, Int8Weights


class Case(NamedTuple):
    """`kind`: int8, int4, fp8, q4 or q8; `group_size` of int4; `tags` say where the case runs: ci, bench, gpu (`mosaic_gpu`), gpu_first."""

    name: str
    kind: str
    num_rows: int
    num_in: int
    num_out: int
    group_size: int = 64
    layers: int | None = None
    tags: tuple[str, ...] = ("ci",)


CASES = (
    Case("int8_one_row", "int8", 1, 7, 5),
    Case("int8_two_rows", "int8", 2, 67, 19),
    Case("int8_primes", "int8", 13, 131, 37),
    Case("int8_edges", "int8", 17, 64, 65, layers=3),
    Case("int8_rows_37", "int8", 37, 193, 97, layers=2),
    Case("int8_smollm2_down", "int8", 3, 1536, 576),
    Case("int4_one_row", "int4", 1, 128, 5),
    Case("int4_primes", "int4", 13, 192, 37),
    Case("int4_layers", "int4", 3, 256, 19, group_size=128, layers=3),
    Case("fp8_primes", "fp8", 13, 131, 37),
    Case("fp8_layers", "fp8", 3, 67, 19, layers=3),
    Case("q4_one_row", "q4", 1, 32, 16),
    Case("q4_primes", "q4", 13, 352, 112),
    Case("q4_layers", "q4", 3, 96, 48, layers=3),
    Case("q4_rows_45", "q4", 45, 96, 48, layers=2),
    Case("q8_one_row", "q8", 1, 64, 32),
    Case("q8_primes", "q8", 11, 224, 80),
    Case("q8_layers", "q8", 6, 96, 48, layers=3),
    Case("gpu_int8", "int8", 3, 320, 136, layers=2, tags=("gpu", "gpu_first")),
    Case("gpu_int4", "int4", 5, 320, 264, layers=2, tags=("gpu", "gpu_first")),
    Case("gpu_fp8", "fp8", 9, 192, 200, layers=3, tags=("gpu", "gpu_first")),
    Case("gpu_int4_groups_of_128", "int4", 17, 1024, 200, group_size=128, tags=("gpu",)),
    Case("gpu_int4_one_row", "int4", 1, 128, 128, layers=2, tags=("gpu",)),
    *(
        Case(f"gpu_{kind}_ring_goes_round", kind, 2, num_in, 128, tags=("gpu",))
        for kind, num_in in (("int8", 2560), ("int4", 5120), ("fp8", 2560))
    ),
    *(Case(f"gpu_{kind}_64_rows", kind, 64, 512, 256, layers=2, tags=("gpu",)) for kind in ("int8", "int4", "fp8")),
    Case("gpu_int4_37_rows", "int4", 37, 384, 136, group_size=128, tags=("gpu",)),
    *(Case(f"int8_smollm2_gate_{rows}", "int8", rows, 576, 1536, tags=("bench",)) for rows in (2, 16, 512)),
    *(Case(f"{kind}_smollm2_gate_{rows}", kind, rows, 576, 1536, tags=("bench",)) for kind in ("q4", "q8") for rows in (1, 16, 512)),
    *(Case(f"int8_llama3_8b_down_{rows}", "int8", rows, 14336, 4096, tags=("bench",)) for rows in (2, 16)),
    *(Case(f"{kind}_llama3_8b_down_16", kind, 16, 14336, 4096, group_size=128, tags=("bench",)) for kind in ("int4", "fp8")),
)


def make(
    case: Case, seed: int = 0, dtype: str = "float32"
) -> tuple[np.ndarray, Int8Weights | Int4Weights | Fp8Weights | Q4Weights | Q8Weights]:
    """Rows and weights of a case; rows differ in size by a factor of a thousand, and the first of several is zeros."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((case.num_rows, case.num_in)).astype(np.float32)
    x *= 10 ** random.uniform(-1.5, 1.5, (case.num_rows, 1)).astype(np.float32)
    if case.num_rows > 1:
        x[0] = 0
    shape = (case.num_out, case.num_in) if case.layers is None else (case.layers, case.num_out, case.num_in)
    weight = random.standard_normal(shape).astype(np.float32) * np.float32(case.num_in**-0.5)
    weights: Int8Weights | Int4Weights | Fp8Weights | Q4Weights | Q8Weights
    match case.kind:
        case "int8":
            weights = quantize_int8(weight)
        case "int4":
            weights = quantize_int4(weight, case.group_size)
        case "q4" | "q8":
            quantize = quantize_q4 if case.kind == "q4" else quantize_q8
            layers = [quantize(own) for own in weight.reshape(-1, *shape[-2:])]
            stacked = [np.stack(parts) for parts in zip(*layers, strict=True)]
            weights = type(layers[0])(*(part if case.layers is not None else part[0] for part in stacked))
        case _:
            weights = quantize_fp8(weight)
    return x.astype(dtype), weights
