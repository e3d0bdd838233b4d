"""Quantized matmul for `scripts/compile_kernels.py`: products of Llama 3 8B and SmolLM2, and the corners of the kernel's domain."""

import functools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from compile_kernels import Compiler, Report


class QuantizedCase(NamedTuple):
    """Rows by one layer of a stack of quantized matrices; `scale_dtype` is that of the groups of int4."""

    kind: str
    num_rows: int
    num_in: int
    num_out: int
    dtype: str = "bfloat16"
    group_size: int = 0
    scale_dtype: str = "float16"

    @property
    def name(self) -> str:
        groups = f" groups of {self.group_size} in {self.scale_dtype}" if self.group_size else ""
        return f"{self.num_rows} rows by {self.kind} {self.num_in} x {self.num_out}, {self.dtype}{groups}"


CASES = (
    QuantizedCase("int4", 16, 4096, 28672, group_size=128),
    QuantizedCase("int8", 16, 14336, 4096),
    QuantizedCase("fp8", 16, 4096, 6144),
    QuantizedCase("int4", 64, 14336, 4096, group_size=64, scale_dtype="float32"),
    QuantizedCase("int8", 64, 4096, 28672),
    QuantizedCase("fp8", 64, 14336, 4096),
    QuantizedCase("int4", 40, 4096, 4096, "float16", group_size=64),
    QuantizedCase("fp8", 1, 4096, 4096, "float16"),
    QuantizedCase("int8", 1, 576, 1536),
    QuantizedCase("int4", 8, 576, 1536, group_size=64),
)


def compile_quantized(compiler: "Compiler", case: QuantizedCase, num_layers: int = 4) -> tuple[list["Report"], dict[str, int]]:
    """Compiles the product by one layer, the layer being data; returns the reports, and the bytes of weights in flight by kernel."""
    import jax.numpy as jnp

    from pallas_kernels.quantized_matmul import Fp8Weights, Int4Weights, Int8Weights, mosaic_gpu, quantized_matmul

    rows = compiler.shape((case.num_rows, case.num_in), jnp.dtype(case.dtype))
    channel_scales = compiler.shape((num_layers, case.num_out), jnp.float32)
    weights: Int4Weights | Int8Weights | Fp8Weights
    if case.kind == "int4":
        groups = compiler.shape((num_layers, case.num_in // case.group_size, case.num_out), jnp.dtype(case.scale_dtype))
        weights = Int4Weights(compiler.shape((num_layers, case.num_out, case.num_in // 2), jnp.uint8), groups, groups)
    elif case.kind == "int8":
        weights = Int8Weights(compiler.shape((num_layers, case.num_out, case.num_in), jnp.int8), channel_scales)
    else:
        weights = Fp8Weights(compiler.shape((num_layers, case.num_out, case.num_in), jnp.float8_e4m3fn), channel_scales)
    operands = {"x": rows, "weights": weights, "layer": compiler.shape((), jnp.int32)}
    reports = compiler.compile(functools.partial(quantized_matmul, implementation="mosaic_gpu"), operands)
    shape = mosaic_gpu.matmul_shape(weights, case.num_rows, rows.dtype, mosaic_gpu.HOPPER_MULTIPROCESSORS)
    return reports, {"quantized_matmul": shape.in_flight_bytes}
