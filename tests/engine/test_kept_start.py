"""A second start of a model: its weights are mapped, nothing is traced, and what is not needed is not imported."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import model_source
from jaxpaged.config import ModelConfig
from jaxpaged.loading.sources import resolve
from jaxpaged.model_runner import ModelRunner
from jaxpaged.model_source import ModelSource
from jaxpaged.start import Started
from jaxpaged.step_program import LoadedModel, StepProgram
from jaxpaged.traced_programs import TracedPrograms
from tests.engine.conftest import live_bytes
from tests.fakes import Bench
from tests.tiny_engine import start_tiny
from tests.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.jax

ROOT = Path(__file__).parent.parent.parent
PROMPT = [30, 31, 32, 33, 34]
PARAMS: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True}


class Loads:
    """Loads of a model in a cache folder of their own; counts conversions."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.num_converted = 0
        self.open: list[Started] = []

    def start(self, **changes: Any) -> Started:
        """A whole engine."""
        started = start_tiny(self.folder, programs=self.programs, token_buckets=(16,), max_num_batched_tokens=16, **changes)
        self.open.append(started)
        return started

    def load(self, **options: Any) -> LoadedModel:
        """The model alone."""
        config = ModelConfig(model=str(self.folder), **options)
        source = ModelSource(resolve(config), config, is_gpu=False, num_threads=2)
        source.read_ahead()
        return source.load()


@pytest.fixture
def loads(tiny_folder: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    monkeypatch.setenv("JAXPAGED_HOME", str(tmp_path / "home"))
    loads = Loads(tiny_folder, programs)
    convert = model_source.convert_weights

    def count_and_convert(*args: Any, **kwargs: Any) -> Any:
        loads.num_converted += 1
        return convert(*args, **kwargs)

    monkeypatch.setattr(model_source, "convert_weights", count_and_convert)
    yield loads
    for started in loads.open:
        started.engine.close()


def runner_of(started: Started) -> ModelRunner:
    assert isinstance(started.engine.runner, ModelRunner)
    return started.engine.runner


def weights(model: LoadedModel) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()) for leaf in model.params]


def answer(started: Started) -> list[int]:
    bench = Bench(runner_of(started), started.intake.tokenizer, canary_tokens=4)
    return list(bench.ask(PROMPT, **PARAMS).outputs[0].token_ids)


def kept_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "derived").rglob("weights-*.bin"))


def test_a_second_start_gives_the_same_bits_facts_and_answers(loads: Loads) -> None:
    first, second = loads.start(), loads.start()
    assert loads.num_converted == 1
    one, other = runner_of(first), runner_of(second)
    assert weights(one._model) == weights(other._model)
    assert one._model.facts == other._model.facts
    assert one._step._fixed == other._step._fixed
    assert first.intake.eos_token_ids == second.intake.eos_token_ids
    assert first.intake.default_params == second.intake.default_params
    assert answer(first) == answer(second)
    # The structure is made when something must be traced.
    assert other._model.config == one._model.config
    texts = [
        StepProgram(runner._model, runner.cache_shape, num_ids=300, traced=TracedPrograms(None)).lower(runner.layouts[0]).as_text()
        for runner in (one, other)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "float32", "quantization": "int8"},
        {"dtype": "float32", "quantization": "int4"},
    ],
)
def test_on_a_cpu_the_mapped_file_is_the_devices_buffer(loads: Loads, tmp_path: Path, options: dict[str, str]) -> None:
    first, second = loads.load(**options), loads.load(**options)
    assert loads.num_converted == 1
    assert weights(first) == weights(second)
    (kept,) = kept_files(tmp_path)
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(kept))]
    for leaf in second.params:
        assert any(int(start, 16) <= leaf.unsafe_buffer_pointer() < int(end, 16) for start, end in mapped), "a copy"


def test_another_dtype_and_another_model_are_converted(loads: Loads, tmp_path: Path) -> None:
    first = weights(loads.load(dtype="float32"))
    loads.load(dtype="bfloat16")
    assert loads.num_converted == 2
    loads.load(dtype="float32", max_model_len=32)
    assert loads.num_converted == 2, "weights do not depend on the context"
    quantized = loads.load(dtype="float32", quantization="int8")
    assert loads.num_converted == 3
    assert quantized.weight_bytes < 0.5 * loads.load(dtype="float32").weight_bytes
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in loads.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    loads.folder = copy
    assert weights(loads.load(dtype="float32")) == first
    assert loads.num_converted == 4
    (copy / "config.json").write_bytes((copy / "config.json").read_bytes() + b"\n")
    loads.load(dtype="float32")
    assert loads.num_converted == 5


def test_damaged_weights_are_converted_anew_and_mended(loads: Loads, tmp_path: Path) -> None:
    first = weights(loads.load())
    (kept,) = kept_files(tmp_path)
    content = kept.read_bytes()
    for damaged in (content[:-1], content[:100] + bytes([content[100] ^ 1]) + content[101:]):
        kept.write_bytes(damaged)
        assert weights(loads.load()) == first
        assert kept.read_bytes() == content
    assert loads.num_converted == 3


def test_switched_off_nothing_is_kept(loads: Loads, tmp_path: Path) -> None:
    for _ in range(2):
        loads.load(max_kept_weights=0)
    assert loads.num_converted == 2
    assert kept_files(tmp_path) == []


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("fate", ["kept", "gone"])
def test_mapped_weights_sleep_and_wake_up(loads: Loads, tmp_path: Path, level: int, fate: str) -> None:
    loads.start().engine.close()
    before = live_bytes()
    started = loads.start()
    runner = runner_of(started)
    expected, bits, loaded = answer(started), weights(runner._model), live_bytes()
    if fate == "gone":
        (kept,) = kept_files(tmp_path)
        kept.unlink()
    runner.sleep(keeps_weights=level == 1)
    assert live_bytes() == before
    runner.wake_weights()
    runner.wake_pool()
    assert weights(runner._model) == bits
    assert answer(started) == expected
    assert live_bytes() == loaded
    assert loads.num_converted == 1 + (level == 2 and fate == "gone")


SECOND_STARTS = """
import json, sys
from pathlib import Path
import jax
from jaxpaged.programs import COMPILE_EVENT
from tests.tiny_engine import start_tiny
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
counts = []
for path in sys.argv[2:]:
    started = start_tiny(Path(path), programs=Path(sys.argv[1]), token_buckets=(16,), max_num_batched_tokens=16)
    started.engine.close()
    counts.append(compiled.count(COMPILE_EVENT))
print(json.dumps({"modules": sorted(sys.modules), "num_compiled": counts}))
"""
ONLY_FOR_FIRST_STARTS = {"transformers", "gguf", "orbax", "flax", "optax", "treescope", "huggingface_hub", "safetensors", "torch"}


def test_a_second_start_imports_nothing_that_only_loads_converts_or_traces(loads: Loads, tmp_path: Path) -> None:
    """As a process of its own sees it, which starts a folder and a GGUF file that were started before.

    Nor does it compile, or fetch, more than the buckets' programs and the one that writes a slot.
    """
    loads.start()
    tiny_folder, loads.folder = loads.folder, tmp_path / "tiny.gguf"
    write_tiny_gguf(loads.folder)
    loads.start()
    done = subprocess.run(
        [sys.executable, "-c", SECOND_STARTS, str(loads.programs), str(tiny_folder), str(loads.folder)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    told = json.loads(done.stdout.splitlines()[-1])
    modules = set(told["modules"])
    assert "jax" in modules
    assert modules & ONLY_FOR_FIRST_STARTS == set()
    assert told["num_compiled"] == [2, 4]
