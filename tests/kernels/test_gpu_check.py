"""`scripts/gpu_check.py` without a GPU: every part in a dry run, a part that fails, and the engine with few packages."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
        "engine",
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

    rows, faults = script.run_parts((broken, whole), script.Card(True, 0.0))
    assert [row.case for row in rows] == ["first", "last"]
    assert faults == {"broken": "RuntimeError: no such instruction"}
    assert "broken               FAILED: RuntimeError: no such instruction" in capsys.readouterr().out


def test_numbers_that_are_missing_on_one_side_are_no_small_difference() -> None:
    script: Any = load_script("gpu_check")
    import numpy as np

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
