"""`AsyncLLM` when tasks leave, when it is closed and when it dies: no request is left running, and no task waits for ever."""

import asyncio
import threading
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import EngineDeadError
from jaxpaged.request import FinishReason
from tests.engine.async_bench import TIMEOUT_S, is_idle, num_steps, params, run, slow_down, wait_until
from tests.event_log import EventLog
from tests.fakes import FailingRunner

pytestmark = pytest.mark.jax


LONG = params(400)


@pytest.mark.parametrize("how", ["cancel", "break", "aclose", "abort", "cancel_awaited", "timeout"])
def test_who_leaves_is_aborted_within_two_steps(
    async_llm: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def work() -> None:
        pace = slow_down(async_llm, monkeypatch, 0.02)
        stream = async_llm.stream("hello", LONG, request_id="mine")
        if how == "cancel":

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.ensure_future(read())
            await wait_until(lambda: num_steps(async_log) > 3)
            await pace.hold()
            before = num_steps(async_log)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "break":
            async for _ in stream:
                break
            await pace.hold()
            before = num_steps(async_log)
            await stream.aclose()  # type: ignore[attr-defined]
        elif how == "aclose":
            await anext(stream)
            await pace.hold()
            before = num_steps(async_log)
            await stream.aclose()  # type: ignore[attr-defined]
        elif how == "abort":
            await anext(stream)
            await pace.hold()
            before = num_steps(async_log)
            async_llm.abort("mine")
            pace.let_go()
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].finish_reason is FinishReason.ABORT
        elif how == "cancel_awaited":
            task = asyncio.ensure_future(async_llm.generate("hello", LONG)._last())
            await wait_until(lambda: num_steps(async_log) > 3)
            await pace.hold()
            before = num_steps(async_log)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            before = 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await async_llm.generate("hello", LONG)
            before = num_steps(async_log)
        pace.let_go()
        await wait_until(lambda: is_idle(async_llm))
        assert num_steps(async_log) - before <= 2
        assert [event.reason for event in async_log.of(events.RequestFinished)] == ["abort"]
        assert len((await async_llm.generate("hello", params(3))).outputs[0].token_ids) == 3

    run(work)


def test_an_iteration_that_is_dropped_is_aborted(async_llm: AsyncLLM, async_log: EventLog) -> None:
    """Without aclose: Python's own finalizer of async generators does it."""

    async def work() -> None:
        async for _ in async_llm.stream("hello", LONG):
            break
        await wait_until(lambda: is_idle(async_llm))
        assert [event.reason for event in async_log.of(events.RequestFinished)] == ["abort"]

    run(work)


def test_close_while_running_ends_everybody(mortal: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        slow_down(mortal, monkeypatch, 0.05)
        tasks = [asyncio.ensure_future(mortal.generate(f"number {index}", LONG)._last()) for index in range(12)]
        stream = mortal.stream("hello", LONG)
        await anext(stream)
        await asyncio.get_running_loop().run_in_executor(None, mortal.close)
        outputs = await asyncio.gather(*tasks)
        assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.ABORT}
        assert [output async for output in stream][-1].outputs[0].finish_reason is FinishReason.ABORT
        for call in (lambda: mortal.generate("a")._last(), lambda: anext(mortal.stream("a")), lambda: mortal.chat_prompt([])):
            with pytest.raises(EngineDeadError, match="closed"):
                await call()
        with pytest.raises(EngineDeadError, match="closed"):
            mortal.check_health()
        mortal.abort("nobody")
        mortal.close()
        mortal.shutdown()

    run(work)
    assert type(async_log[-1]) is events.EngineStopped


def test_closing_while_requests_arrive_leaves_no_one_waiting(mortal: AsyncLLM) -> None:
    """Each gets an end: an answer, an abort, or the error that it is closed."""

    async def work() -> None:
        async def ask(index: int) -> str:
            await asyncio.sleep(index * 0.0005)
            try:
                output = await mortal.generate(f"number {index}", params(30))
            except EngineDeadError as error:
                return error.message
            return str(output.outputs[0].finish_reason)

        tasks = [asyncio.ensure_future(ask(index)) for index in range(100)]
        await asyncio.sleep(0.02)
        closing = threading.Thread(target=mortal.close)
        closing.start()
        ends = await asyncio.gather(*tasks)
        closing.join(TIMEOUT_S)
        assert set(ends) <= {"length", "abort", "the engine is closed"}
        assert await ask(0) == "the engine is closed"

    run(work)


def broken_device(step: int) -> None:
    if step == 4:
        raise RuntimeError("the device is gone")


def broken_books(llm: AsyncLLM) -> None:
    """A bug in what the engine thread is told to do, apart from any step."""

    def add(_: Any) -> None:
        raise KeyError("a bug")

    llm._engine.add = add  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", ["device", "command"])
def test_the_engines_death_reaches_every_waiter(mortal: AsyncLLM, async_log: EventLog, fault: str) -> None:
    async def work() -> None:
        mortal.check_health()
        if fault == "device":
            mortal._engine.runner = FailingRunner(mortal._engine.runner, before=broken_device)
        tasks = [asyncio.ensure_future(mortal.generate(f"number {index}", LONG)._last()) for index in range(12)]
        stream = mortal.stream("hello", LONG)
        if fault == "command":
            await anext(stream)
            broken_books(mortal)
            tasks.append(asyncio.ensure_future(mortal.generate("the last straw", LONG)._last()))
        message = "the device is gone" if fault == "device" else "a bug"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # With a broken command that is also the request that broke, although it was never queued.
        assert len(results) == (13 if fault == "command" else 12)
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert message in result.message
        with pytest.raises(EngineDeadError, match=message):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match=message):
            mortal.check_health()
        with pytest.raises(EngineDeadError, match=message):
            await mortal.generate("after", params())
        mortal.abort("nobody")

    run(work)
    assert [event.state for event in async_log.of(events.HealthChanged)][-1] == "dead"
