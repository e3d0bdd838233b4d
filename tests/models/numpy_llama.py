"""A Llama in numpy and float64, whole sequences at once, no pages and no cache: the truth that paged, windowed models are compared with."""

from collections.abc import Sequence

import numpy as np

from tests.tiny_model import Tensors


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
) -> np.ndarray:
    """Logits [tokens, vocab]. `tensors` have Hugging Face's names; `windows` holds one entry for each layer."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = weights["model.embed_tokens.weight"][list(token_ids)]
    positions = np.arange(len(x))
    for layer, window in enumerate(windows):
        own = {
            name.split(".", 3)[3].removesuffix(".weight"): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = _norm(x, own["input_layernorm"], eps)
        q, k, v = (
            (normed @ own[f"self_attn.{name}_proj"].T).reshape(len(x), count, head_dim)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (np.repeat(array, heads // kv_heads, axis=1) for array in (_rotate(k, positions, theta), v))
        scores = np.einsum("qhd,khd->hqk", _rotate(q, positions, theta), k) / head_dim**0.5
        distance = positions[:, None] - positions
        is_seen = (distance >= 0) & (distance < (window or len(x)))
        scores = np.where(is_seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1) @ own["self_attn.o_proj"].T
        normed = _norm(x, own["post_attention_layernorm"], eps)
        gate = normed @ own["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.asarray(_norm(x, weights["model.norm.weight"], eps) @ head.T)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def _rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1)
