"""Operators' calls through `AsyncLLM` and `LLM`: requests wait or are refused, nobody spins, nobody waits for ever."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.clocks import Clocks
from jaxpaged.errors import EngineDeadError, EnginePausedError, InvalidRequestError
from jaxpaged.llm import LLM
from jaxpaged.request import FinishReason, RequestOutput, SamplingParams
from tests.engine.async_bench import is_idle, num_steps, params, run, slow_down, text, wait_until
from tests.event_log import EventLog
from tests.fakes import FailingRunner
from tests.tiny_engine import tiny_config

pytestmark = pytest.mark.jax

LONG = params(400)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def thread_cpu_s(llm: AsyncLLM) -> float:
    """Seconds of CPU that the engine thread has used."""
    ident = llm._thread._thread.ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def test_requests_wait_while_paused_and_the_thread_rests(async_llm: AsyncLLM, async_log: EventLog) -> None:
    async def work() -> None:
        expected = [text(await async_llm.generate(prompt, params())) for prompt in ("a", "b", "c")]
        for stop, go in ((async_llm.pause, async_llm.resume), (async_llm.sleep, async_llm.wake_up)):
            await stop()
            await stop()
            assert await async_llm.is_paused()
            assert await async_llm.is_sleeping() == (stop == async_llm.sleep)
            tasks = [asyncio.ensure_future(async_llm.generate(prompt, params())._last()) for prompt in ("a", "b", "c")]
            await wait_until(lambda: async_llm._engine.num_unfinished == 3)
            async_llm.check_health()
            steps, cpu_s = num_steps(async_log), thread_cpu_s(async_llm)
            await asyncio.sleep(0.3)
            assert num_steps(async_log) == steps
            assert thread_cpu_s(async_llm) - cpu_s < 0.05
            assert not any(task.done() for task in tasks)
            await go()
            await go()
            assert [text(output) for output in await asyncio.gather(*tasks)] == expected
            assert not await async_llm.is_paused()
        assert async_llm.pause_generation == async_llm.pause
        assert async_llm.resume_generation == async_llm.resume

    run(work)
    states = [event.state for event in async_log.of(events.HealthChanged)]
    assert states == ["paused", "ready", "paused", "sleeping", "ready"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_modes(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    async def work() -> None:
        expected = await async_llm.generate("hello", params(60))
        pace = slow_down(async_llm, monkeypatch, 0.02)
        stream = async_llm.stream("hello", params(60))
        outputs = [await anext(stream)]
        if mode == "wait":
            pace.let_go()
        await async_llm.pause(mode)
        pace.let_go()
        assert async_llm._engine.num_unfinished == (mode == "keep")
        if mode == "keep":
            more = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            # What was on its way has come; the rest has not.
            assert not async_llm._engine.has_step
            await async_llm.resume()
            outputs.append(await more)
        outputs += [output async for output in stream]
        await async_llm.resume()
        ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
        if mode == "abort":
            assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
            assert ids == expected.outputs[0].token_ids[: len(ids)] != expected.outputs[0].token_ids
        else:
            assert ids == expected.outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="mode is one of"):
            await async_llm.pause("later")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="level is one of"):
            await async_llm.sleep(7)
        with pytest.raises(InvalidRequestError, match="tags are among"):
            await async_llm.wake_up(["everything"])
        assert not await async_llm.is_paused()

    run(work)


def test_aborts_and_leaving_while_paused(async_llm: AsyncLLM, async_log: EventLog) -> None:
    async def work() -> None:
        await async_llm.pause()
        kept = asyncio.ensure_future(async_llm.generate("hello", LONG, "mine")._last())
        gone = asyncio.ensure_future(async_llm.generate("hello", LONG)._last())
        await wait_until(lambda: async_llm._engine.num_unfinished == 2)
        async_llm.abort("mine")
        assert (await kept).outputs[0].finish_reason is FinishReason.ABORT
        gone.cancel()
        await wait_until(lambda: is_idle(async_llm))
        await async_llm.resume()
        assert [event.reason for event in async_log.of(events.RequestFinished)] == ["abort", "abort"]

    run(work)


def test_a_reset_of_the_prefix_cache(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        prompt = list(range(5, 45))
        cached = [(await async_llm.generate(prompt, params())).num_cached_tokens for _ in range(2)]
        assert cached[1] == 32
        assert await async_llm.reset_prefix_cache()
        assert (await async_llm.generate(prompt, params())).num_cached_tokens == 0
        expected = (await async_llm.generate(prompt, params(60))).outputs[0].token_ids
        pace = slow_down(async_llm, monkeypatch, 0.02)
        task = asyncio.ensure_future(async_llm.generate(prompt, params(60))._last())
        await wait_until(lambda: async_llm._engine.scheduler.num_running == 1)
        assert await async_llm.reset_prefix_cache(reset_running_requests=True)
        pace.let_go()
        assert (await task).outputs[0].token_ids == expected

    run(work)


@pytest.fixture
def impatient(tiny_folder: Path, programs: Path, async_log: EventLog) -> Iterator[AsyncLLM]:
    """An engine that gives a request half a minute; see `leap`."""
    async_log.clear()
    config = tiny_config(
        tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16, request_timeout_s=30.0, queue_timeout_s=20.0
    )
    with AsyncLLM(config=config, sinks=[async_log]) as llm:
        yield llm


def test_time_limits_end_requests_of_a_sleeping_engine(impatient: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's clock leaps to 0.2 s before the limit; that time then passes, and the sleeper has to wake up by itself."""
    ahead_s = 0.0
    clocks = Clocks(monotonic=lambda: time.monotonic() + ahead_s)
    for owner in (impatient._engine, impatient._engine._requests):
        monkeypatch.setattr(owner, "clocks" if owner is impatient._engine else "_clocks", clocks)
    monkeypatch.setattr(impatient._engine.scheduler, "_clock", clocks.monotonic)

    async def leap(seconds: float) -> None:
        nonlocal ahead_s
        ahead_s += seconds
        await impatient.is_paused()  # whoever waits looks at the clock again

    async def work() -> None:
        stream = impatient.stream("hello", LONG)
        await anext(stream)
        await impatient.pause("keep")
        await leap(29.8)
        last = [output async for output in stream][-1]
        assert (last.outputs[0].finish_reason, last.error) == (
            FinishReason.ABORT,
            "The request took longer than 30 s (request_timeout_s)",
        )
        late = asyncio.ensure_future(impatient.generate("hello", LONG)._last())
        await wait_until(lambda: impatient._engine.num_unfinished == 1)
        await leap(19.8)
        assert "was not started (queue_timeout_s)" in ((await late).error or "")
        await impatient.sleep(1)
        asleep = asyncio.ensure_future(impatient.generate("hello", LONG)._last())
        await wait_until(lambda: impatient._engine.num_unfinished == 1)
        await leap(19.8)
        assert "was not started (queue_timeout_s)" in ((await asleep).error or "")
        await impatient.wake_up()
        assert await impatient.is_paused()
        await impatient.resume()
        assert (await impatient.generate("hello", params(3))).error is None
        # Limits that were never reached wake nobody up when they are over.
        await leap(29.8)
        cpu_s = thread_cpu_s(impatient)
        await asyncio.sleep(0.4)
        assert thread_cpu_s(impatient) - cpu_s < 0.05

    run(work)
    assert [event.reason for event in async_log.of(events.RequestFinished)] == ["abort"] * 3 + ["length"]


def test_closing_while_asleep(mortal: AsyncLLM) -> None:
    async def work() -> None:
        await mortal.sleep()
        task = asyncio.ensure_future(mortal.generate("hello", LONG)._last())
        await wait_until(lambda: mortal._engine.num_unfinished == 1)
        await asyncio.get_running_loop().run_in_executor(None, mortal.close)
        assert (await task).outputs[0].finish_reason is FinishReason.ABORT
        calls = (mortal.pause, mortal.resume, mortal.sleep, mortal.wake_up, mortal.is_paused, mortal.reset_prefix_cache)
        for call in calls:
            with pytest.raises(EngineDeadError, match="closed"):
                await call()
        for late in (mortal.generate("hello", LONG)._last(), anext(mortal.stream("hello", LONG))):
            with pytest.raises(EngineDeadError, match="closed"):
                await late

    run(work)


def test_death_while_a_pause_waits(mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        time.sleep(0.01)
        if len(paused) == 1:
            raise RuntimeError("the device is gone")

    paused: list[int] = []

    async def work() -> None:
        monkeypatch.setattr(mortal._engine, "runner", FailingRunner(mortal._engine.runner, before=fail))
        task = asyncio.ensure_future(mortal.generate("hello", LONG)._last())
        await wait_until(lambda: mortal._engine.scheduler.num_running == 1)
        pausing = asyncio.ensure_future(mortal.pause("wait"))
        await wait_until(lambda: mortal._engine.scheduler.is_draining)
        paused.append(1)
        for waiting in (task, pausing):
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await waiting

    run(work)


def test_an_llm_closed_while_asleep_says_that_it_is_closed(tiny_folder: Path, programs: Path) -> None:
    llm = LLM(config=tiny_config(tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16), sinks=[])
    llm.sleep(2)
    for _ in range(2):
        llm.close()
    calls = (lambda: llm.generate("a"), lambda: next(llm.stream("a")), llm.wake_up, llm.resume, llm.sleep, llm.pause)
    for call in calls:
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            call()


@pytest.fixture
def llm(one_row_llm: LLM) -> Iterator[LLM]:
    yield one_row_llm
    assert not one_row_llm.is_paused()


def ids(outputs: Any) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


def what_has_come(llm: LLM, stream: Iterator[RequestOutput]) -> list[RequestOutput]:
    """The outputs of steps that were in flight when the pause began."""
    return [next(stream) for _ in range(sum(map(len, llm._turns.mail.values())))]


def test_a_program_without_threads_is_told_to_resume(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    for stop, go, message in ((llm.pause, llm.resume, "is paused: call resume"), (llm.sleep, llm.wake_up, "is asleep: call wake_up")):
        for _ in range(2):
            stop()
        assert llm.is_paused()
        assert llm.is_sleeping() == (stop == llm.sleep)
        calls = (lambda: llm.generate("a"), lambda: next(llm.stream("a")), lambda: llm.chat([{"role": "user", "content": "a"}]))
        for call in calls:
            with pytest.raises(EnginePausedError, match=message):
                call()
        assert llm.engine.num_unfinished == 0
        for _ in range(2):
            go()
        assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == expected
    with pytest.raises(EnginePausedError, match="call wake_up"):
        llm.sleep(0)
        llm.resume()
    llm.wake_up(tags=["scheduling"])
    assert not llm.is_paused()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_streams_over_a_pause(llm: LLM, mode: Any) -> None:
    expected = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("hello", GREEDY)
    outputs = [next(stream)]
    llm.sleep(1, mode)
    if mode == "keep":
        outputs += what_has_come(llm, stream)
        waker = threading.Timer(0.1, llm.wake_up)
        begun = time.monotonic()
        waker.start()
        outputs.append(next(stream))
        assert time.monotonic() - begun > 0.09
        waker.join()
    outputs += list(stream)
    llm.wake_up()
    assert outputs[-1].outputs[0].finish_reason is (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)
    assert ids(outputs) == (expected[: len(ids(outputs))] if mode == "abort" else expected)
    assert llm.engine.num_unfinished == 0
    assert llm.engine.pages.num_in_use == 0
