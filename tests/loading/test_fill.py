"""Filling parameters from a checkpoint: values, coverage, ties (field case O-49), memory."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.loading import fill as fill_module
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.loading.fill import aligned_empty, fill
from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from jaxpaged.loading.safetensors_checkpoint import SafetensorsCheckpoint
from tests.loading.tiny_table import TABLE, Like, axis_sizes, expected
from tests.tiny_model import save_safetensors, write_tiny_gguf, write_tiny_llama

MIB = 2**20


def _fill(checkpoint: Checkpoint, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """By one thread and by three: the same, or the same error."""
    table = (checkpoint, TABLE, expected(checkpoint.hf_config, dtype), axis_sizes(checkpoint.hf_config))
    alone, together = (
        _outcome(lambda: fill(*table, may_be_unread=("head",))),
        _outcome(lambda: fill(*table, may_be_unread=("head",), num_threads=3)),
    )
    if isinstance(alone, Exception):
        assert (type(alone), str(alone)) == (type(together), str(together))
        raise alone
    assert isinstance(together, dict)
    assert alone.keys() == together.keys()
    assert all(np.array_equal(alone[path].view(np.uint8), together[path].view(np.uint8)) for path in alone)
    return together


def _outcome(make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray] | Exception:
    try:
        return make()
    except Exception as error:
        return error


def _by_hand(tensors: dict[str, np.ndarray], dtype: Any, *, layers: int, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """What `TABLE` says, without einops."""

    def stack(name: str, arrange: Any = lambda array: array) -> np.ndarray:
        return np.stack([arrange(tensors[f"model.layers.{layer}.{name}.weight"]) for layer in range(layers)])

    params = {
        "embedding": tensors["model.embed_tokens.weight"],
        "layers.norm": stack("input_layernorm"),
        "layers.q": stack("self_attn.q_proj"),
        "layers.k": stack("self_attn.k_proj", lambda array: array.reshape(kv_heads, -1, array.shape[1])),
        "layers.v": stack("self_attn.v_proj", lambda array: array.T),
        "layers.o": stack("self_attn.o_proj", lambda array: array.reshape(len(array), heads, -1).swapaxes(0, 1)),
        "layers.mlp_norm": stack("post_attention_layernorm"),
        "layers.gate": stack("mlp.gate_proj"),
        "layers.up": stack("mlp.up_proj", lambda array: array.T),
        "layers.down": stack("mlp.down_proj", lambda array: array.T.reshape(-1)),
        "norm": tensors["model.norm.weight"][:, None],
    }
    if "lm_head.weight" in tensors:
        params["head"] = tensors["lm_head.weight"]
    return {path: array.astype(np.float32).astype(dtype) for path, array in params.items()}


def _assert_equal(filled: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    assert filled.keys() == params.keys()
    for path, array in params.items():
        assert filled[path].dtype == array.dtype
        np.testing.assert_array_equal(filled[path], array, err_msg=path)


@pytest.mark.parametrize("block_bytes", [fill_module._BLOCK_BYTES, 1000, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "gguf"])
def test_parameters_equal_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, dtype: Any, block_bytes: int) -> None:
    monkeypatch.setattr(fill_module, "_BLOCK_BYTES", block_bytes)
    sizes = {"layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 32}
    if source == "gguf":
        tensors = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1", embedding_type="Q8_0", tie=False, **sizes)  # type: ignore[arg-type]
        checkpoint: Checkpoint = GgufCheckpoint(tmp_path / "tiny.gguf")
    else:
        tensors = write_tiny_llama(tmp_path, tie=False, dtype=source, shards=2, has_tokenizer=False, **sizes)  # type: ignore[arg-type]
        checkpoint = SafetensorsCheckpoint(tmp_path)
    with checkpoint:
        filled = _fill(checkpoint, dtype)
    _assert_equal(filled, _by_hand(tensors, dtype, layers=3, heads=6, kv_heads=3))


def test_parameters_are_aligned_writable_and_independent_of_the_file(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, has_tokenizer=False)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        filled = _fill(checkpoint)
    for path, array in filled.items():
        assert array.ctypes.data % 64 == 0, path
        assert array.flags.c_contiguous, path
        assert array.flags.writeable, path


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7)])
def test_aligned_memory_has_the_shape_and_type_asked_for(shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        array = aligned_empty(shape, np.dtype(dtype))
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0


TIES = [
    pytest.param(True, False, "tied", id="tied, no head in the file"),
    pytest.param(True, True, "tied", id="tied, and a head in the file"),
    pytest.param(False, True, "untied", id="untied, with head"),
    pytest.param(False, False, "refused", id="untied, no head"),
    pytest.param(None, True, "untied", id="key absent, with head"),
    pytest.param(None, False, "refused", id="key absent, no head"),
]


@pytest.mark.parametrize(("tie", "head_in_file", "outcome"), TIES)
def test_tied_embeddings(tmp_path: Path, tie: bool | None, head_in_file: bool, outcome: str) -> None:
    tensors = write_tiny_llama(tmp_path, tie=tie, head_in_file=head_in_file, has_tokenizer=False)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        if outcome == "refused":
            with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
                _fill(checkpoint)
            return
        filled = _fill(checkpoint)
    if outcome == "tied":
        tensors.pop("lm_head.weight", None)
    _assert_equal(filled, _by_hand(tensors, np.float32, layers=2, heads=4, kv_heads=2))


def _write_changed(folder: Path, change: Any) -> SafetensorsCheckpoint:
    tensors = write_tiny_llama(folder, has_tokenizer=False)
    change(tensors)
    save_safetensors(folder / "model.safetensors", tensors)
    return SafetensorsCheckpoint(folder)


def test_all_faults_are_reported_together_by_name(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 63), np.float32)
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros(64 * 64, np.float32)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((128, 64), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)

    with _write_changed(tmp_path, change) as checkpoint, pytest.raises(CheckpointError) as refusal:
        _fill(checkpoint)
    message = refusal.value.message
    for fault in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.norm.weight is missing",
        "model.layers.0.self_attn.k_proj.weight has shape [32, 63] instead of [32, 64]",
        "model.layers.0.self_attn.q_proj.weight has shape [4096] instead of [64, 64]",
        "model.layers.2.mlp.up_proj.weight is not part of this model",
        "model.layers.0.self_attn.q_proj.bias is not part of this model",
    ):
        assert fault in message
    assert message.count(";") == 5


def test_a_long_list_of_faults_is_cut_and_counted(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for index in range(50):
            tensors[f"extra.{index}"] = np.zeros(1, np.float32)

    with _write_changed(tmp_path, change) as checkpoint, pytest.raises(CheckpointError, match="and 30 more") as refusal:
        _fill(checkpoint)
    assert len(refusal.value.message) < 2000


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rope_freqs.weight"])
def test_constants_that_old_savers_wrote_are_ignored(tmp_path: Path, name: str) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.ones(8, np.float32)

    with _write_changed(tmp_path, change) as checkpoint:
        assert _fill(checkpoint).keys() == expected(checkpoint.hf_config).keys()


def test_faults_are_found_before_anything_is_allocated(tmp_path: Path) -> None:
    """A config may promise a terabyte: shapes are compared with the file first."""
    write_tiny_llama(tmp_path, has_tokenizer=False, config={"vocab_size": 2**31 - 1, "intermediate_size": 2**31 - 1})
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \[384, 64\] instead of \[2147483647, 64\]"):
                _fill(checkpoint)
            assert tracemalloc.get_traced_memory()[1] < MIB
        finally:
            tracemalloc.stop()


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = 1e6

    with _write_changed(tmp_path, change) as checkpoint:
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values beyond the range of float16"):
            _fill(checkpoint, np.float16)
        assert _fill(checkpoint, ml_dtypes.bfloat16)["norm"][3] == np.float32(1e6).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_memory_in_use_is_the_result_and_little_more(tmp_path: Path, num_threads: int) -> None:
    """By tracemalloc, that is without the pages of the mapped file: see test_smollm2 for the process as a whole."""
    write_tiny_gguf(tmp_path / "a.gguf", vocab_size=40_000, hidden=256, layers=1, embedding_type="Q8_0", has_tokenizer=False)
    with GgufCheckpoint(tmp_path / "a.gguf") as checkpoint:
        checkpoint.read("model.norm.weight")  # imports what reading needs
        tracemalloc.start()
        try:
            like, sizes = expected(checkpoint.hf_config), axis_sizes(checkpoint.hf_config)
            filled = fill(checkpoint, TABLE, like, sizes, num_threads=num_threads)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    result = sum(array.nbytes for array in filled.values())
    largest = max(array.nbytes for array in filled.values())
    assert largest > 39 * MIB
    assert peak - result < 24 * MIB


def _table_fault(change: Any) -> None:
    hf = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    hf |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "tie_word_embeddings": True}
    table, params = dict(TABLE), expected(hf)
    change(table, params)
    fill_module._bind(table, params, axis_sizes(hf), ("head",))


def test_a_table_that_does_not_match_the_model_is_a_fault_of_the_code() -> None:
    _table_fault(lambda table, params: None)

    def forget(table: dict[str, Any], params: dict[str, Like]) -> None:
        del table["model.norm.weight"]

    def repeat(table: dict[str, Any], params: dict[str, Like]) -> None:
        table["model.other.weight"] = table["model.norm.weight"]

    def reshape(table: dict[str, Any], params: dict[str, Like]) -> None:
        params["norm"] = Like((5, 1), np.dtype(np.float32))

    with pytest.raises(ValueError, match="does not fill norm"):
        _table_fault(forget)
    with pytest.raises(ValueError, match="fills norm twice"):
        _table_fault(repeat)
    with pytest.raises(ValueError, match=r"gives norm the shape \(4, 1\), the model \(5, 1\)"):
        _table_fault(reshape)
