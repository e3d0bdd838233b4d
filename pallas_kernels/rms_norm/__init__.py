"""Root mean square normalization of rows (Zhang & Sennrich 2019): the contract.

`x * rsqrt(mean(x * x) + eps)` in float32, rounded to the type of `x`, times the weight; or times `offset + weight` in float32 and rounded
then, where `is_scaled_wide`.

* The result of a row depends on the row and on the weight only.
* Weights of other layers are never read: they may hold anything.
"""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.rms_norm import cpu, reference, xla

__all__ = ["OP", "rms_norm"]


def _common_refusals(x: Any, weight: Any, *, layer: Any, **_: Any) -> list[str]:
    refusals = []
    if weight.ndim != (1 if layer is None else 2):
        refusals.append("the weight has a leading layers axis exactly when a layer is given")
    if x.shape[-1] != weight.shape[-1]:
        refusals.append(f"rows of {x.shape[-1]} numbers for a weight of {weight.shape[-1]}")
    return refusals


def _cpu_refusals(x: Any, weight: Any, *, layer: Any, **options: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(x, weight, layer=layer) or cpu.refusals(x, weight)


OP = Op(
    name="rms_norm",
    implementations={
        "reference": Implementation("reference", reference.rms_norm, _common_refusals),
        "xla": Implementation("xla", xla.rms_norm, _common_refusals),
        "cpu": Implementation("cpu", cpu.rms_norm, _cpu_refusals),
    },
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)


def rms_norm(
    x: Float[Array, "*rows embed"],
    weight: Float[Array, "*layers embed"],
    *,
    eps: float,
    offset: float = 0.0,
    is_scaled_wide: bool = False,
    layer: int | Int32[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows embed"]:
    """Rows of mean square 1, times the weight; see the module's docstring for the contract.

    Args:
        x: rows, float32, bfloat16 or float16.
        weight: with a leading layers axis when `layer` is given.
        eps: added to the mean of squares.
        offset: added to the weight; only where `is_scaled_wide`.
        is_scaled_wide: whether the weight multiplies in float32, before the result is rounded to x's type, or after.
        layer: index into the leading axis of the weight.
        implementation: "reference", "xla" or "cpu"; None takes the best for the device.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    options = {"eps": eps, "offset": offset, "is_scaled_wide": is_scaled_wide, "layer": layer}
    return choose(OP, implementation, (x, weight), options).run(x, weight, **options)
