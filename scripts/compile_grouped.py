"""Grouped matmul for `scripts/compile_kernels.py`: steps of mixtures of experts that are served."""

import functools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from compile_kernels import Compiler, Report


class GroupedCase(NamedTuple):
    """Rows for the experts of one layer of a stack."""

    num_rows: int
    num_experts: int
    num_in: int
    num_out: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.num_rows} rows, {self.num_experts} experts {self.num_in} x {self.num_out}, {self.dtype}"


CASES = (
    GroupedCase(128, 128, 2048, 768),  # Qwen 3 30B, a step of 16 tokens
    GroupedCase(2048, 8, 4096, 14336),  # Mixtral, a prompt of 1024
    GroupedCase(8, 128, 768, 2048),  # Qwen 3 30B, one token
    GroupedCase(16, 8, 14336, 4096),  # Mixtral, a step of 8 tokens
    GroupedCase(4096, 128, 2048, 768, "float16"),  # Qwen 3 30B, a prompt of 512
    GroupedCase(4096, 32, 2880, 2880),  # gpt-oss, a prompt of 1024
    GroupedCase(64, 60, 352, 2048, "float16"),  # Qwen 1.5 MoE, a quarter of each expert
    GroupedCase(64, 60, 2048, 96),
)


def compile_grouped(compiler: "Compiler", case: GroupedCase, num_layers: int = 4) -> tuple[list["Report"], dict[str, int]]:
    """Compiles the product of one layer, the layer being data; returns the reports, and the bytes in flight by kernel."""
    import jax.numpy as jnp

    from pallas_kernels.gpu_target import HOPPER_MULTIPROCESSORS
    from pallas_kernels.grouped_matmul import grouped_matmul
    from pallas_kernels.grouped_matmul.mosaic_gpu import plan

    dtype = jnp.dtype(case.dtype)
    operands = {
        "x": compiler.shape((case.num_rows, case.num_in), dtype),
        "weights": compiler.shape((num_layers, case.num_experts, case.num_out, case.num_in), dtype),
        "group_sizes": compiler.shape((case.num_experts,), jnp.int32),
        "layer": compiler.shape((), jnp.int32),
    }
    reports = compiler.compile(functools.partial(grouped_matmul, implementation="mosaic_gpu"), operands)
    shape = plan(case.num_rows, case.num_experts, case.num_in, case.num_out, dtype, HOPPER_MULTIPROCESSORS)
    return reports, {"multiply_groups": shape.in_flight_bytes}
