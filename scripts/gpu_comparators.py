"""Parts of gpu_check.py that measure others, each only where it is there: torch, transformers, and kernels that come with jax."""

import importlib
import time
from collections.abc import Iterator
from typing import Any

from gpu_timing import Card, Row, per_call, seconds_of, skipped


def share_of(rate: float, ceiling: float) -> float | None:
    """Of a ceiling that was measured; None where that failed."""
    return rate / ceiling if ceiling else None


def found(*names: str) -> list[Any] | None:
    """The modules, or None where one is missing."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError:
        return None


def torch_attention(card: Card) -> Iterator[Row]:
    """What torch takes for one-token sequences whose keys and values lie side by side, without pages."""
    modules = found("torch")
    if modules is None:
        return (yield Row("torch", "torch is not there", 0.0, "B/s"))
    (torch,) = modules
    num_seqs, kv_len, head_dim = (2, 16, 64) if card.is_dry else (32, 2048, 128)
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu" if card.is_dry else "cuda"}
    q, kv = torch.randn(num_seqs, 32, 1, head_dim, **like), torch.randn(num_seqs, 8, kv_len, head_dim, **like)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        if not card.is_dry:
            torch.cuda.synchronize()

    rate = 2 * num_seqs * kv_len * 8 * head_dim * 2 / seconds_of(attend, 9)
    yield Row("torch", f"SDPA batch {num_seqs} context {kv_len} dim {head_dim}", rate, "B/s", share_of(rate, card.copy_bytes_per_s))


def flex_attention(card: Card) -> Iterator[Row]:
    """torch's compiled flex attention: the same decode, and a causal prompt."""
    modules = found("torch", "torch.nn.attention.flex_attention")
    if modules is None:
        return (yield Row("flex", "torch's flex attention is not there", 0.0, "B/s"))
    torch, flex = modules
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    head_dim = 64 if card.is_dry else 128
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu" if card.is_dry else "cuda"}

    def seconds(num_seqs: int, q_len: int, kv_len: int, mask: Any) -> float:
        q, kv = torch.randn(num_seqs, 32, q_len, head_dim, **like), torch.randn(num_seqs, 8, kv_len, head_dim, **like)

        def attend() -> None:
            compiled(q, kv, kv, block_mask=mask, enable_gqa=True)
            if not card.is_dry:
                torch.cuda.synchronize()

        return seconds_of(attend, 9)

    num_seqs, kv_len = (2, 16) if card.is_dry else (32, 2048)
    rate = 2 * num_seqs * kv_len * 8 * head_dim * 2 / seconds(num_seqs, 1, kv_len, None)
    yield Row("flex", f"decode batch {num_seqs} context {kv_len} dim {head_dim}", rate, "B/s", share_of(rate, card.copy_bytes_per_s))
    if not card.has_time():
        return (yield skipped("flex"))
    length = 128 if card.is_dry else 2048
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device=like["device"])
    rate = 4 * 32 * head_dim * length * (length + 1) / 2 / seconds(1, length, length, mask)
    yield Row("flex", f"prefill {length} dim {head_dim}", rate, "op/s", share_of(rate, card.flops_per_s))


def ragged_dot(card: Card) -> Iterator[Row]:
    """jax's own product of rows by expert for Hopper, beside ours: 256 rows of 64 experts, two for each token of 128."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import grouped_matmul

    if card.is_dry:
        return (yield Row("ragged_dot", "not on a CPU", 0.0, "B/s"))
    num_rows, experts, num_in, num_out = 256, 64, 2048, 2048
    x = jax.random.normal(jax.random.key(0), (num_rows, num_in), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (experts, num_out, num_in), jnp.bfloat16) * num_in**-0.5
    sizes = jnp.full(experts, num_rows // experts, jnp.int32)
    num_bytes = weights.nbytes
    for name in ("mosaic_gpu", "xla"):
        seconds = per_call(lambda x: grouped_matmul(x, weights, sizes, implementation=name).astype(x.dtype), x, is_dry=False)  # noqa: B023
        yield Row(
            "grouped",
            f"{name} {num_rows} rows, {experts} experts",
            num_bytes / seconds,
            "B/s",
            share_of(num_bytes / seconds, card.copy_bytes_per_s),
        )
    modules = found("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
    if modules is None:
        return (yield Row("ragged_dot", "jax's needs absl, which is not there", 0.0, "B/s"))
    (own,) = modules
    sizes_of = {"block_m": 64, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1, "transpose_rhs": True}
    seconds = per_call(lambda x: own.ragged_dot(x, weights, group_sizes=sizes, **sizes_of).astype(x.dtype), x, is_dry=False)
    yield Row(
        "ragged_dot",
        f"jax's {num_rows} rows, {experts} experts",
        num_bytes / seconds,
        "B/s",
        share_of(num_bytes / seconds, card.copy_bytes_per_s),
    )


def transformers(card: Card) -> Iterator[Row]:
    """Hugging Face transformers generating what the engine generates: a model of Llama 3 8B's shape with random weights."""
    modules = found("torch", "transformers")
    if modules is None:
        return (yield Row("transformers", "torch or transformers is not there", 0.0, "tokens/s"))
    torch, library = modules
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128_256}
    if card.is_dry:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 384}
    device = "cpu" if card.is_dry else "cuda"
    config = library.LlamaConfig(**sizes, max_position_embeddings=8192)
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt_tokens, answer_tokens = (8, 4) if card.is_dry else (512, 128)
    for concurrency in (1, 3) if card.is_dry else (1, 16, 64):
        if not card.has_time():
            return (yield skipped("transformers"))
        ids = torch.full((concurrency, prompt_tokens), 9, device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=answer_tokens,
                max_new_tokens=answer_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        tokens = concurrency * (answer.shape[1] - prompt_tokens)
        seconds = time.perf_counter() - start
        yield Row("transformers", f"{concurrency} requests of {prompt_tokens} + {answer_tokens} tokens", tokens / seconds, "tokens/s")


def triton(card: Card) -> Iterator[Row]:
    """jax's own paged attention, deprecated, as a comparator: one-token sequences."""
    import warnings

    import jax
    import jax.numpy as jnp

    if card.is_dry:
        return (yield Row("triton", "not on a CPU", 0.0, "B/s"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    num_seqs, kv_len, page_size, head_dim = 32, 2048, 16, 128
    pages_each = kv_len // page_size
    pool = jnp.full((8, num_seqs * pages_each, page_size, head_dim), 0.5, jnp.bfloat16)
    tables = jnp.arange(num_seqs * pages_each, dtype=jnp.int32).reshape(num_seqs, pages_each)
    lens = jnp.full(num_seqs, kv_len, jnp.int32)
    q = jax.random.normal(jax.random.key(0), (num_seqs, 32, head_dim), jnp.bfloat16)
    seconds = per_call(lambda q: paged_attention(q, pool, pool, tables, lens), q, is_dry=False)
    rate = 2 * num_seqs * kv_len * 8 * head_dim * 2 / seconds
    yield Row("triton", "batch 32 context 2048 dim 128 page 16", rate, "B/s", share_of(rate, card.copy_bytes_per_s))
