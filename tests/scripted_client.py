"""SCRIPT and FAIL behind the front doors: an `AsyncLLM` or `LLM` over a runner of `tests/fakes.py`, for tests of the doors and the server.

    runner = ScriptRunner(follow({(5, 6): [10, 11, 12]}), vocab=tokenizer.vocab_size)
    with scripted_async_llm(runner, tokenizer, eos_token_ids=(2,)) as llm:
        ...

Everything but the model is real: intake, scheduler, pages, engine thread, detokenizer, events. `FailingRunner(runner, before=...)`
raises or sleeps in a step, and with `without_id=...` single rows come back without an id, as rows of NaN do.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from jaxpaged import async_llm, events, llm
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import Config
from jaxpaged.engine import Engine
from jaxpaged.intake import Intake
from jaxpaged.llm import LLM
from jaxpaged.model_runner import Runner
from jaxpaged.sinks import FanOut
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer

QUIET = Config()
"""The options of a scripted engine: what the runner does not decide, above all `scheduler`."""


@contextlib.contextmanager
def scripted_async_llm(
    runner: Runner,
    tokenizer: Tokenizer,
    *,
    eos_token_ids: Iterable[int] = (2,),
    generation_config: Mapping[str, Any] | None = None,
    config: Config = QUIET,
    sinks: Sequence[events.Sink] = (),
) -> Iterator[AsyncLLM]:
    """An `EngineClient` with an engine thread of its own; closed at the end.

    Args:
        runner: the device; its limits are those of the engine.
        tokenizer: the model's.
        eos_token_ids: end tokens of the model.
        generation_config: what unset sampling fields take.
        config: the sections `scheduler`, `cache` and `sampling` are used.
        sinks: take every event.
    """
    start = starter(runner, tokenizer, eos_token_ids=eos_token_ids, generation_config=generation_config or {})
    with mock.patch.object(async_llm, "start_engine", start):
        client = AsyncLLM(config=config, sinks=sinks)
    with client:
        yield client


@contextlib.contextmanager
def scripted_llm(
    runner: Runner,
    tokenizer: Tokenizer,
    *,
    eos_token_ids: Iterable[int] = (2,),
    generation_config: Mapping[str, Any] | None = None,
    config: Config = QUIET,
    sinks: Sequence[events.Sink] = (),
) -> Iterator[LLM]:
    """The same as an `LLM`."""
    start = starter(runner, tokenizer, eos_token_ids=eos_token_ids, generation_config=generation_config or {})
    with mock.patch.object(llm, "start_engine", start):
        client = LLM(config=config, sinks=sinks)
    with client:
        yield client


def starter(
    runner: Runner, tokenizer: Tokenizer, *, eos_token_ids: Iterable[int], generation_config: Mapping[str, Any]
) -> Callable[[Config, Sequence[events.Sink]], Started]:
    """What takes the place of `start_engine`: it builds over `runner` what `build_engine` builds over a model."""

    def start(config: Config, sinks: Sequence[events.Sink], leader: object = None) -> Started:
        assert leader is None
        intake = Intake(
            tokenizer,
            generation_config=generation_config,
            eos_token_ids=frozenset(eos_token_ids),
            vocab=runner.vocab,
            seed=config.model.seed,
            max_logprobs=config.sampling.max_logprobs,
            max_model_len=runner.limits.max_model_len,
        )
        engine = Engine(
            runner,
            tokenizer,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            max_in_flight=2 if config.scheduler.async_scheduling else 1,
            policy=config.scheduler,
            sink=FanOut(sinks),
        )
        return Started(engine, intake)

    return start
