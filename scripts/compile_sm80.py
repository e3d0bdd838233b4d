"""Compiles the Ampere kernels of paged attention for sm_80, sm_86 and sm_89 on a machine without a GPU, against their budgets.

    make compile-gpu        (or: .venv-compile-gpu/bin/python scripts/compile_sm80.py [--target A100])

Prints a table as `compile_kernels.py` does, with the instructions that such a card has instead: HMMA (products), LDGSTS (`cp.async`) and
DEPBAR.LE (waits for copies). Ends with code 1 when a kernel is beyond its budget or its card's shared memory, has none of them, or does not
wait for exactly as many copies as the blocks under way leave.
"""

import argparse
import functools
import json
import re
import subprocess
import sys
import time
from typing import Any, NamedTuple

import compile_kernels
from compile_kernels import BUDGETS, ROOT, CompileCase, Compiler

CEILINGS = {
    "sm80_decode": {"registers": 255, "spilled_bytes": 0, "shared_bytes": 163 * 1024, "min_in_flight_bytes": 32 * 1024},
    "combine_sm80": {"registers": 168, "spilled_bytes": 0, "shared_bytes": 2048},
}
"""What no budget may exceed. In flight are all the bytes that the CTAs of a multiprocessor can have asked for and not yet used."""


class Target(NamedTuple):
    """A card.

    Attributes:
        description: the plugin's description of it, or of the nearest that it has.
        changes: what to replace in that description, for one that it has not.
    """

    description: str
    capability: tuple[int, int]
    changes: tuple[tuple[str, str], ...] = ()


TARGETS = {
    "A100": Target("NVIDIA A100-SXM4-80GB", (8, 0)),
    "A6000": Target("NVIDIA RTX A6000", (8, 6)),
    # Ada has Ampere's shared memory and registers; what XLA would tune by is not right, but nothing of XLA's is compiled here.
    "L40S": Target("NVIDIA RTX A6000", (8, 9), (("minor: 6", "minor: 9"), ("core_count: 84", "core_count: 142"), ("RTX A6000", "L40S"))),
}

CASES = (
    CompileCase(32, 8, 128, 16),
    CompileCase(9, 3, 64, 16, "float16", "float16", sliding_window=4096, soft_cap=30.0, has_sinks=True),
    CompileCase(32, 32, 96, 16),
    CompileCase(64, 1, 128, 64),
    CompileCase(16, 8, 256, 32, "float16", "float16", soft_cap=50.0),
    CompileCase(32, 8, 64, 8),
)

NUM_CASES_OF_OTHERS = 3
"""Of the cards after the first: enough to see that their assembler takes the kernels and their shared memory holds them."""


class Report(NamedTuple):
    """What the assembler said of one kernel.

    Attributes:
        waits: of each wait for copies, how many it leaves under way.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: int
    copies: int
    waits: tuple[int, ...]


def parse(text: str, shared_bytes: dict[str, int]) -> list[Report]:
    """Reports from what ptxas and nvdisasm print; `shared_bytes` are by kernel."""
    reports = []
    for report in compile_kernels.parse(text, shared_bytes):
        code = re.search(rf"^\.text\.{report.kernel}_mosaic_gpu_kernel:$(.*?)(?=^\.text\.|\Z)", text, re.DOTALL | re.MULTILINE)
        if code is None:
            raise ValueError(f"the disassembler shows no code of {report.kernel}")
        waits = tuple(sorted(int(number, 16) for number in re.findall(r"\bDEPBAR\.LE SB0, (0x[0-9a-f]+)", code[1])))
        products, copies = len(re.findall(r"\bHMMA\b", code[1])), len(re.findall(r"\bLDGSTS\b", code[1]))
        reports.append(
            Report(report.kernel, report.registers, report.spilled_bytes, report.shared_bytes, products, copies, waits),
        )
    return reports


def broken(report: Report, in_flight_bytes: int, wanted_waits: tuple[int, ...], card_bytes: int, budget: dict[str, int]) -> list[str]:
    """A sentence for each thing in which a kernel is beyond its budget or its card."""
    found = [
        f"{report.kernel}: {getattr(report, name)} {name}, budget {budget[name]}"
        for name in ("registers", "spilled_bytes", "shared_bytes")
        if getattr(report, name) > budget[name]
    ]
    if report.shared_bytes > card_bytes:
        found.append(f"{report.kernel}: {report.shared_bytes} bytes of shared memory, and a CTA of this card has {card_bytes}")
    least = budget.get("min_in_flight_bytes", 0)
    if least:
        if in_flight_bytes < least:
            found.append(f"{report.kernel}: {in_flight_bytes} bytes in flight, at least {least} wanted")
        if not report.products:
            found.append(f"{report.kernel}: no HMMA instruction")
        if not report.copies:
            found.append(f"{report.kernel}: no LDGSTS instruction")
        if report.waits != wanted_waits:
            found.append(f"{report.kernel}: waits that leave {report.waits} copies under way, not {wanted_waits}")
    return found


def loosened(budgets: dict[str, dict[str, int]]) -> list[str]:
    """A sentence for each budget that is looser than its ceiling."""
    return [
        f"the budget of {kernel} for {name}, {budgets[kernel][name]}, is looser than the ceiling {limit}"
        for kernel, ceiling in CEILINGS.items()
        for name, limit in ceiling.items()
        if (budgets[kernel][name] < limit if name.startswith("min_") else budgets[kernel][name] > limit)
    ]


def compile_case(compiler: Compiler, case: CompileCase, target: Target, num_seqs: int = 32) -> tuple[list[Report], int, tuple[int, ...]]:
    """Compiles one-token attention of one layer of a stacked pool.

    Returns:
        The reports, the bytes in flight on a multiprocessor, and what each wait must leave under way.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import choose
    from pallas_kernels.paged_attention import OP, mosaic_sm80
    from pallas_kernels.paged_attention.decode_work import BLOCK_TOKENS
    from pallas_kernels.paged_attention.sm80_decode import AsyncCopies

    dtype = jnp.dtype(case.dtype)
    q = compiler.shape((num_seqs, case.heads, case.head_dim), dtype)
    pool = compiler.shape((4, 2048, case.kv_heads, case.page_size, case.head_dim), dtype)
    tables, lens, starts = ((1, num_seqs, 128), (num_seqs,), (num_seqs + 1,))
    numbers = [compiler.shape(shape, jnp.int32) for shape in (tables, lens, starts, (), ())]
    scales = [compiler.shape((), jnp.float32)] * 2
    with jax.sharding.use_abstract_mesh(compiler.mesh.abstract_mesh):
        choose(OP, "mosaic_sm80", (q, pool, pool, *numbers[:3]), {"layer": 0, "group": 0})
    plan = mosaic_sm80.occupancy(q, pool, target.capability)
    assert plan is not None, "it would have been refused"
    num_ctas, stages = plan
    run = functools.partial(mosaic_sm80.decode, soft_cap=case.soft_cap, num_ctas=256, stages=stages, copies=AsyncCopies())
    names = ("q", "k_pages", "v_pages", "page_tables", "kv_lens", "cu_q_lens", "layer", "group", "qk_scale", "v_scale")
    operands: dict[str, Any] = dict(zip(names, (q, pool, pool, *numbers, *scales), strict=True))
    operands["sliding_window"] = compiler.shape((), jnp.int32) if case.sliding_window else None
    operands["sinks"] = compiler.shape((case.heads,), jnp.float32) if case.has_sinks else None
    pieces = BLOCK_TOKENS // min(case.page_size, BLOCK_TOKENS)
    # Keys: this block's values and the blocks after it but the one that is asked for then. Values: the blocks after it.
    waits = ((stages - 2) * (1 + 2 * pieces) + pieces, (stages - 1) * (1 + 2 * pieces))
    in_flight = num_ctas * stages * 2 * BLOCK_TOKENS * case.head_dim * dtype.itemsize
    return parse(*compiler.compile_text(run, operands)), in_flight, waits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(TARGETS), help="only this card")
    args = parser.parse_args()
    if not args.target:
        # One process a card: what jax has traced for one it takes for the next, with the instructions of the first.
        runs = [subprocess.run([sys.executable, __file__, "--target", name]) for name in TARGETS]
        return int(any(run.returncode for run in runs))
    descriptions = compile_kernels.prepare_environment()
    sys.path.insert(0, str(ROOT))
    from jax.experimental.mosaic.gpu import utils

    from pallas_kernels.paged_attention.mosaic_sm80 import SHARED_BYTES

    budgets = json.loads(BUDGETS.read_text(encoding="utf-8"))
    faults = loosened(budgets)
    columns = f"{'registers':>9} {'spilled':>7} {'shared':>7} {'in flight':>9} {'HMMA':>5} {'LDGSTS':>6} {'waits':>8} {'s':>5}"
    print(f"{'target':6} {'kernel':14} {columns}  case")
    name = args.target
    target = TARGETS[name]
    description = descriptions[target.description]
    for old, new in target.changes:
        if old not in description:
            raise ValueError(f"the description of {target.description} does not say {old!r} any more")
        description = description.replace(old, new)
    # Mosaic takes any device that is not there for a Hopper.
    utils._infer_arch = lambda capability=target.capability: capability
    compiler = Compiler(description)
    for case in CASES if name == next(iter(TARGETS)) else CASES[:NUM_CASES_OF_OTHERS]:
        started = time.process_time()
        reports, in_flight, waits = compile_case(compiler, case, target)
        for report in reports:
            own = in_flight if "min_in_flight_bytes" in budgets[report.kernel] else 0
            print(
                f"{name:6} {report.kernel:14} {report.registers:9} {report.spilled_bytes:7} {report.shared_bytes:7} {own:9}"
                f" {report.products:5} {report.copies:6} {', '.join(map(str, report.waits)):>8} {time.process_time() - started:5.1f}"
                f"  {case.name}",
                flush=True,
            )
            card_bytes = SHARED_BYTES[target.capability] - 1024
            faults += [f"{name}, {case.name}: {words}" for words in broken(report, own, waits, card_bytes, budgets[report.kernel])]
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
