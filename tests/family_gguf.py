"""Writes small models of any family as GGUF files, as llama.cpp's converter does; `tests.tiny_families` makes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_model import Tensors, permute_rotary_rows

_INTERLEAVED = ("llama", "granite")
"""Architectures whose q and k rows the converter stores in another order."""


def write_family_gguf(
    path: str | Path, architecture: str, tensors: Tensors, hf_config: Mapping[str, Any], *, extra: Tensors, **metadata: Any
) -> None:
    """Writes a model of `tests.tiny_families` by the converter's own table of names; all tensors as F32, without tokenizer.

    Args:
        architecture: llama.cpp's word: q and k rows of some are interleaved, norms of Gemmas are stored with 1 added.
        hf_config: config.json of the same model.
        extra: further tensors by llama.cpp's names.
        metadata: further keys, without the architecture before them and with `__` for a dot.
    """
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, hf_config["num_hidden_layers"])
    heads, kv_heads = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    head_dim = hf_config.get("head_dim", hf_config["hidden_size"] // heads)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(hf_config["num_hidden_layers"])
    writer.add_context_length(hf_config["max_position_embeddings"])
    writer.add_embedding_length(hf_config["hidden_size"])
    writer.add_feed_forward_length(hf_config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(hf_config["rms_norm_eps"])
    writer.add_eos_token_id(hf_config["eos_token_id"])
    for key, value in metadata.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    if architecture == "gpt-oss":
        tensors = _as_in_gpt_oss(tensors)
    for name, tensor in _experts_together(tensors).items():
        stored = np.squeeze(tensor)
        if architecture in _INTERLEAVED and "q_proj" in name:
            stored = permute_rotary_rows(tensor, heads)
        elif architecture in _INTERLEAVED and "k_proj" in name:
            stored = permute_rotary_rows(tensor, kv_heads)
        elif architecture.startswith("gemma") and "norm" in name:
            stored = tensor + np.float32(1)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, stored)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_in_gpt_oss(tensors: Tensors) -> Tensors:
    """Experts with outputs before inputs, gate and up each in its own tensor, as llama.cpp's converter leaves them."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[f"{name}.weight" if name.endswith("sinks") else name] = tensor
            continue
        stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        turned = tensor if kind == "bias" else tensor.swapaxes(1, 2)
        if stem.endswith("gate_up_proj"):
            for offset, part in enumerate(("gate_proj", "up_proj")):
                stored[f"{stem.removesuffix('gate_up_proj')}{part}.{kind}"] = np.ascontiguousarray(turned[:, offset::2])
        else:
            stored[f"{stem}.{kind}"] = np.ascontiguousarray(turned)
    return stored


def _experts_together(tensors: Tensors) -> Tensors:
    """`experts.3.w1` and its like as one tensor `experts.w1`, as llama.cpp's converter joins them."""
    joined: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, found, rest = name.partition(".experts.")
        if found and rest[0].isdecimal():
            joined.setdefault(f"{stem}.experts.{rest.split('.', 1)[1]}", []).append(tensor)
        else:
            joined[name] = tensor
    return {name: np.stack(found) if isinstance(found, list) else found for name, found in joined.items()}
