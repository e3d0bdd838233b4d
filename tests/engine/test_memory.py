"""How large the page pool becomes, what it is made of, and that all memory comes back."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.config import GIB, MIB, CacheConfig
from jaxpaged.errors import MemoryBudgetError
from jaxpaged.kv_cache import CPU_POOL_BYTES, DTYPES, CacheShape, DeviceMemory, count_pages, zeros
from jaxpaged.models import llama
from jaxpaged.start import Started
from jaxpaged.step_program import StepProgram
from jaxpaged.traced_programs import TracedPrograms
from tests.engine.conftest import live_bytes, tiny_bench
from tests.event_log import EventLog
from tests.fakes import Bench
from tests.tiny_engine import start_tiny
from tests.tiny_model import save_safetensors, write_tiny_llama

pytestmark = pytest.mark.jax

SMOLLM2 = CacheShape(layers=30, kv_heads=3, head_dim=64, page_size=16, dtype=np.dtype(np.float32))
MANY = 10**9


def pages(cache: CacheConfig | None = None, **options: Any) -> int:
    return count_pages(
        cache or CacheConfig(), SMOLLM2, **{"least_pages": 1, "most_pages": MANY, "device": None, "temporary_bytes": 0, **options}
    )


def test_bytes_of_a_page() -> None:
    assert SMOLLM2.page_bytes == 2 * 30 * 3 * 16 * 64 * 4
    sizes = {name: SMOLLM2._replace(dtype=dtype).page_bytes for name, dtype in DTYPES.items()}
    assert sizes == {"f32": 737_280, "bf16": 368_640, "f16": 368_640, "fp8_e4m3": 184_320}


def test_the_budget_of_the_pool() -> None:
    """An explicit budget is taken to the last page; on CPU the default is fixed, and never more than can be of use."""
    assert pages(CacheConfig(memory=10 * SMOLLM2.page_bytes)) == 10
    assert pages(CacheConfig(memory=10 * SMOLLM2.page_bytes - 1)) == 9
    assert pages(CacheConfig(memory=2 * SMOLLM2.page_bytes)) == 2
    assert pages() == CPU_POOL_BYTES // SMOLLM2.page_bytes == 728
    assert pages(most_pages=100) == 101
    assert pages(CacheConfig(memory=1 * GIB), most_pages=100) == GIB // SMOLLM2.page_bytes


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_pool_takes_memory_as_it_is_used() -> None:
    """Zeros that nobody wrote over are nobody's pages, and zeros all the same; what is written stays, in the same buffer."""
    before = resident_bytes()
    pool = zeros((128, MIB), np.dtype(np.int8))
    assert resident_bytes() - before < 32 * MIB
    address = pool.unsafe_buffer_pointer()
    pool = jax.jit(lambda pool: pool.at[7, 3:MIB].set(5), donate_argnums=0)(pool)
    assert pool.unsafe_buffer_pointer() == address
    assert resident_bytes() - before < 96 * MIB  # with the program that was compiled
    assert int((np.asarray(pool) == 5).sum()) == MIB - 3
    assert int((np.asarray(pool) != 0).sum()) == MIB - 3


def test_the_budget_on_an_accelerator() -> None:
    """Limit - what is in use (the weights) - the largest step's temporaries - 3 % of the limit."""
    device = DeviceMemory(limit_bytes=80 * GIB, in_use_bytes=16 * GIB)
    free = 80 * GIB - 16 * GIB - 2 * GIB - int(0.03 * 80 * GIB)
    assert pages(device=device, temporary_bytes=2 * GIB) == free // SMOLLM2.page_bytes
    assert pages(CacheConfig(memory=GIB), device=device) == GIB // SMOLLM2.page_bytes
    assert pages(device=device, most_pages=100) == 101


@pytest.mark.parametrize(
    ("cache", "device", "temporary_bytes"),
    [
        (CacheConfig(memory=1), None, 0),
        (CacheConfig(memory=2 * SMOLLM2.page_bytes - 1), None, 0),
        (CacheConfig(), DeviceMemory(8 * GIB, 8 * GIB), 0),
        (CacheConfig(), DeviceMemory(8 * GIB, 4 * GIB), 4 * GIB),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_both_numbers(
    cache: CacheConfig, device: DeviceMemory | None, temporary_bytes: int
) -> None:
    with pytest.raises(MemoryBudgetError, match=rf"the page pool gets \d+ bytes and one page needs {SMOLLM2.page_bytes}.*cache\.memory"):
        pages(cache, device=device, temporary_bytes=temporary_bytes)


def test_a_pool_that_does_not_fit_leaves_nothing_behind(tiny_folder: Path, programs: Path) -> None:
    before = live_bytes()
    with pytest.raises(MemoryBudgetError):
        start_tiny(tiny_folder, programs=programs, memory=100)
    assert live_bytes() == before


ONE_BUCKET = {"token_buckets": (16,), "max_num_batched_tokens": 16}


@pytest.mark.parametrize(("dtype", "least_equal"), [("f32", 1.0), ("bf16", 0.85), ("f16", 0.95), ("fp8_e4m3", 0.5)])
def test_every_cache_dtype_answers(tiny: Started, tiny_folder: Path, programs: Path, dtype: str, least_equal: float) -> None:
    """First tokens after prompts of 30 that are read back through the cache, against the float32 pool's; 0.3 % agree by chance."""
    prompts = [[3 + (index * 31 + position * 7) % 380 for position in range(30)] for index in range(60)]
    expected = tiny_bench(tiny)
    expected_ids = [expected.add(prompt, max_tokens=1) for prompt in prompts]
    expected.run()
    started = start_tiny(tiny_folder, programs=programs, cache_dtype=dtype, **ONE_BUCKET)
    assert started.engine.runner.pool.k.dtype == DTYPES[dtype]
    bench = Bench(started.engine.runner, started.intake.tokenizer, eos_token_ids=started.intake.eos_token_ids)
    ids = [bench.add(prompt, max_tokens=1) for prompt in prompts]
    bench.run()
    equal = sum(bench.ids(own)[0] == expected.ids(other)[0] for own, other in zip(ids, expected_ids, strict=True))
    assert equal / len(prompts) >= least_equal
    bench.after_check()
    started.engine.close()


def test_values_too_large_for_fp8_are_bounded(tmp_path: Path, programs: Path) -> None:
    """They would become NaN, which then spreads over the whole answer."""
    weights = write_tiny_llama(tmp_path)
    for name, array in weights.items():
        if "v_proj" in name:
            array *= 1e4
    save_safetensors(tmp_path / "model.safetensors", weights)
    started = start_tiny(tmp_path, programs=programs, cache_dtype="fp8_e4m3", **ONE_BUCKET)
    bench = Bench(started.engine.runner, started.intake.tokenizer)
    answer = bench.ask([5, 6, 7] * 20, max_tokens=20)
    assert answer.error is None
    assert len(answer.outputs[0].token_ids) == 20
    started.engine.close()


def test_max_model_len_auto_is_what_the_pool_holds(tiny_folder: Path, programs: Path) -> None:
    num_pages, expected = 11, 160
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    log = EventLog()
    started = start_tiny(tiny_folder, programs=programs, sinks=[log], max_model_len="auto", memory=num_pages * page_bytes, **ONE_BUCKET)
    (ready,) = log.of(events.EngineStarted)
    assert (ready.max_model_len, ready.num_pages, ready.pool_bytes) == (expected, num_pages, num_pages * page_bytes)
    bench = Bench(started.engine.runner, started.intake.tokenizer)
    # The longest prompt that is taken runs, and the longest answer ends at the context.
    assert len(bench.ask([5] * (expected - 1), max_tokens=None).outputs[0].token_ids) == 1
    assert len(bench.ask([5], max_tokens=None).outputs[0].token_ids) == expected - 1
    bench.after_check()
    started.engine.close()


def test_two_engines_in_one_process(tiny: Started, tmp_path: Path, programs: Path) -> None:
    """Their steps alternate, their counts stay apart, and closing one leaves the other."""
    write_tiny_llama(tmp_path, seed=1)
    before = live_bytes()
    log = EventLog()
    other = start_tiny(tmp_path, programs=programs, sinks=[log])
    benches = [tiny_bench(tiny), Bench(other.engine.runner, other.intake.tokenizer, eos_token_ids=other.intake.eos_token_ids)]
    prompts = [[3 + index, 50, 60] * (1 + index % 9) for index in range(20)]
    expected = []
    for bench in benches:
        ids = [bench.add(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
        bench.run()
        expected.append([bench.ids(request_id) for request_id in ids])
    assert expected[0] != expected[1]
    ids_of = [[bench.add(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts] for bench in benches]
    while any(bench.engine.has_work for bench in benches):
        for bench in benches:
            bench.step()
    for bench, ids, answers in zip(benches, ids_of, expected, strict=True):
        assert [bench.ids(request_id) for request_id in ids] == answers
        bench.after_check()
    assert other.engine.runner.num_compiled_while_running == 0
    other.engine.close()
    assert live_bytes() == before
    ids = [benches[0].add(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    benches[0].run()
    assert [benches[0].ids(request_id) for request_id in ids] == expected[0]
    assert tiny.engine.runner.num_compiled_while_running == 0
    assert type(log[-1]) is events.EngineStopped


def state_bytes(runner: Any) -> int:
    """The pool, and the last id of every slot."""
    return runner.pool_bytes + runner.slot_bytes


def test_a_closed_engine_gives_its_arrays_back(tiny_folder: Path, programs: Path) -> None:
    """Exactly, and while somebody still holds the engine; in the middle of answers as well."""
    before = live_bytes()
    kept = []
    for round_index in range(2):
        started = start_tiny(tiny_folder, programs=programs, **ONE_BUCKET)
        kept.append(started)
        assert live_bytes() - before == state_bytes(started.engine.runner) + started.engine.runner._model.weight_bytes
        bench = Bench(started.engine.runner, started.intake.tokenizer)
        bench.add([5, 6, 7], max_tokens=20)
        bench.step()
        if round_index == 1:
            bench.run()
        started.engine.close()
        started.engine.close()
        assert live_bytes() == before


RSS_SCRIPT = """
import json, sys
from jaxpaged import LLM, SamplingParams
from jaxpaged.config import CacheConfig, CompilationConfig, Config, LogConfig, ModelConfig, SchedulerConfig

def rss_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

model, programs = sys.argv[1:]
config = Config(
    model=ModelConfig(model=model), cache=CacheConfig(memory=128 * 2**20), log=LogConfig(level="error"),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
    compilation=CompilationConfig(token_buckets=(16,), cache_dir=programs),
)
figures = []
for _ in range(3):
    llm = LLM(config=config)
    llm.generate([[5, 6, 7] * 20] * 8, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    opened = rss_bytes()
    llm.close()
    figures.append((opened, rss_bytes()))
print(json.dumps(figures))
"""


def test_memory_of_the_process_after_three_rounds(tmp_path: Path, programs: Path) -> None:
    """A model of 60 MB and a pool that uses a part of its 128 MB, opened and closed; the first round pays for libraries and programs."""
    write_tiny_llama(
        tmp_path, vocab_size=16_384, tokenizer_vocab_size=384, hidden=512, ffw=1024, heads=8, kv_heads=8, head_dim=64, layers=3
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", RSS_SCRIPT, str(tmp_path), str(programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    closed = [after for _, after in figures]
    assert all(after - closed[0] < 60 * MIB for after in closed), figures
    assert all(opened - after > 60 * MIB for opened, after in figures), figures


def test_a_layer_is_traced_once_per_program(tiny: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are (here two): unrolled, a start would take minutes."""
    num_traced = 0
    run_block = llama.Block.__call__

    def count_and_run(self: llama.Block, *args: Any) -> Any:
        nonlocal num_traced
        num_traced += 1
        return run_block(self, *args)

    monkeypatch.setattr(llama.Block, "__call__", count_and_run)
    runner = tiny.engine.runner
    step = StepProgram(runner._model, runner.cache_shape, num_ids=tiny.intake.tokenizer.vocab_size, traced=TracedPrograms(None))
    for layout in runner.layouts:
        step.lower(layout)
    assert num_traced == len(runner.layouts) == 3
    tiny_bench(tiny).ask([5, 6, 7, 8, 9, 10] * 9, max_tokens=30)
    assert num_traced == 3, "a step was traced again"


@pytest.mark.usefixtures("tiny")
def test_programs_are_counted_and_come_from_the_cache(tiny_folder: Path, tmp_path: Path) -> None:
    """A cold folder compiles, a warm one does not, after an engine with another folder as well; every program is an event before ready."""
    for from_cache in (False, True):
        log = EventLog()
        start_tiny(tiny_folder, programs=tmp_path, sinks=[log], **ONE_BUCKET).engine.close()
        assert [(event.bucket_tokens, event.from_cache, event.after_ready) for event in log.of(events.ProgramCompiled)] == [
            (16, from_cache, False)
        ]
        phases = [event.phase for event in log.of(events.PhaseChanged)]
        assert list(dict.fromkeys(phases)) == ["find", "load", "pool", "compile", "warm_up"]
        parts = {event.phase: (event.done, event.total) for event in log.of(events.PhaseChanged)}
        loads = [event.message.partition(" of ")[0] for event in log.of(events.PhaseChanged) if event.phase == "load"]
        assert [loads[1], loads[2]] == ["loading the tokenizer", "loading the weights"]
        assert parts["compile"] == parts["warm_up"] == (1, 1)
        messages = [event.message for event in log.of(events.PhaseChanged) if event.phase == "compile"]
        assert messages == ["compiling 0/1", f"compiling 1/1 ({int(from_cache)} from cache)"]
        assert [event.state for event in log.of(events.HealthChanged)] == ["starting", "ready"]
        order = [type(event) for event in log]
        assert order.index(events.ProgramCompiled) < order.index(events.EngineStarted) < len(order) - 1
