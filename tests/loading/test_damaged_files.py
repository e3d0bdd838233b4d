"""Model files with random damage are refused with one of our errors or load; never another exception, never much memory."""

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError, UnsupportedModelError
from jaxpaged.loading import fp8, mxfp4
from jaxpaged.loading.checkpoint import Checkpoint
from jaxpaged.loading.fill import fill
from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from jaxpaged.loading.quantization_config import fp8_scales, has_mxfp4
from jaxpaged.loading.safetensors_checkpoint import SafetensorsCheckpoint
from tests.family_gguf import write_family_gguf
from tests.loading.tiny_table import TABLE, axis_sizes, expected
from tests.tiny_families import write_tiny_family
from tests.tiny_model import save_safetensors, write_tiny_gguf, write_tiny_llama

MIB = 2**20
SIZES = {"layers": 1, "vocab_size": 300, "hidden": 32, "ffw": 32, "heads": 2, "kv_heads": 1}
EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 10**9, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


def damaged(content: bytes, header_bytes: int, source: random.Random) -> bytes:
    """One to three random changes, most of them in the header, where they matter."""
    changed = bytearray(content)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        place = source.randrange(header_bytes if source.random() < 0.8 else len(changed))
        kind = source.choice(("bit", "byte", "number", "number", "digit", "cut", "insert", "delete", "repeat", "swap"))
        if kind == "bit":
            changed[place] ^= 1 << source.randrange(8)
        elif kind == "byte":
            changed[place] = source.randrange(256)
        elif kind == "number":
            width = source.choice((4, 8))
            changed[place : place + width] = (source.choice(EXTREMES) % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == "digit":
            changed[place : place + 1] = source.choice((b"9" * 30, b"-1", b"null", b"1e9", b'"', b"[", b"}", b",", b"\\", b"\0", b"\xff"))
        elif kind == "cut":
            del changed[place:]
        elif kind == "insert":
            changed[place:place] = source.randbytes(source.randrange(1, 40))
        elif kind == "delete":
            del changed[place : place + source.randrange(1, 40)]
        elif kind == "repeat":
            length = source.randrange(1, 200)
            changed[place:place] = changed[place : place + length]
        else:
            other = source.randrange(header_bytes)
            changed[place : place + 8], changed[other : other + 8] = changed[other : other + 8], changed[place : place + 8]
        if len(changed) <= header_bytes:
            break
    return bytes(changed)


def load(path: Path) -> None:
    """Opens a file or folder and fills a model from it."""
    checkpoint: Checkpoint = GgufCheckpoint(path) if path.is_file() else SafetensorsCheckpoint(path)
    with checkpoint:
        hf = checkpoint.hf_config
        if not {"GptOssForCausalLM", "MixtralForCausalLM"}.isdisjoint(hf["architectures"]):
            read_experts(checkpoint)
            return
        if "LlamaForCausalLM" not in hf["architectures"]:
            raise UnsupportedModelError("the registry of models refuses it")
        seen = fp8.dequantized(checkpoint, fp8_scales(hf))
        for name in seen.names():
            seen.read(name)
        fill(seen, TABLE, expected(hf), axis_sizes(hf))


def read_experts(checkpoint: Checkpoint) -> None:
    """Everything in a mixture, its experts in 4 bits or one of many in a tensor."""
    seen = mxfp4.dequantized(checkpoint) if has_mxfp4(checkpoint.hf_config) else checkpoint
    for name in seen.names():
        assert seen.read(name).shape == seen.shape(name)


def attempt(path: Path, size: int) -> str:
    """Loads, and returns "loaded" or the name of the error; any other exception comes through."""
    tracemalloc.start()
    try:
        load(path)
        outcome, message = "loaded", "in one sentence"
    except (CheckpointError, UnsupportedModelError) as error:
        outcome, message = type(error).__name__, error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert 10 < len(message) < 4000
    assert peak < 2 * size + 50 * MIB
    return outcome


MANY_SEEDS = range(4, 24)
"""With 50 files each, of two formats: 2,000."""


@pytest.mark.parametrize("seed", range(4))
def test_damaged_gguf(tmp_path: Path, seed: int) -> None:
    check_gguf(tmp_path, seed)


@pytest.mark.tier("long", area="models")
@pytest.mark.parametrize("seed", MANY_SEEDS)
def test_many_damaged_gguf_files(tmp_path: Path, seed: int) -> None:
    check_gguf(tmp_path, seed)


def check_gguf(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, weight_type="Q4_1", embedding_type="Q8_0", **SIZES)
    content = path.read_bytes()
    header_bytes = content.index(b"blk.0.ffn_down.weight") + 200
    assert attempt(path, len(content)) == "loaded"
    outcomes = Counter[str]()
    for number in range(50):
        changed = damaged(content, header_bytes, random.Random(f"gguf {seed} {number}"))
        path.write_bytes(changed)
        outcomes[attempt(path, len(changed))] += 1
    assert outcomes["CheckpointError"] > 15
    assert outcomes["loaded"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_damaged_safetensors(tmp_path: Path, seed: int) -> None:
    check_safetensors(tmp_path, seed)


@pytest.mark.tier("long", area="models")
@pytest.mark.parametrize("seed", MANY_SEEDS)
def test_many_damaged_safetensors_files(tmp_path: Path, seed: int) -> None:
    check_safetensors(tmp_path, seed)


def check_safetensors(tmp_path: Path, seed: int) -> None:
    write_tiny_llama(tmp_path, **SIZES, has_tokenizer=False)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    assert attempt(tmp_path, len(content)) == "loaded"
    outcomes = Counter[str]()
    for number in range(50):
        changed = damaged(content, header_bytes, random.Random(f"safetensors {seed} {number}"))
        path.write_bytes(changed)
        outcomes[attempt(tmp_path, len(changed))] += 1
    assert outcomes["CheckpointError"] > 25
    assert outcomes["loaded"] > 0


EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
EXPERTS |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_experts_in_four_bits(tmp_path: Path, name: str) -> None:
    config = {"model_type": "gpt_oss", **EXPERTS}
    write_tiny_family(
        tmp_path, architecture="GptOssForCausalLM", vocab_size=37, config=config, experts="gpt_oss", sinks=True, qkv_bias=True, mxfp4=True
    )
    path = tmp_path / name
    content = path.read_bytes()
    header_bytes = len(content) if name == "config.json" else 8 + int.from_bytes(content[:8], "little")
    assert attempt(tmp_path, len(content)) == "loaded"
    outcomes = Counter[str]()
    for number in range(50):
        changed = damaged(content, header_bytes, random.Random(f"mxfp4 {name} {number}"))
        path.write_bytes(changed)
        outcomes[attempt(tmp_path, len(changed))] += 1
    assert outcomes["CheckpointError"] > 15
    assert outcomes["loaded"] > 0


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_weights_in_eight_bits(tmp_path: Path, name: str) -> None:
    tensors = write_tiny_llama(tmp_path, **SIZES, has_tokenizer=False)
    stored = {key: tensor.astype(ml_dtypes.float8_e4m3fn) if "_proj" in key else tensor for key, tensor in tensors.items()}
    stored |= {
        f"{key}_scale_inv": np.ones([-(-size // 16) for size in tensors[key].shape], np.float32) for key in tensors if "_proj" in key
    }
    save_safetensors(tmp_path / "model.safetensors", stored)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}, **config})
    )
    path = tmp_path / name
    content = path.read_bytes()
    header_bytes = 150 if name == "config.json" else 8 + int.from_bytes(content[:8], "little")
    assert attempt(tmp_path, len(content)) == "loaded"
    outcomes = Counter[str]()
    for number in range(50):
        changed = damaged(content, header_bytes, random.Random(f"fp8 {name} {number}"))
        path.write_bytes(changed)
        outcomes[attempt(tmp_path, len(changed))] += 1
    assert outcomes["CheckpointError"] > 15
    assert outcomes["loaded"] > 0


def test_damaged_gguf_with_experts(tmp_path: Path) -> None:
    tensors = write_tiny_family(tmp_path / "folder", architecture="MixtralForCausalLM", vocab_size=37, config=EXPERTS, experts="mixtral")
    path = tmp_path / "tiny.gguf"
    hf_config = json.loads((tmp_path / "folder" / "config.json").read_text())
    write_family_gguf(path, "llama", tensors, hf_config, extra={}, expert_count=3, expert_used_count=2)
    content = path.read_bytes()
    header_bytes = content.index(b"blk.0.ffn_down_exps.weight") + 200
    assert attempt(path, len(content)) == "loaded"
    outcomes = Counter[str]()
    for number in range(50):
        changed = damaged(content, header_bytes, random.Random(f"gguf experts {number}"))
        path.write_bytes(changed)
        outcomes[attempt(path, len(changed))] += 1
    assert outcomes["CheckpointError"] > 15
    assert outcomes["loaded"] > 0


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_damaged_json(tmp_path: Path, name: str) -> None:
    write_tiny_llama(tmp_path, **SIZES, shards=2, generation_eos=[0, 2], has_tokenizer=False)
    path = tmp_path / name
    content = path.read_bytes()
    assert attempt(tmp_path, len(content)) == "loaded"
    outcomes = Counter[str]()
    for number in range(60):
        changed = damaged(content, len(content), random.Random(f"{name} {number}"))
        path.write_bytes(changed)
        outcomes[attempt(tmp_path, len(changed))] += 1
    assert outcomes["CheckpointError"] > 15
    assert outcomes["loaded"] + outcomes["UnsupportedModelError"] < 45
