"""Compiles the whole decode step of a Llama-8B-like model for an H200 on a machine without one, and holds what came out against limits.

    make compile-gpu        (or: .venv-compile-gpu/bin/python scripts/compile_step.py [--layers 4] [--keep FOLDER])

The step is the engine's own: blob taken apart, layers with `kv_write` and `paged_attention` by Mosaic, head, sampler, log-probabilities.
Prints how many kernels a layer has, how many command buffers the step is and what lies outside of them, temporary memory, and how much of
the page pool is updated in place.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import compile_kernels

LIMITS = {"kernels_per_layer": 16, "command_buffers": 1, "outside": 0, "temporary_bytes": 54_000_000, "pool_copies": 0}
"""What a step may take; at most 16 kernels a layer, one command buffer and 64 MB are wanted."""

KERNELS_OF_ATTENTION = 3
"""Mosaic kernels of a layer's decode: the write, the walk, the combination. XLA has no custom calls of its own without autotuning."""

PAGE_SIZE, NUM_PAGES = 64, 2048
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


class StepReport(NamedTuple):
    """What the compiler made of a step.

    Attributes:
        kernels_per_layer: launches of a layer in the middle, without those under conditions.
        command_buffers: that are started one after another.
        outside: things done between them, each of which waits for the host.
        pool_copies: instructions that copy an array of the pool's size.
    """

    kernels_per_layer: int
    command_buffers: int
    outside: int
    temporary_bytes: int
    aliased_bytes: int
    pool_bytes: int
    pool_copies: int


def parse_thunks(text: str) -> tuple[int, int, int]:
    """Kernels a layer, command buffers, and things outside of them, from what XLA writes of a program's thunks."""
    outer = [line for line in text.splitlines() if re.match(r"\d+: k", line)]
    buffers = sum("kCommandBuffer" in line for line in outer)
    launches, nested_below = [], None
    for line in text.splitlines():
        found = re.match(r"(\s*)\d+: (k\w+)", line)
        if found is None:
            continue
        indent, kind = len(found[1]), found[2]
        if nested_below is not None and indent > nested_below:
            continue
        nested_below = indent if kind in ("kConditional", "kWhile") else None
        if kind in ("kCustomKernel", "kCustomCall"):
            launches.append(kind)
    calls = [index for index, kind in enumerate(launches) if kind == "kCustomCall"]
    if len(calls) < 3 * KERNELS_OF_ATTENTION:
        raise ValueError(f"{len(calls)} calls of our kernels, which is less than three layers have: XLA's words are no longer understood")
    return calls[-KERNELS_OF_ATTENTION] - calls[-2 * KERNELS_OF_ATTENTION], buffers, len(outer) - buffers


def beyond(report: StepReport) -> list[str]:
    """A sentence for each limit that a step breaks."""
    found = [f"{getattr(report, name)} {name}, at most {limit}" for name, limit in LIMITS.items() if getattr(report, name) > limit]
    if report.aliased_bytes < report.pool_bytes:
        found.append(f"{report.aliased_bytes} bytes are updated in place, and the pool has {report.pool_bytes}")
    return found


class _Lowering:
    """Takes the place of `TracedPrograms`: lowers for the device of a compiler."""

    def __init__(self, compiler: compile_kernels.Compiler) -> None:
        self._compiler = compiler

    def lower(self, run: Any, args: Any, *, donate: int, fixed: str, name: str, kernels: Mapping[str, str]) -> Any:
        import jax

        from pallas_kernels.dispatch import selecting

        args = jax.tree.map(lambda like: self._compiler.shape(like.shape, like.dtype), args)
        with selecting(kernels), jax.sharding.use_abstract_mesh(self._compiler.mesh.abstract_mesh):
            return jax.jit(run, donate_argnums=donate).lower(*args)


def lower_step(compiler: compile_kernels.Compiler, num_layers: int, kernels: Mapping[str, str], num_seqs: int = 32) -> tuple[Any, int]:
    """The step of `num_seqs` tokens, and the bytes of its page pool."""
    import jax.numpy as jnp

    from jaxpaged.batch import BatchLayout
    from jaxpaged.config import CacheConfig
    from jaxpaged.kv_cache import cache_shape
    from jaxpaged.loading.model_config import settle
    from jaxpaged.model_structure import facts_of, make_structure
    from jaxpaged.models import find_architecture, load_family, make_config
    from jaxpaged.step_program import LoadedModel, StepProgram

    hf = settle(LLAMA_8B | {"num_hidden_layers": num_layers}, "Llama 8B")
    architecture = find_architecture(hf)
    config = make_config(architecture, hf, jnp.dtype("bfloat16"))
    structure = make_structure(load_family(architecture), config)
    params = tuple(compiler.shape(like.shape, like.dtype) for like in structure.expected.values())
    shape = cache_shape(facts_of(config), CacheConfig(page_size=PAGE_SIZE))
    layout = BatchLayout(num_seqs, num_seqs, 8192 // PAGE_SIZE, PAGE_SIZE, NUM_PAGES, 256)
    # Shapes stand for weights, and a lowering for another device for the kept programs.
    model, traced = LoadedModel.of(structure, params), _Lowering(compiler)  # type: ignore[arg-type]
    step = StepProgram(model, shape, num_ids=config.vocab, traced=traced, kernels=kernels)  # type: ignore[arg-type]
    return step.lower(layout), NUM_PAGES * shape.page_bytes


def report_on(lowered: Any, pool_bytes: int, pool_shape: str, folder: Path) -> StepReport:
    """Compiles a step, and reads what XLA wrote of it to a folder."""
    compiled = lowered.compile()
    (thunks,) = folder.glob("*jit_step*thunk_sequence_after_thunk_passes.txt")
    memory = compiled.memory_analysis()
    copies = len(re.findall(rf"= {re.escape(pool_shape)}\S* copy\(", compiled.as_text()))
    return StepReport(
        *parse_thunks(thunks.read_text(encoding="utf-8")),
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        pool_bytes=pool_bytes,
        pool_copies=copies,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="at least 3")
    parser.add_argument("--keep", type=Path, help="folder for what the compiler writes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step"
        descriptions = compile_kernels.prepare_environment()
        for name in ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS"):
            del os.environ[name]
        sys.path.insert(0, str(compile_kernels.ROOT))
        compiler = compile_kernels.Compiler(descriptions[compile_kernels.TARGETS["H200"]])
        started = time.process_time()
        lowered, pool_bytes = lower_step(compiler, args.layers, {"paged_attention": "mosaic_gpu", "kv_write": "mosaic_gpu"})
        report = report_on(lowered, pool_bytes, f"bf16[{args.layers},{NUM_PAGES},8,{PAGE_SIZE},128]", folder)
    print(f"decode step of {args.layers} layers like Llama 8B, 32 sequences, H200: {time.process_time() - started:.1f} s")
    for name, value in report._asdict().items():
        print(f"  {name:20} {value:14,}" + (f"  at most {LIMITS[name]:,}" if name in LIMITS else ""))
    faults = beyond(report)
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
