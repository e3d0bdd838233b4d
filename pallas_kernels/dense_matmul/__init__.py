"""Rows times a matrix, both float: the contract.

* Products and sums are float32; float32 operands are never rounded to TF32.
* The result of a row depends on the row and on the matrix only.
* Weights of other layers are never read: they may hold anything.
"""

from typing import Any

import jax.numpy as jnp
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

_OP_OF_MANY_ROWS = Op(
    name="dense_matmul_of_many_rows",
    implementations={name: OP.implementations[name] for name in ("reference", "xla")},
    preference={"default": ("xla",)},
)
"""A name of its own: who asks for the kernel of few rows gets it in the programs that decode, and those that prefill are left to XLA.

Not so bfloat16, of which the native kernel takes any number of rows.
"""


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
        implementation: "reference", "xla" or, for bfloat16 and up to `cpu.MAX_ROWS` rows, "cpu"; None takes the
            best for the device and the number of rows.

    Returns:
        Float32 sums.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    args = (x, matrix)
    op = OP if x.shape[0] <= cpu.MAX_ROWS or x.dtype == jnp.bfloat16 else _OP_OF_MANY_ROWS
    return choose(op, implementation, args, {"layer": layer}).run(*args, layer=layer)
