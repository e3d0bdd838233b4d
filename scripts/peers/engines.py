"""Which engines bench_peers.py knows: how each is started, in what precision it computes, and which workloads it takes by default."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from jaxpaged.config import KernelsConfig

KERNELS_XLA = dict.fromkeys(KernelsConfig.__struct_fields__, "xla")
OURS: dict[str, dict[str, object]] = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8-xla": {"quantization": "int8", "kernels": KERNELS_XLA},
    "float32": {"dtype": "float32"},
}
"""Name -> arguments of `LLM`."""

PRECISIONS = {
    "int8": "weights int8 per channel, activations int8 per row",
    "int4": "weights int4 in groups of 32, the file's own where it has them, activations int16 per row",
    "bfloat16": "bfloat16",
    "int8-xla": "as int8, without native kernels",
    "float32": "float32",
    "llama.cpp-q8_0": "weights int8 in blocks of 32, activations int8, cache float16",
    "llama.cpp-q4_0": "weights int4 in blocks of 32, activations int8, cache float16",
    "llama.cpp-q4_1": "weights int4 in blocks of 32, activations int8, cache float16",
    "vllm-bfloat16": "bfloat16, compiled",
    "vllm-bfloat16-eager": "bfloat16, not compiled",
    "transformers-static": "bfloat16",
    "transformers-continuous": "bfloat16",
}

WORKLOADS = ("b1", "mixed16", "prefix16")
SLOW = ("transformers-static", "transformers-continuous")
"""They run only what a goal names: the rest takes minutes a round."""

UNASKED = ("float32", "int4", "llama.cpp-q4_1", "vllm-bfloat16-eager")
"""No goal names them; they run only when `--engines` does."""


class Engine(NamedTuple):
    """How to start it and what it is."""

    command: list[str]
    precision: str
    workloads: tuple[str, ...]
    is_default: bool


def known(folder: Path, threads: int) -> dict[str, Engine]:
    """Name -> engine, ours first; `folder` is what setup.sh made."""
    drivers = Path(__file__).parent
    server, models, count = str(folder / "llama.cpp/build/bin/llama-server"), folder / "models", str(threads)
    made = {
        name: [sys.executable, str(drivers / "ours.py"), json.dumps({"cpu": {"threads": threads}, **options})]
        for name, options in OURS.items()
    }
    vllm = [str(folder / "vllm/bin/python"), str(drivers / "vllm_cpu.py"), str(models / "bfloat16"), "bfloat16", count]
    made["vllm-bfloat16"], made["vllm-bfloat16-eager"] = vllm, [*vllm, "--eager"]
    for kind in ("q8_0", "q4_0", "q4_1"):
        made[f"llama.cpp-{kind}"] = [sys.executable, str(drivers / "llama_server.py"), server, str(models / f"{kind}.gguf"), count]
    for kind in ("continuous", "static"):
        python = str(folder / "transformers/bin/python")
        made[f"transformers-{kind}"] = [python, str(drivers / "hf_transformers.py"), str(models / "bfloat16"), "bfloat16", count, kind]
    return {
        name: Engine(command, PRECISIONS[name], ("mixed16",) if name in SLOW else WORKLOADS, name not in UNASKED)
        for name, command in made.items()
    }
