"""Qwen 1 (`QWenLMHeadModel`): a Llama under other names, whose longer texts turn by another base and whose queries grow on the way.

Dynamic NTK takes the base that the model's own code takes for the longest text of the engine; log-n attention multiplies the queries behind
the length trained for by `log(position + 1) / log(length)`, which needs no choice.
"""

import math
from typing import Any

import numpy as np

from jaxpaged.errors import UnsupportedModelError
from jaxpaged.layers.mlp import known_activation
from jaxpaged.layers.rope_frequencies import RopePlan, make_rope_table
from jaxpaged.models import llama
from jaxpaged.models.llama import Block, Model

__all__ = ["WEIGHTS", "Block", "Config", "Model"]


class Config:
    """Reads configs of this layout into Llama's."""

    @classmethod
    def from_hf(cls, hf: dict[str, Any], dtype: np.dtype, max_model_len: int | None) -> llama.Config:
        """Reads a config as `loading.model_config.settle` leaves it.

        Args:
            max_model_len: the longest text that the engine takes; None: what the model is made for.

        Raises:
            UnsupportedModelError: a variant we do not run.
        """
        for key, usual in (("no_bias", True), ("scale_attn_weights", True), ("rotary_pct", 1.0)):
            if hf.get(key, usual) != usual:
                raise UnsupportedModelError(f"{key} {hf[key]!r:.60} is not supported")
        if hf["intermediate_size"] % 2:
            raise UnsupportedModelError(f"intermediate_size {hf['intermediate_size']} is odd: it counts gate and up together")
        trained, layers = hf["seq_length"], hf["num_hidden_layers"]
        max_positions = hf["max_position_embeddings"] if hf["use_dynamic_ntk"] else min(trained, hf["max_position_embeddings"])
        length = max_positions if max_model_len is None else max_model_len
        theta = hf["rope_theta"] * (ntk_alpha(length, trained) if hf["use_dynamic_ntk"] else 1) ** (hf["head_dim"] / (hf["head_dim"] - 2))
        table = make_rope_table(None, theta=theta, dims=hf["head_dim"], max_positions=max_positions)
        return llama.Config(
            vocab=hf["vocab_size"],
            embed=hf["hidden_size"],
            ffw=hf["intermediate_size"] // 2,
            layers=layers,
            heads=hf["num_attention_heads"],
            kv_heads=hf["num_key_value_heads"],
            head_dim=hf["head_dim"],
            max_positions=max_positions,
            norm_eps=hf["rms_norm_eps"],
            activation=known_activation(hf["hidden_act"]),
            rope=RopePlan((table,), (0,) * layers, log_n_from=trained if hf["use_logn_attn"] else None),
            has_qkv_bias=True,
            has_out_bias=False,
            has_qk_norm=False,
            are_norms_wide=False,
            is_tied=hf["tie_word_embeddings"],
            dtype=dtype,
            windows=(None,) * layers,
        )


def ntk_alpha(length: int, trained: int) -> int:
    """What the base is multiplied by, to the power of dims / (dims - 2), for a text of `length` tokens."""
    return max(1, 2 ** math.ceil(math.log2(length / trained) + 1) - 1)


_LAYER = "transformer.h.{layer}."
_Q = "(heads head_dim) embed -> (heads head_dim) embed"
_KV = "(kv_heads head_dim) embed -> (kv_heads head_dim) embed"

WEIGHTS: dict[str, tuple[str, str]] = {
    "transformer.wte.weight": ("embedding.weight", "vocab embed -> vocab embed"),
    f"{_LAYER}ln_1.weight": ("layers.attention_norm.weight", "embed -> embed"),
    f"{_LAYER}attn.q.weight": ("layers.attention.q.weight", _Q),
    f"{_LAYER}attn.k.weight": ("layers.attention.k.weight", _KV),
    f"{_LAYER}attn.v.weight": ("layers.attention.v.weight", _KV),
    f"{_LAYER}attn.q.bias": ("layers.attention.q.bias", "(heads head_dim) -> (heads head_dim)"),
    f"{_LAYER}attn.k.bias": ("layers.attention.k.bias", "(kv_heads head_dim) -> (kv_heads head_dim)"),
    f"{_LAYER}attn.v.bias": ("layers.attention.v.bias", "(kv_heads head_dim) -> (kv_heads head_dim)"),
    f"{_LAYER}attn.c_proj.weight": ("layers.attention.o.weight", "embed (heads head_dim) -> embed (heads head_dim)"),
    f"{_LAYER}ln_2.weight": ("layers.mlp_norm.weight", "embed -> embed"),
    f"{_LAYER}mlp.w2.weight": ("layers.mlp.gate.weight", "ffw embed -> ffw embed"),
    f"{_LAYER}mlp.w1.weight": ("layers.mlp.up.weight", "ffw embed -> ffw embed"),
    f"{_LAYER}mlp.c_proj.weight": ("layers.mlp.down.weight", "embed ffw -> embed ffw"),
    "transformer.ln_f.weight": ("norm.weight", "embed -> embed"),
    "lm_head.weight": ("head.weight", "vocab embed -> vocab embed"),
}
"""Checkpoint name -> (path in the module tree, einops pattern of the tensor -> of one layer's parameter)."""
