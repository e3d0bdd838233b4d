"""Rotary embedding of new queries and keys, and the write of new keys and values into their pages, in place: the contract.

Token t of the step goes to page `write_pages[t]` of the layer, at `write_offsets[t]`, for every KV head.

* With angles, the pairs (x[i], x[i + half_dim]) of queries and keys are turned by their token's angle, in float32, and rounded to their
  type; dimensions from 2 * half_dim on stay as they are, and values are never turned. What the angles come from (base, scaling, part of
  the head) is the caller's: they are data, and may carry a magnitude.
* A page beyond the pool is padding: nothing is written for that token; its query comes out turned all the same.
* No two tokens have the same page and offset. Page numbers are never negative.
* All other memory of the pools keeps its bits, NaN included. Donated pools are updated in place and never copied.
* What is larger than the pages' type can hold becomes its largest number; NaN stays NaN.
"""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.kv_write import cpu, mosaic_gpu, reference, xla
from pallas_kernels.kv_write.rotation import Written


def _common_refusals(
    q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, write_pages: Any, write_offsets: Any, *, cos: Any, sin: Any, layer: Any
) -> list[str]:
    refusals = []
    if k_pages.ndim != (4 if layer is None else 5):
        refusals.append("k_pages has a leading layers axis exactly when a layer is given")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        refusals.append(f"k_pages {k_pages.dtype}{k_pages.shape} and v_pages {v_pages.dtype}{v_pages.shape} differ")
    if k.shape != v.shape or q.dtype != k.dtype or k.dtype != v.dtype:
        refusals.append(f"keys {k.dtype}{k.shape} and values {v.dtype}{v.shape} differ, or queries {q.dtype} from both")
    if k.shape[1:] != (k_pages.shape[-3], k_pages.shape[-1]):
        refusals.append(f"{k.shape[1]} heads of {k.shape[2]} for pages of {k_pages.shape[-3]} heads of {k_pages.shape[-1]}")
    if (cos is None) != (sin is None):
        refusals.append("angles are a cosine and a sine")
    elif cos is not None and 2 * cos.shape[1] > q.shape[2]:
        refusals.append(f"{cos.shape[1]} angles turn {2 * cos.shape[1]} dimensions, and a head has {q.shape[2]}")
    return refusals


def _mosaic_gpu_refusals(q: Any, k: Any, v: Any, k_pages: Any, *args: Any, cos: Any, **options: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(q, k, v, k_pages, *args, cos=cos, **options) or mosaic_gpu.refusals(q, k_pages, cos)


def _cpu_refusals(q: Any, k: Any, v: Any, k_pages: Any, *args: Any, **options: Any) -> list[str]:
    return _common_refusals(q, k, v, k_pages, *args, **options) or cpu.refusals(q, k_pages)


OP = Op(
    name="kv_write",
    implementations={
        "reference": Implementation("reference", reference.kv_write, _common_refusals),
        "xla": Implementation("xla", xla.kv_write, _common_refusals),
        "cpu": Implementation("cpu", cpu.kv_write, _cpu_refusals),
        "mosaic_gpu": Implementation("mosaic_gpu", mosaic_gpu.kv_write, _mosaic_gpu_refusals),
    },
    # No card has run the Mosaic kernel yet, so it runs when asked for by name.
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)


def kv_write(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    k_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    write_pages: Int32[Array, "tokens"],
    write_offsets: Int32[Array, "tokens"],
    *,
    cos: Float[Array, "tokens half_dim"] | None = None,
    sin: Float[Array, "tokens half_dim"] | None = None,
    layer: int | Int32[Array, ""] | None = None,
    implementation: str | None = None,
) -> Written:
    """Turns new queries and keys, and puts new keys and values into their pages; see the module's docstring for the contract.

    Args:
        q: queries of the step's tokens.
        k: keys, not turned yet.
        v: values.
        k_pages: the pool of keys; with a leading layers axis when `layer` is given, so that no layer is ever sliced out of it.
        v_pages: that of values, likewise.
        write_pages: each token's page; beyond the pool: nowhere.
        write_offsets: each token's place in its page.
        cos: cosine of every token's angles, times the table's magnitude; None: nothing is turned.
        sin: likewise.
        layer: index into the leading axis of the pages.
        implementation: "reference", "xla", "cpu" or "mosaic_gpu"; None takes the best for the device.

    Returns:
        The queries, turned, and the pools.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    args = (q, k, v, k_pages, v_pages, write_pages, write_offsets)
    options = {"cos": cos, "sin": sin, "layer": layer}
    return choose(OP, implementation, args, options).run(*args, **options)
