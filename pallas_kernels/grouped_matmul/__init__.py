"""Rows in groups, each group times a matrix of its own: the contract. A mixture of experts is three of these.

Group g owns the rows of `x` from `sum(group_sizes[:g])` on, `group_sizes[g]` of them; each is multiplied by `weights[g].T`.

* Groups may be empty, and one may own all rows: there is no capacity, and no row is dropped.
* Rows from `sum(group_sizes)` on are padding, may hold anything, NaN included, and come out exactly 0.
* The weights of an empty group are never read, nor those of other layers: they may hold anything.
* The result of a row depends on the row and on its group's weights only.
"""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.grouped_matmul import cpu, mosaic_gpu, reference, xla


def _common_refusals(x: Any, weights: Any, group_sizes: Any, *, layer: Any) -> list[str]:
    refusals = []
    if weights.ndim != (3 if layer is None else 4):
        refusals.append("weights has a leading layers axis exactly when a layer is given")
    if weights.shape[-3] != group_sizes.shape[0]:
        refusals.append(f"{weights.shape[-3]} matrices for {group_sizes.shape[0]} groups")
    if weights.shape[-1] != x.shape[1]:
        refusals.append(f"rows of {x.shape[1]} numbers for matrices that take {weights.shape[-1]}")
    if weights.dtype != x.dtype:
        refusals.append(f"x is {x.dtype}, weights are {weights.dtype}")
    return refusals


def _mosaic_gpu_refusals(x: Any, weights: Any, *args: Any, **options: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(x, weights, *args, **options) or mosaic_gpu.refusals(x, weights)


def _cpu_refusals(x: Any, weights: Any, *args: Any, **options: Any) -> list[str]:
    return _common_refusals(x, weights, *args, **options) or cpu.refusals(x)


OP = Op(
    name="grouped_matmul",
    implementations={
        "reference": Implementation("reference", reference.grouped_matmul, _common_refusals),
        "xla": Implementation("xla", xla.grouped_matmul, _common_refusals),
        "cpu": Implementation("cpu", cpu.grouped_matmul, _cpu_refusals),
        "mosaic_gpu": Implementation("mosaic_gpu", mosaic_gpu.grouped_matmul, _mosaic_gpu_refusals),
    },
    # No card has run the Mosaic kernel yet, so it runs when asked for by name.
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)


def grouped_matmul(
    x: Float[Array, "rows in"],
    weights: Float[Array, "*layers experts out in"],
    group_sizes: Int32[Array, "experts"],
    *,
    layer: int | Int32[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """`x[row] @ weights[group of row].T` for every row; see the module's docstring for the contract.

    Args:
        x: rows, sorted by group.
        weights: one matrix a group, as checkpoints store them; with a leading layers axis when `layer` is given, so that no layer's
            experts are ever sliced out of the stack: a step of few rows reads few of them.
        group_sizes: rows of each group, none negative, together at most those of `x`.
        layer: index into the leading axis of the weights.
        implementation: "reference", "xla", "cpu" or "mosaic_gpu"; None takes the best for the device.

    Returns:
        Float32 sums; float32 operands are never rounded to TF32.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    args = (x, weights, group_sizes)
    return choose(OP, implementation, args, {"layer": layer}).run(*args, layer=layer)
