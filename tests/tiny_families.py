"""Makes small models of any family on the spot, as Hugging Face saves them; `tests.tiny_model` makes Llamas with all their files.

Weights are functions of the arguments alone: drawn in the order of the tensors, which is that of the checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.tiny_model import Tensors, save_safetensors

Shapes = dict[str, tuple[int, ...]]

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


def layer_shapes(
    config: Mapping[str, Any],
    *,
    norms: Sequence[str] = PRE_NORMS,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: str | None = None,
    is_fused: bool = False,
    experts: str | None = None,
    sinks: bool = False,
) -> Shapes:
    """Shapes of one layer's tensors by their names in it.

    Args:
        config: of the whole model; `head_dim` may be left out, as in config.json.
        norms: names of the layer's norms.
        qk_norm: "head": one weight for every head's dimensions; "rows": one for all heads together; None: there are none.
        is_fused: q, k and v in one tensor, gate and up in one.
        experts: "mixtral", "qwen" or "gpt_oss", by whose names there are experts in place of one feed-forward block, Qwen's with a
            shared one if the config says so.
        sinks: a logit more for each head.
    """
    hidden, ffw, heads, kv_heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.get("head_dim", hidden // heads)
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    shapes: Shapes = {f"{norm}.weight": (hidden,) for norm in norms}
    if is_fused:
        shapes["self_attn.qkv_proj.weight"] = (sum(widths.values()), hidden)
    else:
        shapes |= {f"self_attn.{name}_proj.weight": (width, hidden) for name, width in widths.items()}
    if qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
    if qk_norm is not None:
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim if qk_norm == "head" else widths[name],) for name in "qk"}
    shapes["self_attn.o_proj.weight"] = (hidden, widths["q"])
    if out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if sinks:
        shapes["self_attn.sinks"] = (heads,)
    if experts is not None:
        return shapes | _expert_shapes(config, experts)
    shapes |= (
        {"mlp.gate_up_proj.weight": (2 * ffw, hidden)}
        if is_fused
        else {f"mlp.{name}_proj.weight": (ffw, hidden) for name in ("gate", "up")}
    )
    shapes["mlp.down_proj.weight"] = (hidden, ffw)
    return shapes


def _expert_shapes(config: Mapping[str, Any], experts: str) -> Shapes:
    hidden = config["hidden_size"]
    if experts == "gpt_oss":
        num_experts, ffw = config["num_local_experts"], config["intermediate_size"]
        shapes = {"mlp.router.weight": (num_experts, hidden), "mlp.router.bias": (num_experts,)}
        shapes |= {"mlp.experts.gate_up_proj": (num_experts, hidden, 2 * ffw), "mlp.experts.gate_up_proj_bias": (num_experts, 2 * ffw)}
        return shapes | {"mlp.experts.down_proj": (num_experts, ffw, hidden), "mlp.experts.down_proj_bias": (num_experts, hidden)}

    def gated(stem: str, ffw: int, names: Sequence[str]) -> Shapes:
        return {f"{stem}.{name}.weight": shape for name, shape in zip(names, ((ffw, hidden), (ffw, hidden), (hidden, ffw)), strict=True)}

    if experts == "mixtral":
        stem, names, num_experts, ffw = "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"], config["intermediate_size"]
    else:
        stem, names = "mlp", ("gate_proj", "up_proj", "down_proj")
        num_experts, ffw = config["num_experts"], config["moe_intermediate_size"]
    shapes: Shapes = {f"{stem}.gate.weight": (num_experts, hidden)}
    for expert in range(num_experts):
        shapes |= gated(f"{stem}.experts.{expert}", ffw, names)
    if shared := config.get("shared_expert_intermediate_size"):
        shapes |= gated(f"{stem}.shared_expert", shared, names) | {f"{stem}.shared_expert_gate.weight": (1, hidden)}
    return shapes


def tiny_tensors(config: Mapping[str, Any], *, norm_mean: float = 1.0, seed: int = 0, **options: Any) -> Tensors:
    """Random float32 weights by Hugging Face's names.

    Args:
        norm_mean: what norms' weights lie around.
        options: those of `layer_shapes`.
    """
    random = np.random.default_rng(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, **options).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape)
        if "norm" in name:
            drawn = norm_mean + 0.1 * drawn
        elif name.endswith("bias"):
            drawn = 0.5 * drawn
        else:
            # Queries and keys are large, so that attention is sharp and positions show.
            drawn *= (2 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1) * shape[-1] ** -0.5
        tensors[name] = drawn.astype(np.float32)
    return tensors


def in_mxfp4(tensors: Tensors, seed: int = 1) -> Tensors:
    """The same model with experts of another kind: random 4-bit numbers, about as large, in place of each `mlp.experts.*_proj`."""
    random = np.random.default_rng(seed)
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        num_experts, num_in, num_out = tensor.shape
        scales = (num_experts, num_out, num_in // 32)
        stored[f"{name}_blocks"] = random.integers(256, size=(*scales, 16), dtype=np.uint8)
        stored[f"{name}_scales"] = random.integers(121, 125, size=scales, dtype=np.uint8)
    return stored


def write_tiny_family(
    folder: str | Path,
    *,
    architecture: str,
    vocab_size: int,
    config: Mapping[str, Any],
    mxfp4: bool = False,
    **options: Any,
) -> Tensors:
    """Writes a model as a folder without tokenizer and returns its tensors.

    Args:
        architecture: in config.json.
        config: further keys of config.json; those for sizes have defaults, prime or nearly so. A value of None removes a key.
        mxfp4: whether experts are in 4 bits; widths are multiples of 32 then.
        options: those of `tiny_tensors`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf_config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": 84,
        "intermediate_size": 53,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **config,
    }
    hf_config = {key: value for key, value in hf_config.items() if value is not None}
    tensors = tiny_tensors(hf_config, **options)
    if mxfp4:
        hf_config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        tensors = in_mxfp4(tensors)
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2), encoding="utf-8")
    return tensors


def write_tiny_qwen(folder: str | Path, *, vocab_size: int, config: Mapping[str, Any] = MappingProxyType({})) -> Tensors:
    """Writes a Qwen 1 as a folder without tokenizer and returns its tensors. Its numbers are those of `as_qwen2`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf_config: dict[str, Any] = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "hidden_size": 84,
        "intermediate_size": 106,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "kv_channels": 14,
        "vocab_size": vocab_size,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **config,
    }
    tensors: Tensors = {}
    for name, tensor in tiny_tensors(qwen2_config(hf_config), qkv_bias=True).items():
        renamed = name
        for theirs, ours in _QWEN_NAMES.items():
            renamed = renamed.replace(theirs, ours)
        if "_proj." in name and ".self_attn." in name and "o_proj" not in name:
            stem, kind = renamed.rsplit(".self_attn.", 1)
            fused = f"{stem}.attn.c_attn.{kind.split('.')[1]}"
            tensors[fused] = np.concatenate([tensors[fused], tensor]) if fused in tensors else tensor
        else:
            tensors[renamed] = tensor
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2), encoding="utf-8")
    return tensors


_QWEN_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}


def qwen2_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the Qwen 2 that computes what a Qwen 1 computes up to the length that it was trained for."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"] // 2,
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["seq_length"],
        "rms_norm_eps": config["layer_norm_epsilon"],
        "rope_theta": float(config["rotary_emb_base"]),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write_as_qwen2(folder: Path) -> None:
    """Puts in place of the Qwen 1 of `write_tiny_qwen` in `folder` the same model as a Qwen 2, which transformers still runs."""
    config = qwen2_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    save_safetensors(folder / "model.safetensors", tiny_tensors(config, qkv_bias=True))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_tiny_bert(folder: str | Path, *, vocab_size: int, config: Mapping[str, Any] = MappingProxyType({})) -> Tensors:
    """Writes an encoder as a folder without tokenizer and returns its tensors; sizes and options as for `write_tiny_family`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    hf_config: dict[str, Any] = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 84,
        "intermediate_size": 53,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": vocab_size,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "torch_dtype": "float32",
        **config,
    }
    random = np.random.default_rng(0)
    hidden, ffw = hf_config["hidden_size"], hf_config["intermediate_size"]
    linear = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden), "attention.self.value": (hidden, hidden)}
    linear |= {"attention.output.dense": (hidden, hidden), "intermediate.dense": (ffw, hidden), "output.dense": (hidden, ffw)}
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (vocab_size, hidden),
        "embeddings.position_embeddings.weight": (hf_config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (hf_config["type_vocab_size"], hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(hf_config["num_hidden_layers"]):
        stem = f"encoder.layer.{layer}."
        shapes |= {f"{stem}{name}.weight": shape for name, shape in linear.items()}
        shapes |= {f"{stem}{name}.bias": shape[:1] for name, shape in linear.items()}
        norms += [f"{stem}attention.output.LayerNorm", f"{stem}output.LayerNorm"]
    shapes |= {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}
    shapes |= {"pooler.dense.weight": (hidden, hidden), "pooler.dense.bias": (hidden,)}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape)
        if name.endswith("LayerNorm.weight"):
            drawn = 1 + 0.1 * drawn
        elif len(shape) == 1:
            drawn *= 0.5
        else:
            drawn *= (2 if "query" in name or "key" in name else 1) * (1 if "embeddings" in name else shape[1] ** -0.5)
        tensors[name] = drawn.astype(np.float32)
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2), encoding="utf-8")
    return tensors
