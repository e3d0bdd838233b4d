"""What the kernels do on a real GPU, in at most six minutes: ceilings of the card, numerics, grids of decode and prefill, and the engine.

    python scripts/gpu_check.py [--wheels FOLDER] [--seconds 360] [--dry-run] [--only PART]

Prints a table and then one JSON line. A part that fails is reported and the others go on. Nothing has to be installed beside jax, flax and
numpy: `--wheels` unpacks a folder of wheels (`make gpu-bundle`) into a temporary folder. `--dry-run` runs every part on the CPU with
tiny sizes, Mosaic kernels in the interpreter; its figures mean nothing. Without a GPU it says so and ends with code 2.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_comparators import flex_attention, ragged_dot, torch_attention, transformers, triton
from gpu_timing import Card, Row, per_call, seconds_of, skipped

ROOT = Path(__file__).parent.parent


def copy_rate(card: Card) -> Iterator[Row]:
    """Bytes read and written by a copy."""
    import jax
    import jax.numpy as jnp

    num_bytes = 2**16 if card.is_dry else 2**32
    data = jnp.ones(num_bytes // 4, jnp.float32)
    seconds = seconds_of(functools.partial(jax.jit(lambda x: x + 1), data), 1 if card.is_dry else 9)
    yield Row("copy", f"{num_bytes:,} bytes", 2 * num_bytes / seconds, "B/s")


def matmul_rate(card: Card) -> Iterator[Row]:
    """Operations of a bfloat16 product."""
    import jax
    import jax.numpy as jnp

    size = 64 if card.is_dry else 8192
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) * size**-0.5
    seconds = per_call(lambda x: x @ matrix, matrix, is_dry=card.is_dry)
    yield Row("matmul", f"{size}^3 bfloat16", 2 * size**3 / seconds, "op/s")


def interpreted(card: Card) -> dict[str, Any]:
    """Options of a Mosaic kernel that is run without a GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return {"interpret": plgpu.InterpretGPUParams()} if card.is_dry else {}


def able(op: Any, operands: dict[str, Any], options: dict[str, Any]) -> list[tuple[str, Callable[..., Any]]]:
    """The implementations, beside the reference, that take the operands on this card."""
    others = [one for name, one in op.implementations.items() if name != "reference"]
    return [(one.name, one.run) for one in others if not one.refusals(**operands, **options)]


def write_numerics(card: Card) -> Iterator[Row]:
    """Every `kv_write` that runs here against its reference: the largest difference; pools must differ nowhere else."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.kv_write import OP, cases, mosaic_gpu, reference

    interpreter = [("mosaic_gpu", functools.partial(mosaic_gpu.kv_write, **interpreted(card)))]
    for case in [case for case in cases.CASES if "gpu" in case.tags][: 1 if card.is_dry else None]:
        operands = jax.tree.map(jnp.asarray, cases.make(case))
        wanted = reference.kv_write(**operands, layer=None)
        for name, run in interpreter if card.is_dry else able(OP, operands, {"layer": None}):
            difference = largest_difference(np.asarray, run(**operands, layer=None), wanted)
            yield Row("numerics kv_write", f"{name} {case.name}", difference, "difference")


def attention_numerics(card: Card) -> Iterator[Row]:
    """Every `paged_attention` that runs here against its reference in float32."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.paged_attention import OP, cases, mosaic_gpu, reference

    places: dict[str, Any] = {"layer": None, "group": None}
    few = [case for case in cases.CASES if ("gpu_first" if card.is_dry else "gpu") in case.tags]
    interpreter = [("mosaic_gpu", functools.partial(mosaic_gpu.paged_attention, num_ctas=3, **interpreted(card)))]
    for case in few[: 1 if card.is_dry else None]:
        operands = {"sinks": None} | jax.tree.map(jnp.asarray, cases.make(case))
        options = {**cases.options(case), **places}
        wide = {name: x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float32) for name, x in operands.items()}
        wanted = reference.paged_attention(**wide, **options)
        for name, run in interpreter if card.is_dry else able(OP, operands, options):
            difference = largest_difference(np.asarray, (run(**operands, **options),), (wanted,))
            yield Row("numerics attention", f"{name} {case.name}", difference, "difference")


def matmul_numerics(card: Card) -> Iterator[Row]:
    """Every implementation of `quantized_matmul` and `grouped_matmul` that takes a case, against the reference: largest shares of it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import grouped_matmul, quantized_matmul
    from pallas_kernels.grouped_matmul import cases as grouped_cases
    from pallas_kernels.quantized_matmul import cases as quantized_cases

    of_quantized = [case for case in quantized_cases.CASES if "gpu" in case.tags]
    of_grouped = [case for case in grouped_cases.CASES if "bench" not in case.tags and sum(case.group_sizes)]
    for op, cases, few in ((quantized_matmul.OP, quantized_cases, of_quantized), (grouped_matmul.OP, grouped_cases, of_grouped)):
        for case in few[: 1 if card.is_dry else None]:
            made: Any = cases.make(case, dtype="bfloat16")
            operands = jax.tree.map(jnp.asarray, tuple(made.values()) if isinstance(made, dict) else made)
            num_rows = sum(getattr(case, "group_sizes", (case.num_rows,)))
            options = {"layer": 0 if getattr(case, "layers", None) else None}
            wanted = np.asarray(op.implementations["reference"].run(*operands, **options))[:num_rows]
            for name, implementation in op.implementations.items():
                if name != "reference" and card.has_time() and not implementation.refusals(*operands, **options):
                    got = np.asarray(implementation.run(*operands, **options))[:num_rows]
                    share = largest_difference(np.asarray, (got,), (wanted,)) / max(float(np.abs(wanted).max()), 1e-30)
                    yield Row(f"numerics {op.name}", f"{name} {case.name}", share, "difference")


def largest_difference(as_array: Callable[[Any], Any], got: Any, wanted: Any) -> float:
    """Over all arrays, infinite where one is NaN and the other is not."""
    import numpy as np

    largest = 0.0
    for one, other in zip(got, wanted, strict=True):
        one, other = as_array(one).astype(np.float32), as_array(other).astype(np.float32)
        if (np.isnan(one) != np.isnan(other)).any():
            return float("inf")
        largest = max(largest, float(np.nanmax(np.abs(one - other), initial=0.0)))
    return largest


def attend(
    card: Card, implementation: str, num_seqs: int, q_len: int, kv_len: int, head_dim: int, page_size: int, page_dtype: str
) -> float:
    """Seconds of attention of 32 heads and 8 KV heads over pages of `num_seqs` sequences, in any order."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.paged_attention import mosaic_gpu, xla

    heads, kv_heads = (4, 2) if card.is_dry else (32, 8)
    pages_each = -(-kv_len // page_size)
    order = np.random.default_rng(0).permutation(num_seqs * pages_each).astype(np.int32).reshape(num_seqs, pages_each)
    pool = jnp.full((num_seqs * pages_each, kv_heads, page_size, head_dim), 0.5, jnp.dtype(page_dtype))
    q = jax.random.normal(jax.random.key(0), (num_seqs * q_len, heads, head_dim), jnp.bfloat16)
    lens, ends = jnp.full(num_seqs, kv_len, jnp.int32), jnp.arange(num_seqs + 1, dtype=jnp.int32) * q_len
    options: dict[str, Any] = {"layer": None, "group": None, "scale": head_dim**-0.5, "sliding_window": None, "soft_cap": None}
    options |= {"sinks": None, "is_causal": True}
    run = xla.paged_attention if implementation == "xla" else functools.partial(mosaic_gpu.paged_attention, **interpreted(card))
    return per_call(lambda q: run(q, pool, pool, jnp.asarray(order), lens, ends, **options), q, is_dry=card.is_dry)


def decode_grid(card: Card) -> Iterator[Row]:
    """One-token sequences: bytes of keys and values a second, the combination included."""
    import numpy as np

    full = [
        (num_seqs, kv_len, head_dim, page_size, dtype)
        for head_dim, page_size, dtype in ((128, 16, "bfloat16"), (128, 64, "bfloat16"), (64, 16, "bfloat16"), (128, 64, "float8_e4m3fn"))
        for num_seqs, kv_len in ((1, 32768), (1, 2048), (32, 512), (32, 2048), (32, 8192), (64, 2048), (256, 512), (256, 2048))
    ]
    kv_heads = 2 if card.is_dry else 8
    for num_seqs, kv_len, head_dim, page_size, dtype in [(2, 40, 64, 8, "bfloat16")] if card.is_dry else full:
        for implementation in ("xla",) if card.is_dry else ("mosaic_gpu", "xla"):
            if not card.has_time():
                return (yield skipped("decode"))
            seconds = attend(card, implementation, num_seqs, 1, kv_len, head_dim, page_size, dtype)
            itemsize = 1 if dtype.startswith("float8") else np.dtype(np.float16).itemsize
            rate = 2 * num_seqs * kv_len * kv_heads * head_dim * itemsize / seconds
            # A copy's bytes are read and written, and a walk's are read only: both are what memory moves.
            share = rate / card.copy_bytes_per_s if card.copy_bytes_per_s else None
            words = f"{implementation} batch {num_seqs} context {kv_len} dim {head_dim} page {page_size} {dtype}"
            yield Row("decode", words, rate, "B/s", share)


def prefill_grid(card: Card) -> Iterator[Row]:
    """Longer spans: operations that causality asks for, a second."""
    heads = 4 if card.is_dry else 32
    for q_len, kv_len, head_dim in (
        [(12, 40, 64)] if card.is_dry else [(2048, 2048, 128), (2048, 8192, 128), (2048, 8192, 64), (512, 32768, 128)]
    ):
        for implementation in ("xla",) if card.is_dry else ("mosaic_gpu", "xla"):
            if not card.has_time():
                return (yield skipped("prefill"))
            seconds = attend(card, implementation, 1, q_len, kv_len, head_dim, 8 if card.is_dry else 64, "bfloat16")
            positions = q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2
            rate = 4 * heads * head_dim * positions / seconds
            share = rate / card.flops_per_s if card.flops_per_s else None
            yield Row("prefill", f"{implementation} {q_len} of {kv_len} dim {head_dim}", rate, "op/s", share)


def engine(card: Card) -> Iterator[Row]:
    """The engine on random weights shaped like Llama 3 8B: tokens a second by the number of requests, and the time to a first token."""
    from jaxpaged.config import CacheConfig, CompilationConfig, Config, KernelsConfig, LogConfig, ModelConfig, SchedulerConfig
    from jaxpaged.llm import LLM
    from jaxpaged.request import SamplingParams

    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128_256}
    if card.is_dry:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 384}
    hf = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 8192}
    kernels = KernelsConfig() if card.is_dry else KernelsConfig(paged_attention="mosaic_gpu", kv_write="mosaic_gpu")
    prompt_tokens, answer_tokens = (8, 4) if card.is_dry else (512, 128)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf | sizes), encoding="utf-8")
        config = Config(
            model=ModelConfig(model=folder, load_format="dummy", max_model_len=64 if card.is_dry else 2048, max_kept_weights=0),
            cache=CacheConfig(page_size=16 if card.is_dry else 64, memory=2**20 if card.is_dry else None),
            scheduler=SchedulerConfig(max_num_seqs=4 if card.is_dry else 256, max_num_batched_tokens=16 if card.is_dry else 2048),
            compilation=CompilationConfig(cache_dir="", token_buckets=(4, 16) if card.is_dry else (16, 64, 256, 2048)),
            log=LogConfig(level="error"),
            kernels=kernels,
        )
        with LLM(config=config, sinks=[]) as llm:
            for concurrency in (1, 3) if card.is_dry else (1, 16, 64, 256):
                if not card.has_time():
                    return (yield skipped("engine"))
                params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
                # Prompts that share no page.
                prompts = [
                    {"prompt_token_ids": [1 + (7 * row + place) % 300 for place in range(prompt_tokens)]} for row in range(concurrency)
                ]
                start = time.perf_counter()
                outputs = llm.generate(prompts, params)
                seconds = time.perf_counter() - start
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                yield Row("engine", f"{concurrency} requests of {prompt_tokens} + {answer_tokens} tokens", tokens / seconds, "tokens/s")
            first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": [9] * prompt_tokens}], first)
            yield Row("engine", f"first token of {prompt_tokens} tokens", time.perf_counter() - start, "s")


PARTS = (
    copy_rate,
    matmul_rate,
    write_numerics,
    attention_numerics,
    matmul_numerics,
    decode_grid,
    prefill_grid,
    triton,
    torch_attention,
    flex_attention,
    ragged_dot,
    engine,
    transformers,
)


def run_parts(parts: Any, card: Card) -> tuple[list[Row], dict[str, str]]:
    """Rows of all parts, and the faults of those that failed."""
    rows: list[Row] = []
    faults = {}
    for part in parts:
        try:
            for row in part(card) if card.has_time() else (skipped(part.__name__),):
                share = "" if row.share is None else f"{100 * row.share:6.1f} %"
                print(f"{row.part:20} {row.case:60} {row.value:12.4g} {row.unit:10} {share}", flush=True)
                rows.append(row)
                if part is copy_rate:
                    card = card._replace(copy_bytes_per_s=row.value)
                elif part is matmul_rate:
                    card = card._replace(flops_per_s=row.value)
        except Exception as error:
            traceback.print_exc()
            faults[part.__name__] = f"{type(error).__name__}: {error}"[:500]
            print(f"{part.__name__:20} FAILED: {faults[part.__name__]}", flush=True)
    return rows, faults


def unpack(wheels: Path) -> str:
    """A folder with what is in the wheels: compiled modules cannot be loaded from within them."""
    folder = tempfile.mkdtemp()
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels to take packages from")
    parser.add_argument("--seconds", type=float, default=360.0, help="no new case is begun after them")
    parser.add_argument("--dry-run", action="store_true", help="every part on the CPU, with tiny sizes")
    parser.add_argument("--only", default="", help="only parts whose name holds this")
    args = parser.parse_args()
    begun = time.monotonic()
    # Behind what is installed: jax and numpy stay the machine's own.
    sys.path += [unpack(args.wheels)] if args.wheels else []
    sys.path.insert(0, str(ROOT))
    import jax

    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        print("there is no GPU here that jax can use; --dry-run runs every part on the CPU with tiny sizes")
        return 2
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}")
    parts = [part for part in PARTS if args.only in part.__name__]
    rows, faults = run_parts(parts, Card(args.dry_run, begun + args.seconds))
    summary = {"device": device.device_kind, "jax": jax.__version__, "is_dry": args.dry_run, "seconds": round(time.monotonic() - begun, 1)}
    print(json.dumps(summary | {"failed": faults, "rows": [row._asdict() for row in rows]}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
