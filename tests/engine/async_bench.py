"""What the tests of `AsyncLLM` share."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.request import RequestOutput, SamplingParams
from tests.fakes import EventLog, FailingRunner

TIMEOUT_S = 30.0


def params(max_tokens: int = 10, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **fields})


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def run[T](work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine on a new loop; one that hangs is a failure."""

    async def timed() -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await work()

    return asyncio.run(timed())


def check_ends(log: EventLog) -> None:
    """Every request that was queued has ended, once."""
    finished = [event.request_id for event in log.of(events.RequestFinished)]
    assert sorted(finished) == sorted(event.request_id for event in log.of(events.RequestQueued))


def slow_down(llm: AsyncLLM, patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Makes every step take that much longer."""
    patch.setattr(llm._engine, "runner", FailingRunner(llm._engine.runner, before=lambda _: time.sleep(seconds)))


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def is_idle(llm: AsyncLLM) -> bool:
    return not llm._engine.has_work and llm._engine.pages.num_in_use == 0


def num_steps(log: EventLog) -> int:
    return len(log.of(events.StepFinished))
