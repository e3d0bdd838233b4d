"""What the tests of `AsyncLLM` share."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.request import RequestOutput, SamplingParams
from tests.event_log import EventLog
from tests.fakes import FailingRunner

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


class Pace:
    """How an engine's device goes: every step takes `seconds` longer, and none begins while it is held."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._may_step, self._is_held = threading.Event(), threading.Event()
        self._may_step.set()

    def before(self, _: int) -> None:
        """Before each step."""
        if not self._may_step.is_set():
            self._is_held.set()
            assert self._may_step.wait(TIMEOUT_S)
        if self.seconds:
            time.sleep(self.seconds)

    async def hold(self) -> None:
        """Returns when the engine's thread stands before a step and the events of all steps that were taken in are there."""
        self._is_held.clear()
        self._may_step.clear()
        await wait_until(self._is_held.is_set)

    def let_go(self) -> None:
        """Ends that, and all slowness."""
        self.seconds = 0.0
        self._may_step.set()


def slow_down(llm: AsyncLLM, patch: pytest.MonkeyPatch, seconds: float) -> Pace:
    """Makes every step take that much longer, until it is let go."""
    pace = Pace()
    pace.seconds = seconds
    patch.setattr(llm._engine, "runner", FailingRunner(llm._engine.runner, before=pace.before))
    return pace


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def is_idle(llm: AsyncLLM) -> bool:
    return not llm._engine.has_work and llm._engine.pages.num_in_use == 0


def num_steps(log: EventLog) -> int:
    return len(log.of(events.StepFinished))
