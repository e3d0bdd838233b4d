"""A real `AsyncLLM` over a scripted device, for servers under test: it says letters, as slowly as wished, and can be made to fail."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from jaxpaged import async_llm, events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.clocks import REAL_CLOCKS
from jaxpaged.config import Config
from jaxpaged.engine import Engine
from jaxpaged.intake import Intake
from jaxpaged.model_runner import Runner
from jaxpaged.sinks import FanOut
from jaxpaged.start import Started
from tests.fakes import FailingRunner, ScriptRunner
from tests.text.vocabularies import byte_level

LETTER_A = 3 + ord("a")


def letters(history: tuple[int, ...]) -> int:
    """a, b, c, ... by position."""
    return LETTER_A + len(history) % 26


def start_scripted(config: Config, sinks: Sequence[events.Sink], *, make_runner: Callable[[Config], Runner]) -> Started:
    """Stands in for `start_engine`: the same events, and an engine over the device."""
    emit, tokenizer = FanOut(sinks), byte_level()
    emit(events.HealthChanged(time_s=time.time(), state="starting"))
    for phase, done, total in (("find", 0, 0), ("load", 0, 0), ("compile", 0, 2), ("compile", 2, 2), ("warm_up", 1, 1)):
        emit(events.PhaseChanged(time_s=time.time(), phase=phase, message=f"{phase} {done} of {total}", done=done, total=total))
    runner = make_runner(config)
    engine = Engine(runner, tokenizer, policy=config.scheduler, sink=emit, clocks=REAL_CLOCKS)
    intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset({2}), vocab=runner.vocab, seed=0)
    limits = runner.limits
    emit(
        events.EngineStarted(
            time_s=time.time(),
            model=config.model.model,
            dtype="float32",
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            pool_bytes=2**20,
            weight_bytes=3 * 2**19,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            seconds=0.25,
            num_programs=2,
        )
    )
    emit(events.HealthChanged(time_s=time.time(), state="ready"))
    return Started(engine, intake)


def script_runner(_: Config) -> ScriptRunner:
    """512 tokens of context, 8 sequences at once."""
    return ScriptRunner(letters, vocab=byte_level().vocab_size)


def slow_runner(seconds: float) -> Callable[[Config], Runner]:
    """Each step takes so long."""
    return lambda config: FailingRunner(script_runner(config), before=lambda _: time.sleep(seconds))


@contextmanager
def scripted_engines(make_runner: Callable[[Config], Runner] = script_runner) -> Iterator[None]:
    """Inside, every `AsyncLLM` that is made runs on such a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "start_engine", lambda config, sinks, leader=None: start_scripted(config, sinks, make_runner=make_runner))
        yield


def scripted_llm(config: Config, sinks: Sequence[events.Sink], make_runner: Callable[[Config], Runner] = script_runner) -> AsyncLLM:
    """One of them."""
    with scripted_engines(make_runner):
        return AsyncLLM(config=config, sinks=sinks)
