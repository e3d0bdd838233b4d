"""Operators' calls of `AsyncLLM` that come to nothing: overruled, cancelled, or with arguments that mean nothing."""

import asyncio
import functools
from typing import Any

import numpy as np
import pytest

from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import EnginePausedError, InvalidRequestError
from tests.engine.async_bench import params, run, slow_down, wait_until

pytestmark = pytest.mark.jax


def test_resume_ends_the_waiting_of_a_pause(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody resumes while another waits for running requests: the pause returns, the sleep says that it came to nothing."""

    async def work() -> None:
        pace = slow_down(async_llm, monkeypatch, 0.02)
        task = asyncio.ensure_future(async_llm.generate("hello", params(200))._last())
        await wait_until(lambda: async_llm._engine.scheduler.num_running == 1)
        pausing = asyncio.ensure_future(async_llm.pause("wait"))
        sleeping = asyncio.ensure_future(async_llm.sleep(1, "wait"))
        await wait_until(lambda: async_llm._engine.scheduler.is_draining)
        await asyncio.sleep(0.02)
        assert not pausing.done()
        await async_llm.resume()
        await pausing
        with pytest.raises(EnginePausedError, match="resumed before"):
            await sleeping
        assert not task.done()
        pace.let_go()
        assert len((await task).outputs[0].token_ids) == 200

    run(work)


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_cancelled_wait_has_never_been(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    async def work() -> None:
        pace = slow_down(async_llm, monkeypatch, 0.02)
        task = asyncio.ensure_future(async_llm.generate("hello", params(100))._last())
        await wait_until(lambda: async_llm._engine.scheduler.num_running == 1)
        for turns in (0, 1, 20):
            pausing = asyncio.ensure_future(async_llm.sleep(1, "wait") if sleeps else async_llm.pause("wait"))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            pausing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pausing
            assert not await async_llm.is_paused()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(async_llm.sleep(1, "wait") if sleeps else async_llm.pause("wait"), 0.02)
        late = await async_llm.generate("late", params(3))
        assert not task.done(), "the pause was over before the running request was"
        assert len(late.outputs[0].token_ids) == 3
        pace.let_go()
        assert len((await task).outputs[0].token_ids) == 100

    run(work)


def test_a_cancelled_wait_leaves_the_pause_of_another(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        pace = slow_down(async_llm, monkeypatch, 0.02)
        task = asyncio.ensure_future(async_llm.generate("hello", params(60))._last())
        await wait_until(lambda: async_llm._engine.scheduler.num_running == 1)
        first, second = (asyncio.ensure_future(async_llm.pause("wait")) for _ in range(2))
        await wait_until(lambda: async_llm._engine.scheduler.is_draining)
        await asyncio.sleep(0.01)
        first.cancel()
        pace.let_go()
        await second
        assert len((await task).outputs[0].token_ids) == 60
        assert await async_llm.is_paused()
        await async_llm.resume()

    run(work)


def test_no_argument_of_an_operator_stops_the_engine(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused before it comes to the engine's thread, where an error of ours ends everything."""
    calls: Any = async_llm

    async def work() -> None:
        pace = slow_down(async_llm, monkeypatch, 0.02)
        task = asyncio.ensure_future(async_llm.generate("hello", params(100))._last())
        await wait_until(lambda: async_llm._engine.scheduler.num_running == 1)
        unusual = (5, 1.5, [["weights"]], [[]], object(), {1: 2}, np.arange(3), b"abort")
        made = [functools.partial(call, value) for value in unusual for call in (calls.wake_up, calls.pause, calls.sleep)]
        made += [functools.partial(calls.sleep, 1, value) for value in unusual]
        made += [functools.partial(calls.pause, "keep", clear_cache=value) for value in unusual]
        made += [functools.partial(calls.reset_prefix_cache, reset_running_requests=value) for value in unusual]
        for call in made:
            with pytest.raises(InvalidRequestError):
                await call()
        for value in unusual:
            with pytest.raises(InvalidRequestError, match="request_id is a string"):
                calls.abort(value)
        async_llm.check_health()
        assert not await async_llm.is_paused()
        pace.let_go()
        assert len((await task).outputs[0].token_ids) == 100

    run(work)
