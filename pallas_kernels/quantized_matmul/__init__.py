"""Rows times a quantized matrix: the contract.

`weights` is one of five kinds (`weights.py` and `group_weights.py` say what their numbers stand for): `Int8Weights`, `Q4Weights` and
`Q8Weights` multiply integers by integers, with each row of `x` quantized on the way, to two int8 parts; `Int4Weights` and `Fp8Weights` keep
the rows as they are.

* The result of a row depends on the row and on the matrix only: it is the same bits alone and among others.
* With int8, integer sums are exact and are scaled in one order, so that all implementations but the reference give equal bits.
* With `Q4Weights` and `Q8Weights`, the integer sum of each group of inputs is exact; groups are scaled and added in float32, in their
  order. Products may be fused with these additions or not, which an implementation does always or never.
* Outputs of `Q4Weights` and `Q8Weights` are whole tiles: those of padding are zeros.
* A row that holds NaN or an infinity comes out as NaN (where rows are quantized: all of it).
* Weights of other layers are never read: they may hold anything.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.gpu_target import platform
from pallas_kernels.quantized_matmul import cpu, group_cpu, group_xla, mosaic_gpu, reference, xla
from pallas_kernels.quantized_matmul.group_weights import GROUP, TILE, Q4Weights, Q8Weights
from pallas_kernels.quantized_matmul.quantize import quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.quantized_matmul.weights import LEVELS, Fp8Weights, Int4Weights, Int8Weights

__all__ = [
    "OP",
    "Fp8Weights",
    "Int4Weights",
    "Int8Weights",
    "Q4Weights",
    "Q8Weights",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "quantized_matmul",
]

MAX_INT8_INPUTS = (2**31 - 1) // LEVELS**2
"""Longer sums of products of two int8 may not fit an int32."""

_DTYPES = {Int8Weights: "int8", Int4Weights: "uint8", Fp8Weights: "float8_e4m3fn"}

_GROUP_DTYPES = {Q4Weights: "uint8", Q8Weights: "int8"}


def _common_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    kind = type(weights)
    if kind in _GROUP_DTYPES:
        return _group_refusals(x, weights, layer=layer)
    if kind not in _DTYPES:
        names = [known.__name__ for known in (*_DTYPES, *_GROUP_DTYPES)]
        return [f"weights are {kind.__name__}, not {', '.join(names[:-1])} or {names[-1]}"]
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


def _group_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    name, dtype = type(weights).__name__, _GROUP_DTYPES[type(weights)]
    shape, num_bytes = weights.values.shape, GROUP * TILE // (2 if isinstance(weights, Q4Weights) else 1)
    refusals = []
    if weights.values.dtype != dtype:
        refusals.append(f"values of {name} are {dtype}, not {weights.values.dtype}")
    if len(shape) != (3 if layer is None else 4):
        refusals.append("weights have a leading layers axis exactly when a layer is given")
    if shape[-1] != num_bytes:
        refusals.append(f"values of {name} have {num_bytes} bytes a tile and group, not {shape[-1]}")
    if shape[-2] * GROUP != x.shape[1]:
        refusals.append(f"rows of {x.shape[1]} numbers for a matrix that takes {shape[-2] * GROUP}")
    for part in weights[1:]:
        if part.shape != (*shape[:-1], TILE) or part.dtype != "float16":
            refusals.append(f"scales and minima are float16 {(*shape[:-1], TILE)}, not {part.dtype} {part.shape}")
    return refusals


def _by_kind(of_channels: Callable[..., Any], of_groups: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation in two parts: for one scale an output or what has its own layout, and for `Q4Weights` and `Q8Weights`."""

    def run(x: Any, weights: Any, *, layer: Any) -> Any:
        chosen = of_groups if type(weights) in _GROUP_DTYPES else of_channels
        return chosen(x, weights, layer=layer)

    return run


def _cpu_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    of_kind = group_cpu.refusals(x) if type(weights) in _GROUP_DTYPES else cpu.refusals(x, weights)
    return _common_refusals(x, weights, layer=layer) or of_kind


def _mosaic_refusals(x: Any, weights: Any, *, layer: Any) -> list[str]:
    if common := _common_refusals(x, weights, layer=layer):
        return common
    return [f"{type(weights).__name__} are left to XLA"] if type(weights) in _GROUP_DTYPES else mosaic_gpu.refusals(x, weights)


OP = Op(
    name="quantized_matmul",
    implementations={
        "reference": Implementation("reference", reference.quantized_matmul, _common_refusals),
        "xla": Implementation("xla", _by_kind(xla.quantized_matmul, group_xla.quantized_matmul), _common_refusals),
        "cpu": Implementation("cpu", _by_kind(cpu.quantized_matmul, group_cpu.quantized_matmul), _cpu_refusals),
        "mosaic_gpu": Implementation("mosaic_gpu", mosaic_gpu.quantized_matmul, _mosaic_refusals),
    },
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)

_LEFT_TO_XLA = OP._replace(preference={"default": ("xla",)})

_MANY_ROWS = "quantized_matmul_of_many_rows"
"""A name of its own: who asks for a kernel of few rows gets it in the programs that decode, and those that prefill take what is best."""


def quantized_matmul(
    x: Float[Array, "rows in"],
    weights: Int8Weights | Int4Weights | Fp8Weights | Q4Weights | Q8Weights,
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
    if type(weights) in _GROUP_DTYPES:
        # One implementation for all numbers of rows, or a row's bits would depend on how many there are.
        return choose(OP, implementation, args, {"layer": layer}).run(*args, layer=layer)
    op = OP if platform() == "cpu" and num_rows <= cpu.max_rows() else _LEFT_TO_XLA
    if num_rows > mosaic_gpu.MAX_ROWS:
        op = op._replace(name=_MANY_ROWS)
    return choose(op, implementation, args, {"layer": layer}).run(*args, layer=layer)
