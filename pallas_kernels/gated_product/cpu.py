"""Gated product in C++ on CPU: `gate.h` has the work."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import native
from pallas_kernels.gpu_target import platform

_IS_GELU = {"silu": False, "gelu_pytorch_tanh": True}
_TYPES = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"))
"""Of the operands and of the result."""


def refusals(gate: Any, activation: str, dtype: Any) -> list[str]:
    """One sentence for each thing that it cannot do."""
    refused = []
    if activation not in _IS_GELU:
        refused.append(f"{activation} is left to XLA")
    if (types := (gate.dtype.name, jnp.dtype(dtype).name)) not in _TYPES:
        refused.append(f"it makes float32 or bfloat16 of float32, and bfloat16 of itself, not {types[1]} of {types[0]}")
    if platform() != "cpu":
        refused.append(f"it runs on cpu, not on {platform()}")
    elif (missing := native.library().missing) is not None:
        refused.append(missing)
    return refused


def gated_product(
    gate: Float[Array, "rows ffw"], up: Float[Array, "rows ffw"], *, activation: str, dtype: jax.typing.DTypeLike
) -> Float[Array, "rows ffw"]:
    """The contract of `pallas_kernels.gated_product`."""
    call = jax.ffi.ffi_call("jaxpaged_gated_product", jax.ShapeDtypeStruct(gate.shape, dtype))
    return call(gate, up, is_gelu=_IS_GELU[activation])
