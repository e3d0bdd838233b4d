"""`scripts/gpu_check.py` without a GPU: every part in a dry run, a part that fails, and the engine with few packages."""

import importlib.metadata
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.loaded_script import load_script

pytestmark = [pytest.mark.jax]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else (str(SCRIPT),)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.tier("kernels")
def test_every_part_runs_without_a_gpu() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    parts = {row["part"] for row in summary["rows"]}
    assert {part for part in parts if not part.startswith("numerics")} == {
        "copy",
        "matmul",
        "decode",
        "prefill",
        "triton",
        "torch",
        "flex",
        "ragged_dot",
        "engine",
        "transformers",
    }
    ops = {"kv_write", "attention", "quantized_matmul", "grouped_matmul"}
    assert {part for part in parts if part.startswith("numerics")} == {f"numerics {op}" for op in ops}
    assert all(row["value"] < 0.05 for row in summary["rows"] if row["unit"] == "difference")


@pytest.mark.tier("kernels")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = run()
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    assert done.stdout.startswith("there is no GPU here that jax can use")


def test_a_part_that_fails_is_reported_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    script: Any = load_script("gpu_check")

    def broken(card: Any) -> Any:
        yield script.Row("broken", "first", 1.0, "s")
        raise RuntimeError("no such instruction")

    def whole(card: Any) -> Any:
        yield script.Row("whole", "last", 2.0, "s")

    rows, faults = script.run_parts((broken, whole), script.Card(True, math.inf))
    assert [row.case for row in rows] == ["first", "last"]
    assert faults == {"broken": "RuntimeError: no such instruction"}
    assert "broken               FAILED: RuntimeError: no such instruction" in capsys.readouterr().out


def test_each_implementation_that_takes_a_case_here_is_compared() -> None:
    """Told to be a card, a CPU has the implementations that a CPU has, and takes them through the same loops."""
    script: Any = load_script("gpu_check")
    from pallas_kernels.paged_attention import OP, cases

    case = next(case for case in cases.CASES if case.name == "sinks")
    operands = jax.tree.map(jnp.asarray, cases.make(case))
    options = {**cases.options(case), "layer": None, "group": None}
    assert [name for name, _ in script.able(OP, operands, options)][0] == "xla"
    assert "reference" not in dict(script.able(OP, operands, options))
    assert script.able(OP, {**operands, "sinks": operands["sinks"][:1]}, options) == []


def test_what_there_is_no_time_for_is_said() -> None:
    script: Any = load_script("gpu_check")
    rows, faults = script.run_parts((script.decode_grid,), script.Card(True, 0.0))
    assert [(row.part, row.unit) for row in rows] == [("decode_grid", "skipped")]
    assert [(row.part, row.unit) for row in script.decode_grid(script.Card(False, 0.0))] == [("decode", "skipped")]
    assert faults == {}


def test_numbers_that_are_missing_on_one_side_are_no_small_difference() -> None:
    script: Any = load_script("gpu_check")
    one, other = np.array([1.0, np.nan]), np.array([1.5, np.nan])
    assert script.largest_difference(np.asarray, (one,), (other,)) == 0.5
    assert script.largest_difference(np.asarray, (one,), (np.array([1.0, 2.0]),)) == float("inf")


def test_torch_is_compared_with_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    script: Any = load_script("gpu_check")
    card = script.Card(True, 0.0, copy_bytes_per_s=1e9)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [row.case for row in script.torch_attention(card)] == ["torch is not there"]

    asked: list[Any] = []

    def attend(q: Any, k: Any, v: Any, *, enable_gqa: bool) -> Any:
        asked.append((q.shape, k.shape, v.shape, enable_gqa))
        return q

    functional = SimpleNamespace(scaled_dot_product_attention=attend)
    fake = SimpleNamespace(bfloat16="bfloat16", nn=SimpleNamespace(functional=functional))
    fake.randn = lambda *shape, dtype, device: SimpleNamespace(shape=shape)
    monkeypatch.setitem(sys.modules, "torch", fake)
    (row,) = script.torch_attention(card)
    assert row.case == "SDPA batch 2 context 16 dim 64"
    assert row.share == row.value / 1e9
    assert set(asked) == {((2, 32, 1, 64), (2, 8, 16, 64), (2, 8, 16, 64), True)}


def test_flex_attention_and_transformers_are_compared_with_where_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins: the real ones are in no environment of ours."""
    script: Any = load_script("gpu_check")
    card = script.Card(True, math.inf, copy_bytes_per_s=1e9, flops_per_s=1e12)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [row.case for row in script.flex_attention(card)] == ["torch's flex attention is not there"]
    assert [row.case for row in script.transformers(card)] == ["torch or transformers is not there"]

    asked: list[Any] = []
    flex = ModuleType("torch.nn.attention.flex_attention")
    flex.flex_attention = lambda q, k, v, *, block_mask, enable_gqa: asked.append((q.shape, k.shape, block_mask, enable_gqa))  # type: ignore[attr-defined]
    flex.create_block_mask = lambda mod, b, h, q, kv, *, device: (mod(0, 0, 3, 3), mod(0, 0, 3, 4), q, kv)  # type: ignore[attr-defined]
    torch = MagicMock(compile=lambda run, dynamic: run)
    torch.randn = lambda *shape, dtype, device: SimpleNamespace(shape=shape)
    torch.full = lambda shape, number, device: np.full(shape, number)
    torch.ones_like = np.ones_like
    library = MagicMock()
    generate = library.AutoModelForCausalLM.from_config.return_value.eval.return_value.generate
    generate.side_effect = lambda *, input_ids, max_new_tokens, **_: np.zeros((len(input_ids), input_ids.shape[1] + max_new_tokens))
    for name, module in (("torch", torch), ("torch.nn", torch.nn), ("torch.nn.attention", torch.nn.attention), (flex.__name__, flex)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformers", library)
    decode, prefill = script.flex_attention(card)
    assert (decode.share, prefill.share) == (decode.value / 1e9, prefill.value / 1e12)
    mask = (True, False, 128, 128)
    assert set(asked) == {((2, 32, 1, 64), (2, 8, 16, 64), None, True), ((1, 32, 128, 64), (1, 8, 128, 64), mask, True)}
    assert [row.case for row in script.transformers(card)] == ["1 requests of 8 + 4 tokens", "3 requests of 8 + 4 tokens"]
    assert all(row.value > 0 for row in script.transformers(card))


def needed_by(*names: str) -> set[str]:
    """The packages and all that they need, by their names in lower case with dashes."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        waiting += [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line]
    return found


WITHOUT = """
import importlib.abc, json, runpy, sys

class Refuses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

refused = set(json.loads(sys.argv.pop(1)))
sys.meta_path.insert(0, Refuses())
sys.argv = ["gpu_check.py", "--dry-run", "--only", "engine"]
sys.path.insert(0, "scripts")
runpy.run_path("scripts/gpu_check.py", run_name="__main__")
"""


@pytest.mark.tier("system")
def test_the_engine_answers_with_jax_flax_numpy_and_the_bundle_alone() -> None:
    bundle: Any = load_script("make_gpu_bundle")
    allowed = needed_by("jax", "flax", "numpy") | set(bundle.PACKAGES) | {"jaxpaged"}
    refused = [
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", package).lower() for package in packages} & allowed
    ]
    assert {"transformers", "huggingface_hub", "litestar", "gguf"} <= set(refused)
    done = run(json.dumps(refused), code=WITHOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    assert len(summary["rows"]) == 3


def test_the_bundle_takes_its_packages_from_the_lock() -> None:
    bundle: Any = load_script("make_gpu_bundle")
    lock = (ROOT / "requirements" / "base.lock").read_text(encoding="utf-8")
    lines = bundle.locked(lock)
    assert [line.partition("==")[0] for line in lines.splitlines() if re.match(r"\w", line)] == list(bundle.PACKAGES)
    assert lines.count("--hash=") >= len(bundle.PACKAGES)
    with pytest.raises(ValueError, match="the lock does not have msgspec"):
        bundle.locked(lock.replace("msgspec==", "msgspecs=="))
