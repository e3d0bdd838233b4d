"""A Llama in numpy, whole sequences at once, no pages and no cache: the truth that paged, windowed and long runs are compared with."""

from collections.abc import Sequence

import numpy as np

from tests.tiny_model import Tensors

BLOCK_ROWS = 256


def logits(
    tensors: Tensors,
    token_ids: Sequence[int],
    *,
    windows: Sequence[int | None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float = 1e-5,
    num_last: int | None = None,
    log_n_from: int | None = None,
    dtype: type[np.floating] = np.float64,
) -> np.ndarray:
    """Logits [tokens, vocab] of all tokens, or of the last `num_last`, which costs less; arguments as for `hidden_states`."""
    hidden = hidden_states(
        tensors,
        token_ids,
        windows=windows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        theta=theta,
        eps=eps,
        num_last=num_last,
        log_n_from=log_n_from,
        dtype=dtype,
    )
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(dtype)
    return np.asarray(hidden @ head.T)


def hidden_states(
    tensors: Tensors,
    token_ids: Sequence[int],
    *,
    windows: Sequence[int | None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float = 1e-5,
    num_last: int | None = None,
    log_n_from: int | None = None,
    dtype: type[np.floating] = np.float64,
) -> np.ndarray:
    """What the head is given, behind the last norm: [tokens, embed] of all tokens, or of the last `num_last`.

    Args:
        tensors: weights by Hugging Face's names.
        token_ids: the sequence.
        windows: one entry for each layer.
        log_n_from: length behind which queries are multiplied by the logarithm of their place to this base, as in Qwen 1.
        dtype: what is computed in; angles are float32 as in Hugging Face's models, or far positions would turn otherwise.
    """
    weights = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    x = weights["model.embed_tokens.weight"][list(token_ids)]
    cos, sin = _turns(len(x), head_dim, theta, dtype)
    for layer, window in enumerate(windows):
        own = {
            name.split(".", 3)[3].removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        # Of the last layer only the rows that are asked for are needed, but the keys of all.
        first = len(x) - num_last if layer == len(windows) - 1 and num_last is not None else 0
        normed = _norm(x, own["input_layernorm"], eps)
        k = _rotate((normed @ own["self_attn.k_proj"].T).reshape(len(x), kv_heads, head_dim), cos, sin)
        v = (normed @ own["self_attn.v_proj"].T).reshape(len(x), kv_heads, head_dim)
        q = (normed[first:] @ own["self_attn.q_proj"].T).reshape(-1, heads, head_dim)
        if log_n_from is not None:
            q = q * np.maximum(1, np.log(np.arange(first + 1, len(x) + 1)) / np.log(log_n_from))[:, None, None]
        attended = _attend(_rotate(q, cos[first:], sin[first:]), k, v, first, window)
        x = x[first:] + attended.reshape(len(q), -1) @ own["self_attn.o_proj"].T
        normed = _norm(x, own["post_attention_layernorm"], eps)
        gate = normed @ own["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return _norm(x, weights["model.norm.weight"], eps)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, window: int | None) -> np.ndarray:
    """[rows, heads, head_dim] for the queries of positions `first` and on; block by block, so that long sequences fit in memory."""
    out = np.empty_like(q)
    num_shared = q.shape[1] // k.shape[1]
    for start in range(0, len(q), BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, len(q)))
        low = 0 if window is None else max(0, first + start - window + 1)
        high = first + rows.stop
        # Without a window every column before the block is seen by all of its rows.
        edge = low if window is not None else first + start
        distance = np.arange(first + start, high)[:, None] - np.arange(edge, high)
        is_hidden = (distance < 0) | (distance >= (window or high))
        for head in range(q.shape[1]):
            scores = (q[rows, head] * q.dtype.type(q.shape[2] ** -0.5)) @ k[low:high, head // num_shared].T
            scores[:, edge - low :][is_hidden] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            shares = np.exp(scores, out=scores)
            out[rows, head] = shares @ v[low:high, head // num_shared] / shares.sum(axis=1, keepdims=True)
    return out


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(eps)) * weight)


def _turns(num_tokens: int, head_dim: int, theta: float, dtype: type[np.floating]) -> tuple[np.ndarray, np.ndarray]:
    frequencies = 1.0 / (theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)))
    angles = np.arange(num_tokens, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    assert angles.dtype == np.float32
    return np.cos(angles.astype(np.float64)).astype(dtype)[:, None], np.sin(angles.astype(np.float64)).astype(dtype)[:, None]


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
