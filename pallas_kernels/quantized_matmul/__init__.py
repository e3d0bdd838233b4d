"""Rows times a quantized matrix: the contract.

`weights` is one of three kinds (`weights.py` says what their numbers stand for): `Int8Weights` multiplies int8 by int8, with each row of
`x` quantized on the way, to two int8 parts; `Int4Weights` and `Fp8Weights` keep the rows as they are.

* The result of a row depends on the row and on the matrix only: it is the same bits alone and among others.
* With int8, integer sums are exact and are scaled in one order, so that all implementations but the reference give equal bits.
* A row that holds NaN or an infinity comes out as NaN (int8: all of it).
* Weights of other layers are never read: they may hold anything.
"""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.gpu_target import platform
from pallas_kernels.quantized_matmul import cpu, mosaic_gpu, reference, xla
from pallas_kernels.quantized_matmul.quantize import quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.quantized_matmul.weights import LEVELS, Fp8Weights, Int4Weights, Int8Weights

__all__ = ["OP", "Fp8Weights", "Int4Weights", "Int8Weights", "quantize_fp8", "quantize_int4", "quantize_int8", "quantized_matmul"]

MAX_INT8_INPUTS = (2**31 - 1) // LEVELS**2
"""Longer sums of products of two int8 may not fit an int32."""

_DTYPES = {Int8Weights: "int8", Int4Weights: "uint8", Fp8Weights: "float8_e4m3fn"}


def _common_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    kind = type(weights)
    if kind not in _DTYPES:
        return [f"weights are {kind.__name__}, not Int8Weights, Int4Weights or Fp8Weights"]
    refusals = []
    values, scales = weights.values, weights.scales
    num_in = values.shape[-1] * (2 if kind is Int4Weights else 1)
    if values.dtype != _DTYPES[kind]:
        refusals.append(f"values of {kind.__name__} are {_DTYPES[kind]}, not {values.dtype}")
    if values.ndim != (2 if layer is None else 3):
        refusals.append("weights have a leading layers axis exactly when a layer is given")
    if num_in != x.shape[1]:
        refusals.append(f"rows of {x.shape[1]} numbers for a matrix that takes {num_in}")
    if kind is Int4Weights:
        if (*scales.shape[:-2], scales.shape[-1]) != values.shape[:-1] or scales.shape != weights.zeros.shape:
            refusals.append(f"scales {scales.shape} and zeros {weights.zeros.shape} for values {values.shape}")
        elif num_in % scales.shape[-2]:
            refusals.append(f"{num_in} inputs are no multiple of {scales.shape[-2]} groups")
    elif scales.shape != values.shape[:-1]:
        refusals.append(f"scales {scales.shape} for values {values.shape}")
    if kind is Int8Weights and num_in > MAX_INT8_INPUTS:
        refusals.append(f"sums of {num_in} products may not fit an int32; at most {MAX_INT8_INPUTS} do")
    return refusals


def _cpu_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(x, weights, layer=layer) or cpu.refusals(x, weights)


def _mosaic_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    return _common_refusals(x, weights, layer=layer) or mosaic_gpu.refusals(x, weights)


OP = Op(
    name="quantized_matmul",
    implementations={
        "reference": Implementation("reference", reference.quantized_matmul, _common_refusals),
        "xla": Implementation("xla", xla.quantized_matmul, _common_refusals),
        "cpu": Implementation("cpu", cpu.quantized_matmul, _cpu_refusals),
        "mosaic_gpu": Implementation("mosaic_gpu", mosaic_gpu.quantized_matmul, _mosaic_refusals),
    },
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)

_LEFT_TO_XLA = OP._replace(preference={"default": ("xla",)})

_MANY_ROWS = "quantized_matmul_of_many_rows"
"""A name of its own: who asks for a kernel of few rows gets it in the programs that decode, and those that prefill take what is best."""


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Int8Weights | Int4Weights | Fp8Weights,
    *,
    layer: int | Int32[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows out"]:
    """`x @ weights.T` for what the weights stand for; see the module's docstring for the contract.

    Args:
        x: rows, float32, bfloat16 or float16.
        weights: the matrix; with a leading layers axis when `layer` is given, so that no layer is ever sliced out of the stack.
        layer: index into the leading axis of the weights.
        implementation: "reference", "xla", "cpu" or "mosaic_gpu"; None takes what `dispatch.selecting` asks for, with up to 64 rows, or the
            best for the device and the number of rows.

    Returns:
        Float32 sums; float32 rows are never rounded to TF32.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    args = (x, weights)
    num_rows = x.shape[0]
    op = OP if platform() == "cpu" and num_rows <= cpu.max_rows() else _LEFT_TO_XLA
    if num_rows > mosaic_gpu.MAX_ROWS:
        op = op._replace(name=_MANY_ROWS)
    return choose(op, implementation, args, {"layer": layer}).run(*args, layer=layer)
