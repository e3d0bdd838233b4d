"""Rows times a matrix, both float: the contract.

* Products and sums are float32; float32 operands are never rounded to TF32.
* The result of a row depends on the row and on the matrix only.
* Weights of other layers are never read: they may hold anything.
"""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dense_matmul import cpu, reference, xla
from pallas_kernels.dispatch import Implementation, Op, choose

__all__ = ["OP", "dense_matmul"]


def _common_refusals(x: Any, matrix: Any, *, layer: Any) -> list[str]:
    refusals = []
    if matrix.ndim != (2 if layer is None else 3):
        refusals.append("the matrix has a leading layers axis exactly when a layer is given")
    if x.shape[1] != matrix.shape[-1]:
        refusals.append(f"rows of {x.shape[1]} numbers for a matrix that takes {matrix.shape[-1]}")
    return refusals


def _cpu_refusals(x: Any, matrix: Any, *, layer: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(x, matrix, layer=layer) or cpu.refusals(x, matrix)


OP = Op(
    name="dense_matmul",
    implementations={
        "reference": Implementation("reference", reference.dense_matmul, _common_refusals),
        "xla": Implementation("xla", xla.dense_matmul, _common_refusals),
        "cpu": Implementation("cpu", cpu.dense_matmul, _cpu_refusals),
    },
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)


def dense_matmul(
    x: Float[Array, "rows in"],
    matrix: Float[Array, "*layers out in"],
    *,
    layer: int | Int32[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """`x @ matrix.T`; see the module's docstring for the contract.

    Args:
        x: rows, float32, bfloat16 or float16.
        matrix: weights as checkpoints have them; with a leading layers axis when `layer` is given.
        layer: index into the leading axis of the matrix.
        implementation: "reference", "xla" or "cpu"; None takes the best for the device.

    Returns:
        Float32 sums.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    args = (x, matrix)
    return choose(OP, implementation, args, {"layer": layer}).run(*args, layer=layer)
