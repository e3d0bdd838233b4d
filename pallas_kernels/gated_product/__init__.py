"""An activation of one row times another, as in gated feed-forward blocks (Shazeer 2020): the contract.

`activation(gate) * up`, both rounded to the result's type first, the rest in float32 and rounded once or after every operation. A number
of the result depends on its two numbers only.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.gated_product import cpu, reference, xla
from pallas_kernels.gated_product.activations import ACTIVATIONS

__all__ = ["ACTIVATIONS", "OP", "gated_product"]


def _common_refusals(gate: Any, up: Any, *, activation: Any, dtype: Any) -> list[str]:
    refusals = []
    if gate.shape != up.shape or gate.dtype != up.dtype:
        refusals.append(f"gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape} differ")
    if activation not in ACTIVATIONS:
        refusals.append(f"activations are {', '.join(ACTIVATIONS)}, not {activation}")
    return refusals


def _cpu_refusals(gate: Any, up: Any, *, activation: Any, dtype: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(gate, up, activation=activation, dtype=dtype) or cpu.refusals(gate, activation, dtype)


OP = Op(
    name="gated_product",
    implementations={
        "reference": Implementation("reference", reference.gated_product, _common_refusals),
        "xla": Implementation("xla", xla.gated_product, _common_refusals),
        "cpu": Implementation("cpu", cpu.gated_product, _cpu_refusals),
    },
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)


def gated_product(
    gate: Float[Array, "rows ffw"],
    up: Float[Array, "rows ffw"],
    *,
    activation: str,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "rows ffw"]:
    """`activation(gate) * up`; see the module's docstring for the contract.

    Args:
        gate: rows, float32, bfloat16 or float16.
        up: rows of the same type.
        activation: a name in `ACTIVATIONS`.
        dtype: of the result.
        implementation: "reference", "xla" or "cpu"; None takes the best for the device.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    options = {"activation": activation, "dtype": dtype}
    return choose(OP, implementation, (gate, up), options).run(gate, up, **options)
