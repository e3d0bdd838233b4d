"""What the engine's tests share: one start of the real model, one of a tiny one, and the folder of their compiled programs."""

import contextlib
import fcntl
import gc
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import pytest

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import MIB, CacheConfig, CompilationConfig, Config, LogConfig, ModelConfig, SchedulerConfig
from jaxpaged.llm import LLM
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from tests.engine.async_bench import TIMEOUT_S, check_ends, is_idle
from tests.event_log import EventLog
from tests.fakes import Bench, Canary, NarrowRunner
from tests.quick_programs import quick_runners
from tests.text.vocabularies import byte_level
from tests.tiny_engine import start_tiny, tiny_config
from tests.tiny_model import write_tiny_llama

REAL_BUCKETS = (4, 32, 128)


def live_bytes() -> int:
    """Bytes of all arrays that jax keeps for anybody."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="session", autouse=True)
def quick_programs() -> Iterator[None]:
    """Compiling takes most of the seconds of these tests; the real model's programs, and kernels in their own tests, are users'."""
    with quick_runners():
        yield


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """Folder of compiled programs; it outlives the run, so that a second one compiles nothing."""
    cache = request.config.cache
    assert cache is not None
    return Path(cache.mkdir("programs"))


@contextlib.contextmanager
def compiling(programs: Path) -> Iterator[None]:
    """Of test processes that want the same programs, one compiles them, with all processors, and the others find them."""
    with programs.with_name("programs.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def real_llm(smollm2_path: Path, programs: Path) -> Iterator[LLM]:
    """SmolLM2 in float32: 272 usable pages of 16 tokens, contexts up to 512, steps of up to 128 tokens and 32 rows."""
    config = Config(
        model=ModelConfig(model=str(smollm2_path), max_model_len=512),
        cache=CacheConfig(memory=192 * MIB),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=REAL_BUCKETS[-1]),
        compilation=CompilationConfig(token_buckets=REAL_BUCKETS, cache_dir=str(programs), max_parallel=2),
        log=LogConfig(level="error"),
    )
    with compiling(programs):
        started = LLM(config=config, sinks=[])
    with started as llm:
        yield llm


@pytest.fixture(scope="session")
def real(real_llm: LLM) -> Started:
    """The same, for engines of one's own over its programs (`real_bench`)."""
    return Started(real_llm.engine, real_llm._intake)


@pytest.fixture(scope="session")
def real_canary(real: Started) -> Canary:
    """What the real model says at first, before any test has used it; short, because it is asked often."""
    return real_bench(real, canary_tokens=4).canary


@pytest.fixture(scope="session")
def long_real_canary(real: Started) -> Canary:
    """The same at full length."""
    return real_bench(real).canary


def real_bench(
    real: Started,
    *,
    canary: Canary | None = None,
    canary_tokens: int = 16,
    enable_prefix_caching: bool = True,
    max_in_flight: int | None = None,
    **narrow: Any,
) -> Bench:
    """An engine of its own over the real model's programs; `narrow` as for `NarrowRunner`."""
    return Bench(
        NarrowRunner(real.engine.runner, **narrow),
        real.intake.tokenizer,
        eos_token_ids=real.intake.eos_token_ids,
        enable_prefix_caching=enable_prefix_caching,
        max_in_flight=max_in_flight,
        canary=canary,
        canary_prompt="Once upon a time",
        canary_tokens=canary_tokens,
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with 384 ids and a context of 512."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path, programs: Path) -> Iterator[Started]:
    """The tiny Llama: 127 usable pages of 16 tokens, steps of up to 64 tokens and 8 rows."""
    with compiling(programs):
        started = start_tiny(tiny_folder, programs=programs)
    yield started
    started.engine.close()


def tiny_bench(tiny: Started, *, enable_prefix_caching: bool = True, **narrow: Any) -> Bench:
    """An engine of its own over the tiny model's programs; `narrow` as for `NarrowRunner`."""
    runner, eos = NarrowRunner(tiny.engine.runner, **narrow), tiny.intake.eos_token_ids
    return Bench(runner, tiny.intake.tokenizer, eos_token_ids=eos, enable_prefix_caching=enable_prefix_caching)


@pytest.fixture(scope="session")
def script_tokenizer() -> Tokenizer:
    """Ids 0-2 are control tokens (2 ends an answer), 3-258 the bytes, then some words."""
    return byte_level()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT means KeyboardInterrupt, also where the run was started with it ignored, as in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """No run-time type checks: for what users hand in against the annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def one_row_log() -> EventLog:
    """Events of the engine below."""
    return EventLog()


@pytest.fixture(scope="session")
def one_row_llm(tiny_folder: Path, programs: Path, one_row_log: EventLog) -> Iterator[LLM]:
    """A tiny engine that runs one request at a time, of up to 64 tokens, and lets four wait."""
    config = tiny_config(
        tiny_folder,
        programs=programs,
        token_buckets=(16,),
        max_num_batched_tokens=16,
        max_num_seqs=1,
        max_model_len=64,
        max_num_queued_requests=4,
    )
    with LLM(config=config, sinks=[one_row_log]) as llm:
        yield llm


@pytest.fixture(scope="session")
def async_log() -> EventLog:
    """Events of the engines below."""
    return EventLog()


@pytest.fixture(scope="session")
def shared_async_llm(tiny_folder: Path, programs: Path, async_log: EventLog) -> Iterator[AsyncLLM]:
    """A tiny engine with a thread of its own."""
    with AsyncLLM(
        config=tiny_config(tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16), sinks=[async_log]
    ) as llm:
        yield llm


@pytest.fixture
def async_llm(shared_async_llm: AsyncLLM, async_log: EventLog) -> Iterator[AsyncLLM]:
    """The shared engine at rest, which it must be again afterwards."""
    async_log.clear()
    yield shared_async_llm
    deadline = time.monotonic() + TIMEOUT_S
    while not is_idle(shared_async_llm) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_idle(shared_async_llm)
    assert shared_async_llm._thread.mailboxes == {}
    shared_async_llm._engine.scheduler.check()
    check_ends(async_log)


@pytest.fixture
def mortal(tiny_folder: Path, programs: Path, async_log: EventLog) -> Iterator[AsyncLLM]:
    """An engine of its own, for tests that close or kill it."""
    async_log.clear()
    llm = AsyncLLM(config=tiny_config(tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16), sinks=[async_log])
    yield llm
    llm.close()
    assert not llm._thread.is_alive
    assert llm._thread.mailboxes == {}
    assert is_idle(llm)
    check_ends(async_log)


@pytest.fixture(params=[1, 2], ids=["waits", "overlaps"])
def in_flight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps that benches start before they take in the oldest."""
    monkeypatch.setattr(Bench, "default_in_flight", request.param)
    return int(request.param)
