"""Makes small Llama models on the spot: as a Hugging Face folder (`write_tiny_llama`) or as a GGUF file (`write_tiny_gguf`).

Weights, tokenizer and files are functions of the arguments alone. The safetensors writer here shares no code with the reader
under test. Token ids 0, 1, 2 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>` as in SmolLM2.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

Tensors = dict[str, np.ndarray]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the river runs to the sea and the wind sings in the trees.",
    "In the beginning there was a small model that learned to read, to write and to count: one, two, three, four, five.",
    "What is the capital of France? The capital of France is Paris. What is the capital of Japan? It is Tokyo.",
    "Once upon a time, in a village by the mountains, an old woman told stories about the stars to the children.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, 1))\n",
    "Numbers such as 12, 345 and 6789 appear; so do words like paged, attention, request, answer, token and batch.",
)

_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def tiny_weights(
    *,
    vocab_size: int = 384,
    hidden: int = 64,
    ffw: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    has_head: bool = True,
    seed: int = 0,
) -> Tensors:
    """Random float32 weights in Hugging Face names and layout; `has_head` adds `lm_head.weight`, whose values never change the others."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * random.standard_normal(hidden)).astype(np.float32)

    tensors: Tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden) * np.float32(2)
        tensors[prefix + "self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden) * np.float32(2)
        tensors[prefix + "self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(ffw, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(ffw, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, ffw)
    tensors["model.norm.weight"] = norm()
    if has_head:
        tensors["lm_head.weight"] = matrix(vocab_size, hidden)
    return tensors


def write_tiny_llama(
    folder: str | Path,
    *,
    vocab_size: int = 384,
    hidden: int = 64,
    ffw: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tie: bool | None = True,
    head_in_file: bool | None = None,
    theta: float = 10_000.0,
    rope_style: Literal["old", "new", "both", "neither"] = "old",
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: int = 1,
    seed: int = 0,
    context: int = 512,
    eos_token_id: int | Sequence[int] | None = 2,
    generation_eos: int | Sequence[int] | None = None,
    bos_token_id: int | None = 1,
    generation_config: Mapping[str, Any] | None = None,
    has_tokenizer: bool = True,
    tokenizer_vocab_size: int | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    config: Mapping[str, Any] | None = None,
) -> Tensors:
    """Writes a Llama as Hugging Face saves one and returns its tensors as stored (name -> array).

    Args:
        tie: value of `tie_word_embeddings`; None leaves the key out.
        head_in_file: whether `lm_head.weight` (different from the embedding) is written; None: only when not tied.
        rope_style: where `theta` is written: top level, inside `rope_parameters`, both (the top level then says 1234.5, which must
            lose), or nowhere.
        rope_scaling: extra rope keys (`rope_type`, `factor`, ...), written beside the theta of the chosen style.
        shards: number of safetensors files; above 1 there is an index.
        context: `max_position_embeddings`.
        eos_token_id: for config.json; None leaves the key out.
        generation_eos: `eos_token_id` of generation_config.json; the file is written when this or `generation_config` is given.
        tokenizer_vocab_size: tokens the tokenizer knows; None: `vocab_size`; at least 259.
        config: entries laid over config.json; a value of None removes the key.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": vocab_size, "hidden": hidden, "ffw": ffw}
    sizes |= {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if head_in_file is None:
        head_in_file = not tie
    weights = tiny_weights(**sizes, has_head=head_in_file, seed=seed)
    stored = _bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {name: array.astype(stored) for name, array in weights.items()}
    write_shards(folder, tensors, shards)

    hf_config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffw,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }
    if rope_style in ("old", "both"):
        hf_config["rope_theta"] = theta if rope_style == "old" else 1234.5
        if rope_style == "old" and rope_scaling:
            hf_config["rope_scaling"] = dict(rope_scaling)
    if rope_style in ("new", "both"):
        hf_config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **(rope_scaling or {})}
    hf_config.update(config or {})
    _write_json(folder / "config.json", {key: value for key, value in hf_config.items() if value is not None})

    if generation_eos is not None or generation_config is not None:
        generation: dict[str, Any] = dict(generation_config or {})
        if generation_eos is not None:
            generation["eos_token_id"] = generation_eos
        _write_json(folder / "generation_config.json", generation)

    if has_tokenizer:
        write_tiny_tokenizer(folder, vocab_size=tokenizer_vocab_size or vocab_size, chat_template=chat_template)
    return tensors


def write_shards(folder: Path, tensors: Tensors, shards: int) -> None:
    """Writes `model.safetensors`, or that many shards of neighbouring tensors with their index."""
    if shards == 1:
        save_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(np.array_split(np.array(list(tensors)), shards), start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_safetensors(folder / file, {str(name): tensors[str(name)] for name in names})
        weight_map |= {str(name): file for name in names}
    total = sum(array.nbytes for array in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one safetensors file: length of the header (8 bytes, little endian), header in JSON, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def tiny_tokenizer(vocab_size: int = 384) -> Any:
    """A byte-level BPE (`tokenizers.Tokenizer`) of exactly `vocab_size` tokens, at least 259; what the corpus does not fill is reserved."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"a byte-level tokenizer has at least {256 + len(SPECIAL_TOKENS)} tokens, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{index}|>", special=True, normalized=False) for index in range(missing)])
    return tokenizer


def write_tiny_tokenizer(folder: Path, *, vocab_size: int, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tiny_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}
    _write_json(folder / "special_tokens_map.json", special)
    tokenizer_config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if hf_name in top:
        return top[hf_name]
    _, _, layer, rest = hf_name.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def permute_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores q and k of a Llama: within a head, the two halves interleaved (0, h, 1, h+1, ...)."""
    rows = []
    head_dim = weight.shape[0] // heads
    for head in range(heads):
        for pair in range(head_dim // 2):
            rows += [head * head_dim + pair, head * head_dim + head_dim // 2 + pair]
    return weight[rows]


def write_tiny_gguf(
    path: str | Path,
    *,
    vocab_size: int = 384,
    hidden: int = 64,
    ffw: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    tie: bool = True,
    theta: float = 10_000.0,
    weight_type: str = "F32",
    embedding_type: str | None = None,
    architecture: str = "llama",
    rope_freqs: np.ndarray | None = None,
    rope_scaling_type: str | None = None,
    seed: int = 0,
    context: int = 512,
    eos_token_id: int | None = 2,
    bos_token_id: int | None = 1,
    has_tokenizer: bool = True,
    tokenizer_vocab_size: int | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    metadata: Mapping[str, int | float | str | bool] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> Tensors:
    """Writes a GGUF file and returns what its tensors mean: Hugging Face name -> float32 after quantization, rows in Hugging Face's order.

    The weights before quantization are those of `tiny_weights` with the same sizes and seed; a tied file has no `output.weight`.

    Args:
        weight_type, embedding_type: GGML types of the matrices and of the embedding (F32, F16, BF16, Q8_0, Q4_0, Q4_1, ...); norms are F32.
        architecture: q and k rows are stored interleaved for `llama` and as they are for any other.
        rope_freqs: adds `rope_freqs.weight`, [head_dim / 2].
        metadata: further keys; an int is written as uint32.
        extra_tensors: further tensors under their GGUF names, as F32.
    """
    import gguf

    sizes = {"vocab_size": vocab_size, "hidden": hidden, "ffw": ffw}
    sizes |= {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    weights = tiny_weights(**sizes, has_head=not tie, seed=seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffw)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    if rope_scaling_type is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_scaling_type))
    if has_tokenizer:
        _add_gguf_tokenizer(writer, tokenizer_vocab_size or vocab_size, bos_token_id, eos_token_id)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)

    truth: Tensors = {}
    for name, weight in weights.items():
        type_name = weight_type
        if name == "model.embed_tokens.weight" and embedding_type is not None:
            type_name = embedding_type
        ggml_type = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else type_name]
        truth[name] = gguf.quants.dequantize(gguf.quants.quantize(weight, ggml_type), ggml_type).astype(np.float32)
        stored = weight
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = permute_rotary_rows(weight, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, ggml_type), raw_dtype=ggml_type)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, np.asarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return truth


def _add_gguf_tokenizer(writer: Any, vocab_size: int, bos_token_id: int | None, eos_token_id: int | None) -> None:
    tokenizer = tiny_tokenizer(vocab_size)
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokenizer.id_to_token(index) for index in range(vocab_size)])
    writer.add_token_types([3 if index in special else 1 for index in range(vocab_size)])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if bos_token_id is not None:
        writer.add_bos_token_id(bos_token_id)
    if eos_token_id is not None:
        writer.add_eos_token_id(eos_token_id)


def _bfloat16() -> np.dtype:
    import ml_dtypes  # late: the environment that makes golden files has torch and no ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
