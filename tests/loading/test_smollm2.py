"""The default model's real file: values, and the time and memory that loading takes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from jaxpaged.loading.gguf_header import read_gguf_header
from tests.tiny_model import gguf_name, permute_rotary_rows

pytestmark = pytest.mark.real

MIB = 2**20


def test_config(smollm2_path: Path) -> None:
    config = GgufCheckpoint(smollm2_path).hf_config
    assert config.pop("rms_norm_eps") == pytest.approx(1e-5, rel=1e-7)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 1.0,
        "layer_windows": [None] * 30,
        "is_windowed": [False] * 30,
        "has_rope": [True] * 30,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_values_equal_those_of_the_gguf_package(smollm2_path: Path) -> None:
    """Places come from our header reader, which the tiny files hold against `GGUFReader`: that takes seconds on this file."""
    checkpoint = GgufCheckpoint(smollm2_path)
    places = read_gguf_header(smollm2_path).tensors
    content = np.memmap(smollm2_path, mode="r")
    heads = {"self_attn.q_proj": 9, "self_attn.k_proj": 3}
    names = ["model.norm.weight"]
    names += [f"model.layers.{layer}.{part}.weight" for layer in (0, 17, 29) for part in (*heads, "self_attn.v_proj", "mlp.down_proj")]
    for name in names:
        place = places[gguf_name(name)]
        rows = content[place.start : place.stop].reshape(place.shape[0] if len(place.shape) > 1 else 1, -1)
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(place.ggml_type)).reshape(place.shape)
        ours = checkpoint.read(name)
        for part, num_heads in heads.items():
            if part in name:
                assert not np.array_equal(ours, values)
                ours = permute_rotary_rows(ours, num_heads)
        np.testing.assert_array_equal(ours, values, err_msg=name)
    place = places["token_embd.weight"]
    rows = content[place.start : place.stop].reshape(49152, -1)
    for start, stop in ((0, 3), (30_000, 30_003), (49_149, 49_152)):
        values = gguf.quants.dequantize(rows[start:stop], gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(checkpoint.read_rows("model.embed_tokens.weight", start, stop), values)


def test_the_header_is_read_quickly(smollm2_path: Path) -> None:
    started = time.process_time()
    header = read_gguf_header(smollm2_path)
    assert time.process_time() - started < 2.5, "it takes 0.1 s of a processor; reading values one by one takes 7 s and more"
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert len(header.tensors) == 272


LOAD = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from jaxpaged.loading.fill import fill
from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from tests.loading.tiny_table import TABLE, Like, axis_sizes
with GgufCheckpoint(Path(sys.argv[1])) as checkpoint:
    table, expected = {}, {}
    for name, (path, pattern) in TABLE.items():
        if name != "lm_head.weight":
            as_stored = pattern.split("->")[0]
            table[name] = (path, f"{as_stored} -> {as_stored}")
            layers = (30,) if "{layer}" in name else ()
            expected[path] = Like(layers + checkpoint.shape(name.replace("{layer}", "0")), np.dtype(sys.argv[2]))
    params = fill(checkpoint, table, expected, axis_sizes(checkpoint.hf_config))
seconds = time.process_time()
try:
    peak = int(dict(line.split(":", 1) for line in open("/proc/self/status"))["VmHWM"].split()[0]) * 1024
except FileNotFoundError:  # not Linux; on Linux ru_maxrss also knows the peak of the process that started this one
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weights = sum(array.nbytes for array in params.values())
imported = [name for name in ("jax", "torch", "transformers") if name in sys.modules]
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "weights_bytes": weights, "imported": imported}))
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_loading_takes_six_seconds_and_little_more_memory_than_the_weights(smollm2_path: Path, dtype: str) -> None:
    """The limits are 6 s and 1 GB beside the weights, but 256 MiB show a second copy already; seconds are the processor's."""
    command = [sys.executable, "-W", "error", "-c", LOAD, str(smollm2_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], timeout=120)
    result = json.loads(done.stdout)
    assert result["weights_bytes"] == 134_515_008 * np.dtype(dtype).itemsize
    assert result["seconds"] < 6
    assert result["peak_bytes"] < result["weights_bytes"] + 256 * MIB
    assert result["imported"] == []


WHOLE_LOAD = """
import json, sys
from pathlib import Path
from jaxpaged.config import ModelConfig
from jaxpaged.loading.sources import resolve
from jaxpaged.model_source import ModelSource
config = ModelConfig(model=sys.argv[1], dtype="float32", quantization=sys.argv[2] or None)
source = ModelSource(resolve(config), config, is_gpu=False, num_threads=2)
source.read_ahead()
model = source.load()
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
converted = "jaxpaged.loading.fill" in sys.modules and "gguf" in sys.modules
print(json.dumps({"peak_bytes": int(status["VmHWM"].split()[0]) * 1024, "weight_bytes": model.weight_bytes, "converted": converted}))
"""


@pytest.mark.tier("system")
@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_peak_memory_of_a_whole_load_and_of_one_that_maps_the_weights(smollm2_path: Path, tmp_path: Path, quantization: str) -> None:
    """From the start of the process, JAX and all: under 1.0 GB and the weights as kept."""
    environment = {**os.environ, "JAXPAGED_HOME": str(tmp_path)}
    command = [sys.executable, "-c", WHOLE_LOAD, str(smollm2_path), quantization]
    results = []
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], timeout=250, env=environment
        )
        results.append(json.loads(done.stdout))
    assert [result["converted"] for result in results] == [True, False]
    for result in results:
        assert result["peak_bytes"] < 10**9 + result["weight_bytes"]
