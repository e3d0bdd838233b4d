"""GGUF files as checkpoints: names, values, order of q and k rows, config (field case O-54)."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from jaxpaged.loading.model_config import eos_token_ids, read_folder_config
from tests.tiny_model import gguf_name, tiny_weights, write_tiny_gguf, write_tiny_llama

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def _open(tmp_path: Path, **options: object) -> GgufCheckpoint:
    write_tiny_gguf(tmp_path / "tiny.gguf", **options)  # type: ignore[arg-type]
    return GgufCheckpoint(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("tie", [True, False])
def test_tensors_equal_what_was_written(tmp_path: Path, weight_type: str, tie: bool) -> None:
    truth = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type=weight_type, embedding_type="Q8_0", tie=tie)
    with GgufCheckpoint(tmp_path / "tiny.gguf") as checkpoint:
        assert checkpoint.names() == truth.keys()
        assert checkpoint.native_dtype == "gguf"
        for name, values in truth.items():
            assert checkpoint.shape(name) == values.shape
            assert checkpoint.dtype(name) == np.float32
            np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)


@pytest.mark.parametrize("weight_type", TYPES)
def test_tensors_equal_those_of_the_gguf_package(tmp_path: Path, weight_type: str) -> None:
    heads, kv_heads, head_dim = 6, 3, 32
    checkpoint = _open(tmp_path, weight_type=weight_type, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    for name in checkpoint.names():
        tensor = theirs[gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        if "q_proj" in name or "k_proj" in name:
            # Row `pair` of the first or second half of a head lies at place 2 * pair or 2 * pair + 1 of it.
            places = [
                head * head_dim + 2 * pair + half
                for head in range(heads if "q_proj" in name else kv_heads)
                for half in range(2)
                for pair in range(head_dim // 2)
            ]
            values = values[places]
        np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)


def test_attention_scores_are_those_of_ggml_on_the_rows_as_stored(tmp_path: Path) -> None:
    """ggml turns neighbouring pairs of a Llama's q and k, Hugging Face the two halves: the scores must agree."""
    heads, head_dim, theta = 4, 16, 10_000.0
    checkpoint = _open(tmp_path, heads=heads, kv_heads=heads, head_dim=head_dim)
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    x = np.random.default_rng(1).standard_normal((2, 64))
    angles = 37 * theta ** (-np.arange(0, head_dim, 2) / head_dim)

    def turn(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)

    def ggml(weight: np.ndarray, vector: np.ndarray) -> np.ndarray:
        head = (weight @ vector).reshape(heads, head_dim)
        return np.stack(turn(head[:, 0::2], head[:, 1::2]), axis=-1).reshape(heads, head_dim)

    def hugging_face(weight: np.ndarray, vector: np.ndarray) -> np.ndarray:
        head = (weight @ vector).reshape(heads, head_dim)
        return np.concatenate(turn(head[:, : head_dim // 2], head[:, head_dim // 2 :]), axis=-1)

    def plain(weight: np.ndarray, vector: np.ndarray) -> np.ndarray:
        return (weight @ vector).reshape(heads, head_dim)

    q, k = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    theirs = np.sum(ggml(stored[gguf_name(q)], x[0]) * plain(stored[gguf_name(k)], x[1]), axis=-1)
    ours = np.sum(hugging_face(checkpoint.read(q), x[0]) * plain(checkpoint.read(k), x[1]), axis=-1)
    wrong = np.sum(hugging_face(stored[gguf_name(q)], x[0]) * plain(stored[gguf_name(k)], x[1]), axis=-1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    assert not np.allclose(wrong, theirs, rtol=0.1)


def test_rows_of_a_qwen_type_file_stay_where_they_are(tmp_path: Path) -> None:
    truth = write_tiny_gguf(tmp_path / "qwen.gguf", architecture="qwen2", weight_type="Q4_0")
    checkpoint = GgufCheckpoint(tmp_path / "qwen.gguf")
    for name, values in truth.items():
        np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)


def test_blocks_of_rows_are_parts_of_the_whole(tmp_path: Path) -> None:
    checkpoint = _open(tmp_path, weight_type="Q4_1", heads=6, kv_heads=3, head_dim=32)
    for name in checkpoint.names():
        whole = checkpoint.read(name)
        for start, stop in ((0, 1), (0, len(whole)), (5, 6), (31, 33), (32, 64), (33, len(whole))):
            np.testing.assert_array_equal(checkpoint.read_rows(name, start, stop), whole[start:stop], err_msg=f"{name} {start}:{stop}")


def test_a_tensor_larger_than_a_block_is_read_whole(tmp_path: Path) -> None:
    truth = write_tiny_gguf(tmp_path / "tiny.gguf", vocab_size=40_000, hidden=64, layers=1, embedding_type="Q8_0", has_tokenizer=False)
    checkpoint = GgufCheckpoint(tmp_path / "tiny.gguf")
    assert truth["model.embed_tokens.weight"].nbytes > 2 * 4 * 2**20
    np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight"), truth["model.embed_tokens.weight"])


def test_released_tensors_read_the_same_again(tmp_path: Path) -> None:
    truth = write_tiny_gguf(tmp_path / "tiny.gguf")
    checkpoint = GgufCheckpoint(tmp_path / "tiny.gguf")
    for name, values in truth.items():
        held = checkpoint.read(name)
        checkpoint.release(name)
        np.testing.assert_array_equal(held, values)
    checkpoint.close()
    np.testing.assert_array_equal(held, values)


def test_config_equals_that_of_the_same_model_as_a_folder(tmp_path: Path) -> None:
    sizes = {"hidden": 96, "ffw": 160, "layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 32, "context": 777, "theta": 100_000.0}
    write_tiny_llama(tmp_path, **sizes, tie=False, has_tokenizer=False)  # type: ignore[arg-type]
    expected = read_folder_config(tmp_path)
    del expected["torch_dtype"]
    config = _open(tmp_path, **sizes, tie=False).hf_config
    assert config.pop("rms_norm_eps") == pytest.approx(expected.pop("rms_norm_eps"), rel=1e-7)
    assert config == expected


def test_a_file_without_head_is_tied(tmp_path: Path) -> None:
    assert _open(tmp_path, tie=True).hf_config["tie_word_embeddings"] is True
    assert _open(tmp_path, tie=False).hf_config["tie_word_embeddings"] is False


def test_vocabulary_is_that_of_the_embedding(tmp_path: Path) -> None:
    checkpoint = _open(tmp_path, vocab_size=448, tokenizer_vocab_size=384)
    assert checkpoint.hf_config["vocab_size"] == 448


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        ({}, (2,)),
        ({"tokenizer.ggml.eot_token_id": 5}, (2, 5)),
        ({"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 7}, (2, 7)),
    ],
)
def test_every_end_token_of_the_metadata_counts(tmp_path: Path, metadata: dict[str, int], ids: tuple[int, ...]) -> None:
    checkpoint = _open(tmp_path, metadata=metadata)
    assert eos_token_ids(checkpoint.hf_config, checkpoint.generation_config) == ids


def test_a_file_without_end_token_has_none(tmp_path: Path) -> None:
    checkpoint = _open(tmp_path, eos_token_id=None, bos_token_id=None)
    assert eos_token_ids(checkpoint.hf_config, checkpoint.generation_config) == ()
    assert checkpoint.hf_config["bos_token_id"] is None


def test_a_file_without_tokenizer_and_chat_template_loads(tmp_path: Path) -> None:
    assert _open(tmp_path, has_tokenizer=False, chat_template=None).names()


def test_rope_freqs_of_ones_change_nothing(tmp_path: Path) -> None:
    checkpoint = _open(tmp_path, rope_freqs=np.ones(8))
    assert checkpoint.hf_config["rope_scaling"] is None
    assert "rope_freqs.weight" not in checkpoint.names()


def _llama3_rope_freqs(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """As llama.cpp's converter writes them (`LlamaModel.generate_extra_tensors`)."""
    divisors = []
    for exponent in range(0, head_dim, 2):
        frequency = 1.0 / theta ** (exponent / head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path, factor: float) -> None:
    divisors = _llama3_rope_freqs(128, 500_000.0, factor)
    assert len(set(divisors.tolist())) > 3
    checkpoint = _open(tmp_path, head_dim=128, theta=500_000.0, rope_freqs=divisors)
    assert checkpoint.hf_config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("divisors", [np.linspace(1, 8, 8), np.full(8, 3.0), np.full(8, np.nan), _llama3_rope_freqs(128, 500_000.0, 8.0)])
def test_other_rope_freqs_are_refused(tmp_path: Path, divisors: np.ndarray) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        _open(tmp_path, rope_freqs=divisors)


@pytest.mark.parametrize(
    ("kind", "metadata", "more"),
    [
        ("linear", {}, {}),
        ("yarn", {}, {"original_max_position_embeddings": 512}),
        ("yarn", {"llama.rope.scaling.original_context_length": 128}, {"original_max_position_embeddings": 128}),
    ],
)
def test_a_rope_type_of_the_metadata_reaches_the_config(
    tmp_path: Path, kind: str, metadata: dict[str, float], more: dict[str, int]
) -> None:
    checkpoint = _open(tmp_path, rope_scaling_type=kind, metadata={"llama.rope.scaling.factor": 4.0, **metadata})
    assert checkpoint.hf_config["rope_scaling"] == {"rope_type": kind, "factor": 4.0, **more}


@pytest.mark.parametrize(
    ("kind", "metadata", "complaint"),
    [("longrope", {}, "rope type 'longrope'"), ("yarn", {"llama.rope.scaling.attn_factor": 0.5}, "attn_factor")],
)
def test_scalings_that_are_not_read_are_refused_by_name(tmp_path: Path, kind: str, metadata: dict[str, float], complaint: str) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint):
        _open(tmp_path, rope_scaling_type=kind, metadata=metadata)


def test_a_llama_file_that_names_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = _open(tmp_path, metadata={"llama.attention.sliding_window": 100}).hf_config
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["layer_windows"] == [100, 100]


def test_the_older_key_of_linear_scaling_reaches_the_config(tmp_path: Path) -> None:
    checkpoint = _open(tmp_path, metadata={"llama.rope.scale_linear": 2.0})
    assert checkpoint.hf_config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("architecture", ["gpt2", "clip"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}' is not supported, only llama, qwen2"):
        _open(tmp_path, architecture=architecture)


def test_experts_of_an_architecture_without_a_mixture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mixtures of experts \(qwen2.expert_count\) are not supported"):
        _open(tmp_path, architecture="qwen2", metadata={"qwen2.expert_count": 8})


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"split.count": 3}, "part of a split file"),
        ({"llama.attention.value_length": 8}, None),
    ],
)
def test_variants_that_are_not_run_are_refused_by_name(tmp_path: Path, metadata: dict[str, int], complaint: str | None) -> None:
    if complaint is None:  # a key that the file has already
        path = tmp_path / "tiny.gguf"
        write_tiny_gguf(path)
        key = b"llama.attention.value_length\x04\0\0\0"
        content = path.read_bytes()
        assert content.count(key + b"\x10\0\0\0") == 1
        path.write_bytes(content.replace(key + b"\x10\0\0\0", key + b"\x08\0\0\0"))
        with pytest.raises(UnsupportedModelError, match=r"value_length differs from the head size 16"):
            GgufCheckpoint(path)
    else:
        with pytest.raises(UnsupportedModelError, match=complaint):
            _open(tmp_path, metadata=metadata)


def test_a_storage_type_that_gguf_cannot_dequantize_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    name = b"blk.1.ffn_up.weight"
    content = bytearray(path.read_bytes())
    place = content.index(name) + len(name) + 4 + 16
    assert content[place : place + 4] == bytes(4)
    content[place] = gguf.GGMLQuantizationType.I8
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"I8 of blk\.1\.ffn_up\.weight"):
        GgufCheckpoint(path)


def test_missing_and_wrong_metadata_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"llama.block_count", b"llama.clock_count"))
    with pytest.raises(CheckpointError, match=r"lacks llama\.block_count"):
        GgufCheckpoint(path)
    path.write_bytes(content.replace(b"llama.block_count\x04\0\0\0", b"llama.block_count\x06\0\0\0"))
    with pytest.raises(CheckpointError, match=r"llama\.block_count should be int"):
        GgufCheckpoint(path)
    path.write_bytes(content.replace(b"llama.attention.head_count\x04\0\0\0\x04", b"llama.attention.head_count\x04\0\0\0\x05"))
    with pytest.raises(CheckpointError, match="num_attention_heads 5 is not a multiple"):
        GgufCheckpoint(path)
    path.write_bytes(content.replace(b"token_embd.weight", b"token_embe.weight"))
    with pytest.raises(CheckpointError, match=r"no token_embd\.weight"):
        GgufCheckpoint(path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="under two names"):
        _open(tmp_path, extra_tensors={"model.norm.weight": np.ones(64)})


def test_unknown_tensors_keep_their_names(tmp_path: Path) -> None:
    checkpoint = _open(tmp_path, extra_tensors={"blk.0.strange.weight": np.ones(64), "blk.0.attn_q.bias": np.arange(64)})
    assert checkpoint.names() >= {"blk.0.strange.weight", "model.layers.0.self_attn.q_proj.bias"}
    assert checkpoint.hf_config["attention_bias"] is True
    bias = checkpoint.read("model.layers.0.self_attn.q_proj.bias").reshape(4, 16)
    np.testing.assert_array_equal(bias[0], [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15])


def test_the_maker_writes_what_it_says(tmp_path: Path) -> None:
    weights = tiny_weights(has_head=False)
    truth = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert truth.keys() == weights.keys()
    for name in weights:
        np.testing.assert_array_equal(truth[name], weights[name])
