"""Attention of ragged queries over a paged KV cache: the contract.

Sequence s owns the query rows `cu_q_lens[s] : cu_q_lens[s + 1]` of `q`; they are its last rows, so row i of q_len rows stands at
position `kv_lens[s] - q_len + i` and sees every earlier position and itself. Token t of the sequence lies in page
`page_tables[s, t // page_size]` at offset `t % page_size`; its key and value must already be written.

* Without `is_causal` a row sees all of its sequence, its later positions too.
* Rows from `cu_q_lens[-1]` on are padding and come out exactly 0.
* A padding sequence repeats `cu_q_lens` and has `kv_len` 0; whatever its page table holds is never looked at.
* Memory that no sequence owns (other pages, and the rest of a last page) may hold anything, NaN included.
* With a window, page table entries for pages that no query row sees may name any page: they may have been given to others.
* With sinks, each head has one more logit beside those of the positions, with no value behind it: it takes its share of the softmax.
* The result of a row depends on its own sequence only.
"""

from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, Op, choose
from pallas_kernels.paged_attention import cpu, mosaic_gpu, mosaic_sm80, reference, xla

NO_WINDOW = 2**31 - 1
"""A window that no sequence fills."""


def _common_refusals(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_tables: Any,
    *_: Any,
    layer: Any = None,
    group: Any = None,
    sliding_window: Any = None,
    sinks: Any = None,
    is_causal: bool = True,
    **__: Any,
) -> list[str]:
    refusals = []
    if page_tables.ndim != (2 if group is None else 3):
        refusals.append("page_tables has a leading groups axis exactly when a group is given")
    if k_pages.ndim != (4 if layer is None else 5):
        refusals.append("k_pages has a leading layers axis exactly when a layer is given")
    if k_pages.shape != v_pages.shape:
        refusals.append(f"k_pages {k_pages.shape} and v_pages {v_pages.shape} differ")
    if q.shape[1] % k_pages.shape[-3]:
        refusals.append(f"{q.shape[1]} heads are no multiple of {k_pages.shape[-3]} KV heads")
    if q.shape[2] != k_pages.shape[-1]:
        refusals.append(f"head_dim of q {q.shape[2]} and of the pages {k_pages.shape[-1]} differ")
    if isinstance(sliding_window, int) and sliding_window < 1:
        refusals.append(f"sliding_window must be at least 1, got {sliding_window}")
    if not is_causal and sliding_window is not None:
        refusals.append("a sliding window looks back, and rows that see everything have none")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        refusals.append(f"sinks of shape {sinks.shape} for {q.shape[1]} heads")
    return refusals


def _mosaic_gpu_refusals(q: Any, k_pages: Any, *args: Any, **options: Any) -> list[str]:
    # Its own words only for operands that make sense at all.
    return _common_refusals(q, k_pages, *args, **options) or mosaic_gpu.refusals(q, k_pages, options.get("is_causal", True))


def _cpu_refusals(q: Any, k_pages: Any, *args: Any, **options: Any) -> list[str]:
    return _common_refusals(q, k_pages, *args, **options) or cpu.refusals(q, k_pages)


def _mosaic_sm80_refusals(q: Any, k_pages: Any, *args: Any, **options: Any) -> list[str]:
    return _common_refusals(q, k_pages, *args, **options) or mosaic_sm80.refusals(q, k_pages, options.get("is_causal", True))


OP = Op(
    name="paged_attention",
    implementations={
        "reference": Implementation("reference", reference.paged_attention, _common_refusals),
        "xla": Implementation("xla", xla.paged_attention, _common_refusals),
        "mosaic_gpu": Implementation("mosaic_gpu", mosaic_gpu.paged_attention, _mosaic_gpu_refusals),
        "cpu": Implementation("cpu", cpu.paged_attention, _cpu_refusals),
        "mosaic_sm80": Implementation("mosaic_sm80", mosaic_sm80.paged_attention, _mosaic_sm80_refusals),
    },
    # The Mosaic kernels are proven by the interpreter and the compiler; no card has run them yet, so they run when asked for by name.
    preference={"default": ("xla",), "cpu": ("cpu", "xla")},
)


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "*layers pages kv_heads page_size head_dim"],
    page_tables: Int32[Array, "*groups seqs max_pages"],
    kv_lens: Int32[Array, "seqs"],
    cu_q_lens: Int32[Array, "seqs+1"],
    *,
    layer: int | Int32[Array, ""] | None = None,
    group: int | Int32[Array, ""] | None = None,
    scale: float,
    sliding_window: int | Int32[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    is_causal: bool = True,
    k_scale: float | Float[Array, ""] = 1.0,
    v_scale: float | Float[Array, ""] = 1.0,
    implementation: str | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attention of each sequence's query rows over its own pages; see the module's docstring for the contract.

    Args:
        q: queries of all sequences, one after another, rotary embedding applied.
        k_pages: keys; with a leading layers axis when `layer` is given, so that no layer is ever sliced out of the pool.
        v_pages: values, likewise.
        page_tables: page numbers of each sequence, in order; with a leading groups axis when `group` is given.
        kv_lens: tokens of each sequence that are in the pool, its query rows included.
        cu_q_lens: where each sequence's query rows begin; the last entry is the number of live rows.
        layer: index into the leading axis of the pages.
        group: index into the leading axis of the page tables.
        scale: multiplies the logits (usually head_dim ** -0.5).
        sliding_window: a row sees itself and at most this many minus one positions before it; an array when it differs from layer
            to layer, `NO_WINDOW` for those that see everything.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` before masking.
        sinks: a finite logit for each head that takes part in the softmax and gives nothing; neither scaled nor capped.
        is_causal: whether a row sees its own position and those before it, or all.
        k_scale: what is stored in `k_pages` stands for `k_scale` times it.
        v_scale: likewise for `v_pages`.
        implementation: "reference", "xla", "mosaic_gpu", "mosaic_sm80" or "cpu"; None takes the best for the device.

    Returns:
        The attended values, in q's dtype.

    Raises:
        UnsupportedKernelError: no implementation takes the operands; the sentence says why.
    """
    args = (q, k_pages, v_pages, page_tables, kv_lens, cu_q_lens)
    options = {
        "layer": layer,
        "group": group,
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "is_causal": is_causal,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    return choose(OP, implementation, args, options).run(*args, **options)
