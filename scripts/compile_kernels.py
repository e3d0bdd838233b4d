"""Compiles the GPU kernels for NVIDIA GPUs on a machine without one, and holds what the compiler says against the budgets.

    make compile-gpu        (or: .venv-compile-gpu/bin/python scripts/compile_kernels.py [--target H200] [--case WORDS])

Prints a table of registers, spilled bytes, shared memory, bytes in flight (keys and values, or weights and rows), and matrix and bulk-copy
instructions of each kernel, and ends with code 1 when one is beyond `pallas_kernels/compile_budgets.json`. First it compiles a kernel that
must spill, so that a compiler whose report is no longer understood is noticed. In an environment with CUDA 12 it compiles the first case of
each op, for the first device.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BUDGETS = ROOT / "pallas_kernels" / "compile_budgets.json"
TARGETS = {"H200": "NVIDIA H200 141GB HBM3e", "H100": "NVIDIA H100 80GB HBM3"}
"""Name here -> description of the device in the plugin. Both are sm_90a: the second gets the first cases only."""

NUM_CASES_OF_OTHERS = 2

CEILINGS = {
    "paged_decode": {"registers": 232, "spilled_bytes": 0, "shared_bytes": 227 * 1024, "min_in_flight_bytes": 64 * 1024},
    "paged_prefill": {"registers": 168, "spilled_bytes": 0, "shared_bytes": 227 * 1024, "min_in_flight_bytes": 64 * 1024},
    "combine_parts": {"registers": 168, "spilled_bytes": 0, "shared_bytes": 227 * 1024},
    "write_tokens": {"registers": 168, "spilled_bytes": 0, "shared_bytes": 227 * 1024},
    "quantized_matmul": {"registers": 168, "spilled_bytes": 0, "shared_bytes": 227 * 1024, "min_in_flight_bytes": 64 * 1024},
    "multiply_groups": {"registers": 232, "spilled_bytes": 0, "shared_bytes": 227 * 1024, "min_in_flight_bytes": 64 * 1024},
}
"""What no budget may exceed."""


class Report(NamedTuple):
    """What the assembler said of one kernel.

    Attributes:
        kernel: the name of its function.
        matrix_ops: HGMMA and IGMMA instructions, of all kernels that were compiled with it.
        bulk_copies: UTMALDG instructions, likewise.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_ops: int
    bulk_copies: int


def parse(text: str, shared_bytes: dict[str, int]) -> list[Report]:
    """Reports from what ptxas and nvdisasm print; `shared_bytes` are by kernel. One that was compiled before is not reported again."""
    entries = re.findall(
        r"Compiling entry function '(\w+)_mosaic_gpu_kernel' for.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        text,
        re.DOTALL,
    )
    if not entries:
        raise ValueError(f"the assembler reports no kernel, of {', '.join(shared_bytes)}")
    matrix_ops, bulk_copies = len(re.findall(r"\b[HI]GMMA\b", text)), len(re.findall(r"\bUTMALDG\b", text))
    return [
        Report(name, int(registers), max(int(stores), int(loads)), shared_bytes[name], matrix_ops, bulk_copies)
        for name, stores, loads, registers in entries
    ]


def broken(report: Report, in_flight_bytes: int, budget: dict[str, int]) -> list[str]:
    """A sentence for each thing in which a kernel is beyond its budget."""
    found = [
        f"{report.kernel}: {getattr(report, name)} {name}, budget {budget[name]}"
        for name in ("registers", "spilled_bytes", "shared_bytes")
        if getattr(report, name) > budget[name]
    ]
    least = budget.get("min_in_flight_bytes", 0)
    if least:
        if in_flight_bytes < least:
            found.append(f"{report.kernel}: {in_flight_bytes} bytes in flight, at least {least} wanted")
        if not report.matrix_ops:
            found.append(f"{report.kernel}: no HGMMA or IGMMA instruction")
    if not report.bulk_copies:
        found.append(f"{report.kernel}: no UTMALDG instruction")
    return found


def loosened(budgets: dict[str, dict[str, int]]) -> list[str]:
    """A sentence for each budget that is looser than its ceiling."""
    found = []
    for kernel, ceiling in CEILINGS.items():
        for name, limit in ceiling.items():
            value = budgets[kernel][name]
            if value < limit if name.startswith("min_") else value > limit:
                found.append(f"the budget of {kernel} for {name}, {value}, is looser than the ceiling {limit}")
    return found


def device_descriptions(plugin: bytes) -> dict[str, str]:
    """The descriptions of devices that the plugin carries, by name: texts of a protocol buffer between zero bytes."""
    found = {}
    for match in re.finditer(rb'device_description_str: "([^"]+)"', plugin):
        begin, end = plugin.rfind(b"\0", 0, match.start()) + 1, plugin.index(b"\0", match.end())
        found[match[1].decode()] = plugin[begin:end].decode()
    return found


@contextlib.contextmanager
def captured_output() -> Iterator[Any]:
    """A file that gets what C++ writes to the standard output meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


class Compiler:
    """Compiles for one device that is not there."""

    def __init__(self, description: str) -> None:
        import jax
        from jax.experimental import topologies
        from jax.experimental.mosaic.gpu import core

        topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
        self.mesh = topologies.make_mesh(topology, (1,), ("x",))
        self._sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self._core = core

    def shape(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An operand."""
        import jax

        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def compile(self, function: Callable[..., Any], operands: dict[str, Any]) -> list[Report]:
        """Reports on the Mosaic kernels of a function; identical kernels count once."""
        return parse(*self.compile_text(function, operands))

    def compile_text(self, function: Callable[..., Any], operands: dict[str, Any]) -> tuple[str, dict[str, int]]:
        """What the assembler and the disassembler print of a function's Mosaic kernels, and their shared memory by name."""
        import jax

        shared_bytes = {}
        launch = self._core._launch

        def noted(token: Any, grid: Any, cluster: Any, block: Any, buffers: Any, *rest: Any, **options: Any) -> Any:
            function = self._core.ir.InsertionPoint.current.block.owner.attributes["sym_name"].value
            shared_bytes[function.removesuffix("_mosaic_gpu")] = self._core._smem_tree_size(buffers)
            return launch(token, grid, cluster, block, buffers, *rest, **options)

        self._core._launch = noted
        try:
            with captured_output() as output, jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                jax.jit(function).lower(**operands).compile()
                output.seek(0)
                text = output.read()
        finally:
            self._core._launch = launch
        return text, shared_bytes


def spiller(x: Any) -> Any:
    """A kernel that holds a matrix of 256 numbers a thread, one more than there are registers."""
    import jax
    from jax import lax
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def spills(x_ref: Any, out_ref: Any, matrix: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(x_ref, matrix, arrived)
        plgpu.barrier_wait(arrived)
        values = plgpu.layout_cast(matrix[...], plgpu.Layout.WGMMA)
        matrix[...] = values / lax.broadcast_in_dim(values.sum(axis=1), values.shape, [0])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(matrix, out_ref)
        plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(spills, out_type=out, scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])(x)


class CompileCase(NamedTuple):
    """A step of one-token and of longer sequences."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    page_dtype: str = "bfloat16"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def name(self) -> str:
        extras = [word for word, has in (("window", self.sliding_window), ("cap", self.soft_cap), ("sinks", self.has_sinks)) if has]
        words = [f"{self.heads}/{self.kv_heads} heads", f"dim {self.head_dim}", f"page {self.page_size}", self.dtype, self.page_dtype]
        return " ".join([*words, *extras])


CASES = (
    CompileCase(32, 8, 128, 16),
    CompileCase(32, 8, 128, 64),
    CompileCase(9, 3, 64, 16, sliding_window=4096, soft_cap=30.0, has_sinks=True),
    CompileCase(32, 32, 96, 8, "float16", "float16"),
    CompileCase(16, 8, 256, 128, sliding_window=1024, soft_cap=50.0),
    CompileCase(64, 1, 128, 32, "float16", "float16"),
    CompileCase(32, 8, 128, 16, page_dtype="float8_e4m3fn"),
    CompileCase(32, 8, 64, 64, page_dtype="float8_e4m3fn"),
    CompileCase(16, 8, 256, 16, page_dtype="float8_e4m3fn"),
    CompileCase(32, 8, 96, 16, page_dtype="float8_e4m3fn", sliding_window=1024),
)


def compile_case(compiler: Compiler, case: CompileCase, num_seqs: int = 32, num_pages: int = 2048, num_layers: int = 4) -> list[Report]:
    """Compiles attention of one layer of a stacked pool, the layer and the group being data."""
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import paged_attention

    pool = compiler.shape((num_layers, num_pages, case.kv_heads, case.page_size, case.head_dim), jnp.dtype(case.page_dtype))
    operands = {
        "q": compiler.shape((num_seqs, case.heads, case.head_dim), jnp.dtype(case.dtype)),
        "k_pages": pool,
        "v_pages": pool,
        "page_tables": compiler.shape((1, num_seqs, 128), jnp.int32),
        "kv_lens": compiler.shape((num_seqs,), jnp.int32),
        "cu_q_lens": compiler.shape((num_seqs + 1,), jnp.int32),
        "layer": compiler.shape((), jnp.int32),
        "group": compiler.shape((), jnp.int32),
    }
    if case.has_sinks:
        operands["sinks"] = compiler.shape((case.heads,), jnp.float32)
    run = functools.partial(
        paged_attention,
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        implementation="mosaic_gpu",
    )
    return compiler.compile(run, operands)


def compile_write(compiler: Compiler, case: CompileCase, num_tokens: int = 32, num_pages: int = 2048, num_layers: int = 4) -> list[Report]:
    """Compiles the write of one layer's keys and values into a stacked pool, the layer being data."""
    import jax.numpy as jnp

    from pallas_kernels.kv_write import kv_write

    pool = compiler.shape((num_layers, num_pages, case.kv_heads, case.page_size, case.head_dim), jnp.dtype(case.page_dtype))
    new = compiler.shape((num_tokens, case.kv_heads, case.head_dim), jnp.dtype(case.dtype))
    angles = compiler.shape((num_tokens, case.head_dim // 2), jnp.float32)
    places = compiler.shape((num_tokens,), jnp.int32)
    operands = {
        "q": compiler.shape((num_tokens, case.heads, case.head_dim), jnp.dtype(case.dtype)),
        **{"k": new, "v": new, "k_pages": pool, "v_pages": pool, "cos": angles, "sin": angles},
        **{"write_pages": places, "write_offsets": places, "layer": compiler.shape((), jnp.int32)},
    }
    return compiler.compile(functools.partial(kv_write, implementation="mosaic_gpu"), operands)


def compile_pages(compiler: Compiler, case: CompileCase) -> tuple[list[Report], dict[str, int]]:
    """Compiles attention and the write of a case; returns the reports, and the bytes in flight by kernel."""
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill

    dtypes = jnp.dtype(case.dtype), jnp.dtype(case.page_dtype)
    in_flight = {
        "paged_decode": mosaic_decode.in_flight_bytes(case.head_dim, *dtypes),
        "paged_prefill": mosaic_prefill.in_flight_bytes(case.head_dim, *dtypes),
    }
    return [*compile_case(compiler, case), *compile_write(compiler, case)], in_flight


TOOLKITS = {"cuda13": Path("nvidia", "cu13"), "cuda12": Path("nvidia", "cuda_nvcc")}
"""Where wheels of a CUDA put its assembler and its device library."""


def installed() -> tuple[Path, str]:
    """The folder of packages with jax's plugin, and the CUDA that it is for."""
    return next((Path(path), cuda) for path in sys.path for cuda in TOOLKITS if (Path(path) / "jax_plugins" / f"xla_{cuda}").is_dir())


def prepare_environment() -> dict[str, str]:
    """Settings that jax and its plugin read when they are loaded; returns the devices that can be compiled for."""
    packages, cuda = installed()
    os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_SASS="1", CUDA_ROOT=str(packages / TOOLKITS[cuda]))
    programs = packages / TOOLKITS[cuda] / "bin"
    os.environ["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    # There is no wheel of CUDA 12's disassembler, and jax looks for one beside the assembler: that of 13 reads its programs too.
    if not (programs / "nvdisasm").exists():
        (programs / "nvdisasm").symlink_to(packages / TOOLKITS["cuda13"] / "bin" / "nvdisasm")
    return device_descriptions((packages / "jax_plugins" / f"xla_{cuda}" / "xla_cuda_plugin.so").read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), help="only this device")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    args = parser.parse_args()
    _, cuda = installed()
    if not args.target:
        # The compiler does not say again what it has said of a kernel, for another device of the same architecture either.
        targets = list(TARGETS) if cuda == "cuda13" else list(TARGETS)[:1]
        runs = [subprocess.run([sys.executable, __file__, "--target", name, "--case", args.case]) for name in targets]
        return int(any(run.returncode for run in runs))
    name = args.target
    descriptions = prepare_environment()
    sys.path.insert(0, str(ROOT))
    import jax.numpy as jnp
    from compile_grouped import CASES as GROUPED_CASES
    from compile_grouped import compile_grouped
    from compile_quantized import CASES as QUANTIZED_CASES
    from compile_quantized import compile_quantized

    budgets = json.loads(BUDGETS.read_text(encoding="utf-8"))
    faults = loosened(budgets)
    columns = f"{'registers':>9} {'spilled':>7} {'shared':>7} {'in flight':>9} {'GMMA':>5} {'UTMALDG':>7} {'s':>5}"
    print(f"{'target':6} {'kernel':16} {columns}  case ({cuda})")
    compiler = Compiler(descriptions[TARGETS[name]])
    (planted,) = compiler.compile(spiller, {"x": compiler.shape((64, 512), jnp.float32)})
    if not planted.spilled_bytes:
        faults.append(f"{name}: the kernel that must spill does not: the assembler's report is no longer understood")
    num_cases = 1 if cuda != "cuda13" else None if name == next(iter(TARGETS)) else NUM_CASES_OF_OTHERS
    jobs = [
        *((case.name, functools.partial(compile_pages, compiler, case)) for case in CASES[:num_cases]),
        *((case.name, functools.partial(compile_grouped, compiler, case)) for case in GROUPED_CASES[:num_cases]),
        *((case.name, functools.partial(compile_quantized, compiler, case)) for case in QUANTIZED_CASES[:num_cases]),
    ]
    for case, job in jobs:
        if args.case not in case:
            continue
        started = time.process_time()
        reports, in_flight = job()
        for report in reports:
            own = in_flight.get(report.kernel, 0)
            print(
                f"{name:6} {report.kernel:16} {report.registers:9} {report.spilled_bytes:7} {report.shared_bytes:7} {own:9}"
                f" {report.matrix_ops:5} {report.bulk_copies:7} {time.process_time() - started:5.1f}  {case}",
                flush=True,
            )
            faults += [f"{name}, {case}: {sentence}" for sentence in broken(report, own, budgets[report.kernel])]
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
