"""Models over the fake devices of one CPU, against the same models on one device. A process of its own, since JAX settles on its devices.

`python -m tests.models.sharded PART` writes one JSON object: name of a case -> what came out (`Compared`, `Ran`). PART is "gate" or "long".
"""

import os

# Before JAX starts. The programs here run once: what LLVM would make better takes longer than they do.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jaxpaged.config import ModelConfig, ParallelConfig
from jaxpaged.convert_model import convert
from jaxpaged.llm import LLM
from jaxpaged.loading.orbax_checkpoint import StoredParameter
from jaxpaged.loading.progress import SilentProgress
from jaxpaged.loading.sources import resolve
from jaxpaged.model_loader import DescribedModel
from jaxpaged.parallel.mesh_config import MeshShape
from jaxpaged.request import SamplingParams
from jaxpaged.step_program import LoadedModel
from tests.models.cases import FAMILY_CASES, Case, golden_logits
from tests.models.paged_model import PagedModel, describe, load_described
from tests.tiny_engine import tiny_config
from tests.tiny_families import write_tiny_bert, write_tiny_family
from tests.tiny_model import write_tiny_llama

VOCAB = 8 * 37
LLAMA = {"vocab_size": VOCAB, "hidden": 40, "ffw": 8 * 13, "layers": 2, "heads": 8, "head_dim": 10, "tie": False}
BUCKET = 16
NUM_CHUNKED, NUM_ALONE = 42, 6
"""Tokens that are fed sixteen at a time, and one at a time behind them."""
TIE = 1e-4


class Compared(NamedTuple):
    """What a model over a mesh gives beside the same model on one device.

    Attributes:
        difference: the largest between two logits.
        num_ids: places at which the likeliest ids were compared.
        differing: those of them with another id, and no tie.
        ties: those where the two likeliest are as good as equal.
        share: bytes of the weights on each device, over those of the whole model.
        pool_share: likewise of the page pool.
        collectives: of each compiled program.
    """

    difference: float
    num_ids: int
    differing: list[int]
    ties: int
    share: float
    pool_share: float
    collectives: list[list[dict[str, str]]]


def token_ids(vocab: int) -> list[int]:
    return np.random.default_rng(5).integers(vocab, size=NUM_CHUNKED + NUM_ALONE).tolist()


class Fed(NamedTuple):
    """A model, what it makes of `token_ids`, and its programs over several devices."""

    loaded: LoadedModel
    logits: np.ndarray
    pool: jax.Array
    compiled: list[str]

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Fed":
        """Logits of every token: chunks of a prompt, and then single tokens, beside a second sequence."""
        ids = token_ids(loaded.config.vocab)
        model = PagedModel(loaded, context=len(ids), num_pages=9, seed=3, gives_back=False)
        sequence, other = model.start(ids), model.start(ids[7:])
        parts = [model.feed([(sequence, count)], BUCKET)[0] for count in (16, 16, NUM_CHUNKED - 32)]
        parts += [model.feed([(other, 3), (sequence, 1)], BUCKET)[1] for _ in range(NUM_ALONE)]
        return cls(loaded, np.concatenate(parts), model.cache.k, model.compiled)


def compare(logits: np.ndarray, own: Fed) -> Compared:
    best = np.sort(logits, axis=1)
    is_tie = best[:, -1] - best[:, -2] < TIE
    differs = (logits.argmax(1) != own.logits.argmax(1)) & ~is_tie
    whole_bytes = sum(math.prod(like.shape) * like.dtype.itemsize for like in own.loaded.structure().expected.values())
    return Compared(
        float(np.abs(logits - own.logits).max()) if np.isfinite(own.logits).all() else float("inf"),
        len(logits),
        np.flatnonzero(differs).tolist(),
        int(is_tie.sum()),
        sum(leaf.addressable_shards[0].data.nbytes for leaf in own.loaded.params) / whole_bytes,
        own.pool.addressable_shards[-1].data.nbytes / own.pool.nbytes,
        [collectives(text) for text in own.compiled],
    )


class Made(NamedTuple):
    """A checkpoint, and the logits of the model in it on one device."""

    folder: Path
    described: DescribedModel
    logits: np.ndarray

    @classmethod
    def of(cls, folder: Path) -> "Made":
        described = describe(folder)
        return cls(folder, described, Fed.of(load_described(folder, described)).logits)

    def over(self, **axes: int) -> Compared:
        return compare(self.logits, Fed.of(load_described(self.folder, self.described, MeshShape(**axes))))


def llamas(folder: Path, *, sizes: dict[int, tuple[int, ...]]) -> Iterator[tuple[str, Compared]]:
    """`sizes`: key heads -> counts for `tensor`."""
    for kv_heads, counts in sizes.items():
        write_tiny_llama(folder / str(kv_heads), **LLAMA, kv_heads=kv_heads, has_tokenizer=False)
        made = Made.of(folder / str(kv_heads))
        for tensor in counts:
            yield f"llama kv{kv_heads} tensor{tensor}", made.over(tensor=tensor)


def prime_llama(folder: Path, *, tensors: tuple[int, ...]) -> Iterator[tuple[str, Compared]]:
    """Key heads on both axes, three of them on each device, and widths that do not come out even."""
    options = {"vocab_size": 131, "hidden": 42, "ffw": 53, "heads": 12, "kv_heads": 6, "head_dim": 10, "tie": True}
    write_tiny_llama(folder / "prime", **options, has_tokenizer=False)
    made = Made.of(folder / "prime")
    for tensor in tensors:
        yield f"llama prime tensor{tensor}", made.over(tensor=tensor)


def against_golden(folder: Path, case: Case, **axes: int) -> Compared:
    """A case of the shared suite against transformers' logits, which one device has too (`test_every_model.py`)."""
    case.write(folder, **case.options)
    sharded = load_described(folder, describe(folder), MeshShape(**axes))
    model = PagedModel(sharded, context=len(case.token_ids), gives_back=False)
    own = model.feed_all(model.start(case.token_ids), 128, 128)[list(case.positions)]
    return compare(golden_logits(case), Fed(sharded, own, model.cache.k, model.compiled))


MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 29}
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 13, "shared_expert_intermediate_size": 17}


def mixtures(folder: Path, *, meshes: dict[str, list[dict[str, int]]]) -> Iterator[tuple[str, Compared]]:
    makers: dict[str, dict[str, Any]] = {
        "mixtral": {"architecture": "MixtralForCausalLM", "config": MIXTRAL, "experts": "mixtral"},
        "qwen2moe": {
            "architecture": "Qwen2MoeForCausalLM",
            "config": {**QWEN_MOE, "model_type": "qwen2_moe", "use_sliding_window": False},
            "experts": "qwen",
            "qkv_bias": True,
        },
    }
    for name in meshes:
        write_tiny_family(folder / name, vocab_size=131, **makers[name])
        made = Made.of(folder / name)
        for axes in meshes[name]:
            yield f"{name} " + " ".join(f"{axis}{count}" for axis, count in axes.items()), made.over(**axes)


class Restored(NamedTuple):
    """What `jaxpaged convert` wrote, put onto a mesh, beside the same weights from safetensors.

    Attributes:
        differing: parameters of which a device has other bytes.
        largest_read, num_read: bytes that were on the host at once, and in all.
        largest_held, num_held: of the largest part of a parameter on a device, and of all parts on all devices.
        largest_whole: of the largest parameter.
    """

    differing: list[str]
    largest_read: int
    num_read: int
    largest_held: int
    num_held: int
    largest_whole: int


def restored(folder: Path, mesh: MeshShape) -> Restored:
    converted = folder.with_name(f"{folder.name}-orbax")
    config = ModelConfig(model=str(folder))
    if not converted.exists():
        convert(config, resolve(config), converted, SilentProgress())
    described, reads = describe(converted), list[int]()
    read = StoredParameter.__array__

    def counted(parameter: StoredParameter, *args: Any, **options: Any) -> np.ndarray:
        reads.append(parameter.nbytes)
        return read(parameter, *args, **options)

    StoredParameter.__array__ = counted  # type: ignore[method-assign]
    try:
        own = load_described(converted, described, mesh)
    finally:
        StoredParameter.__array__ = read  # type: ignore[method-assign]
    other = load_described(folder, described, mesh)
    expected = described.structure().expected
    shards = [(leaf.addressable_shards, like.addressable_shards) for leaf, like in zip(own.params, other.params, strict=True)]
    held = [shard.data.nbytes for pair in shards for shard in pair[0]]
    return Restored(
        [
            path
            for path, pair in zip(expected, shards, strict=True)
            if any(np.asarray(one.data).tobytes() != np.asarray(two.data).tobytes() for one, two in zip(*pair, strict=True))
        ],
        max(reads),
        sum(reads),
        max(held),
        sum(held),
        max(math.prod(like.shape) * like.dtype.itemsize for like in expected.values()),
    )


def encoders(folder: Path, *, tensors: tuple[int, ...]) -> Iterator[tuple[str, Compared]]:
    """Logits of an encoder are of no use, and tell all the same whether its hidden states are right."""
    write_tiny_bert(folder, vocab_size=131)
    made = Made.of(folder)
    for tensor in tensors:
        yield f"bert tensor{tensor}", made.over(tensor=tensor)


PROMPTS = [[3, 5, 7], [9], list(range(20, 60)), list(range(100, 117))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, repetition_penalty=1.2, logit_bias={5: 2.0}, ignore_eos=True),
]


def engines(folder: Path, *, meshes: list[dict[str, int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole engine, sampler and scheduler and all: what it answers, also after a sleep, and the collectives in its programs."""
    write_tiny_llama(folder, **LLAMA, kv_heads=2)
    config = tiny_config(folder, programs="", token_buckets=(BUCKET,), max_num_batched_tokens=BUCKET)
    for axes in meshes:
        file = folder / "mesh.yaml"
        file.write_text(json.dumps({"axes": axes}))
        with LLM(config=msgspec.structs.replace(config, parallel=ParallelConfig(mesh=str(file))), sinks=[]) as llm:
            outputs = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(2)]
            replicas = llm.engine.engines if "data" in axes else [llm.engine]
            num_cached = [engine.pages.num_cached_idle for engine in replicas]
            llm.sleep(level=1)
            llm.wake_up()
            outputs.append(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
            runners = [engine.runner for engine in replicas]
            shards = [runner.run(*idle(runner)).ids.addressable_shards for runner in runners]
            results = [np.asarray(shard.data).tolist() for own in shards for shard in own]
            yield (
                "engine " + " ".join(f"{axis}{count}" for axis, count in axes.items()),
                {
                    "ids": [[list(output.outputs[0].token_ids) for output in several] for several in outputs],
                    "collectives": [collectives(runner.programs[runner.layouts[0]].as_text()) for runner in runners],
                    "num_compiled_while_running": sum(runner.num_compiled_while_running for runner in runners),
                    "devices_agree": all(result == results[0] for result in results),
                    "devices": [[shard.device.id for shard in own] for own in shards],
                    "num_cached": num_cached,
                },
            )


def idle(runner: Any) -> tuple[Any, np.ndarray]:
    layout = runner.layouts[0]
    return layout, runner._idle_blob(layout)


def collectives(hlo: str) -> list[dict[str, str]]:
    """Every collective of a compiled program: its kind, its shape, and which computation it stands in ("body": a loop's)."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", hlo))
    branches = set(re.findall(r"(?:true_computation|false_computation)=%([\w.\-]+)", hlo))
    branches |= {name for names in re.findall(r"branch_computations={([^}]*)}", hlo) for name in re.findall(r"%([\w.\-]+)", names)}
    found, computation = [], ""
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computation = head.group(1)
        pattern = r" = (\(.*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
        if operation := re.search(pattern, line):
            place = "body" if computation in bodies else "branch" if computation in branches else "step"
            shape = re.sub(r"\{.*", "", operation.group(1))
            found.append({"kind": operation.group(2), "shape": shape, "place": place})
    return found


GATE_MESHES = {
    "gemma3": {"tensor": 2},
    "qwen": {"tensor": 3},
    "mixtral": {"tensor": 6},
    "olmo2": {"tensor": 6},
    "gptoss": {"tensor": 6},
    "granite": {"tensor": 6},
}
"""One mesh for each family that is not Llama's file, by the names of the shared suite; qwen2moe and bert have meshes of their own."""


LONG_ENGINES = [
    *({"tensor": tensor} for tensor in (2, 4, 8)),
    *({"data": data, "tensor": tensor} for data, tensor in ((2, 1), (4, 1), (2, 2), (4, 2))),
]


def cases(part: str, folder: Path) -> Iterator[tuple[str, Any]]:
    if part == "gate":
        yield from llamas(folder, sizes={2: (2, 4), 1: (8,)})
        yield from prime_llama(folder, tensors=(4,))
        yield from mixtures(folder, meshes={"qwen2moe": [{"expert": 2}, {"tensor": 2, "expert": 4}]})
        for name, axes in (
            ("prime", {"tensor": 4}),
            ("qwen2moe", {"tensor": 2}),
            ("qwen2moe", {"expert": 2}),
            ("qwen2moe", {"tensor": 2, "expert": 2}),
        ):
            yield (
                f"restored {name} " + " ".join(f"{axis}{count}" for axis, count in axes.items()),
                restored(folder / name, MeshShape(**axes)),
            )
        yield from encoders(folder / "bert", tensors=(3,))
        for case in FAMILY_CASES:
            if case.name in GATE_MESHES:
                axes = GATE_MESHES[case.name]
                yield f"family {case.name}", against_golden(folder / f"family-{case.name}", case, **axes)
        yield from engines(folder / "engine", meshes=[{"tensor": 1}, {"data": 2, "tensor": 4}])
        return
    yield from llamas(folder, sizes=dict.fromkeys((8, 4, 2, 1), (1, 2, 4, 8)))
    yield from prime_llama(folder, tensors=(2, 3, 4, 6))
    both = [{"tensor": tensor, "expert": expert} for tensor in (1, 2) for expert in (1, 2, 4)]
    yield from mixtures(folder, meshes={"mixtral": both, "qwen2moe": both})
    yield from encoders(folder / "bert", tensors=(1, 2, 3, 6))
    for case in FAMILY_CASES:
        for tensor in (1, 2, 3) if case.name == "llama" else (1, 2, 3, 6):
            if case.name != "llama" or tensor != 2:
                yield f"family {case.name} tensor{tensor}", against_golden(folder / f"{case.name}-{tensor}", case, tensor=tensor)
    yield from engines(folder / "engine", meshes=[{"tensor": 1}, *LONG_ENGINES])


if __name__ == "__main__":
    assert jax.device_count() == 8
    with tempfile.TemporaryDirectory() as name:
        out = {key: value._asdict() if isinstance(value, Compared | Restored) else value for key, value in cases(sys.argv[1], Path(name))}
    print(json.dumps(out))
