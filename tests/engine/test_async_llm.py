"""`AsyncLLM`: many tasks, one engine thread, and no task that waits for ever."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxpaged
from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ChatTemplateError, ContextLengthError, EngineDeadError, InvalidRequestError
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from tests.fakes import EventLog, FailingRunner, tiny_config

pytestmark = pytest.mark.jax

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


ONE_BUCKET = {"token_buckets": (16,), "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def log() -> EventLog:
    return EventLog()


@pytest.fixture(scope="module")
def shared(tiny_folder: Path, programs: Path, log: EventLog) -> Iterator[AsyncLLM]:
    with AsyncLLM(config=tiny_config(tiny_folder, programs=programs, **ONE_BUCKET), sinks=[log]) as llm:
        yield llm


@pytest.fixture
def llm(shared: AsyncLLM, log: EventLog) -> Iterator[AsyncLLM]:
    """The shared engine at rest, which it must be again afterwards."""
    log.clear()
    yield shared
    deadline = time.monotonic() + TIMEOUT_S
    while not is_idle(shared) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert is_idle(shared)
    assert shared._mailboxes == {}
    shared._engine.scheduler.check()
    check_ends(log)


@pytest.fixture
def mortal(tiny_folder: Path, programs: Path, log: EventLog) -> Iterator[AsyncLLM]:
    """An engine of its own, for tests that close or kill it."""
    log.clear()
    llm = AsyncLLM(config=tiny_config(tiny_folder, programs=programs, **ONE_BUCKET), sinks=[log])
    yield llm
    llm.close()
    assert not llm._thread.is_alive()
    assert llm._mailboxes == {}
    assert is_idle(llm)
    check_ends(log)


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


def test_three_at_once_answer_as_each_alone(mortal: AsyncLLM) -> None:
    assert jaxpaged.AsyncLLM is jaxpaged.AsyncLLMEngine is AsyncLLM

    async def work() -> None:
        async with mortal as llm:
            alone = [text(await llm.generate(prompt, params())) for prompt in ("a", "b", "c")]
            together = await asyncio.gather(llm.generate("a", params()), llm.generate("b", params()), llm.generate("c", params()))
            assert [text(output) for output in together] == alone
            assert [output.prompt for output in together] == ["a", "b", "c"]
            assert len(set(alone)) == 3
        with pytest.raises(EngineDeadError, match="closed"):
            llm.check_health()

    run(work)


def test_a_generation_can_be_awaited_twice_and_iterated(llm: AsyncLLM) -> None:
    async def work() -> None:
        generation = llm.generate("hello", params())
        first, second = await generation, await generation
        assert text(first) == text(second)
        assert first.request_id != second.request_id
        outputs = [output async for output in llm.generate("hello", params())]
        assert [text(output) for output in outputs][-1] == text(first)
        assert all(text(after).startswith(text(before)) for before, after in zip(outputs, outputs[1:], strict=False))
        deltas = [output async for output in llm.generate("hello", params(output_kind=RequestOutputKind.DELTA))]
        assert "".join(text(output) for output in deltas) == text(first)
        final = [output async for output in llm.generate("hello", params(output_kind=RequestOutputKind.FINAL_ONLY))]
        assert [text(output) for output in final] == [text(first)]

    run(work)


def test_stream_gives_deltas(llm: AsyncLLM) -> None:
    async def work() -> None:
        expected = await llm.generate("hello", params(40))
        outputs = [output async for output in llm.stream("hello", params(40))]
        assert "".join(text(output) for output in outputs) == text(expected)
        assert [i for output in outputs for i in output.outputs[0].token_ids] == expected.outputs[0].token_ids
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) > 5

    run(work)


def test_a_slow_reader_gets_several_tokens_at_once(llm: AsyncLLM, log: EventLog) -> None:
    async def work() -> None:
        expected = await llm.generate("hello", params(60))
        stream = llm.stream("hello", params(60))
        outputs = [await anext(stream)]
        await wait_until(lambda: is_idle(llm))
        outputs += [output async for output in stream]
        assert len(outputs) <= 3
        assert "".join(text(output) for output in outputs) == text(expected)
        assert [i for output in outputs for i in output.outputs[0].token_ids] == expected.outputs[0].token_ids

    run(work)


LONG = params(400)


@pytest.mark.parametrize("how", ["cancel", "break", "aclose", "abort", "cancel_awaited", "timeout"])
def test_who_leaves_is_aborted_within_two_steps(llm: AsyncLLM, log: EventLog, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def work() -> None:
        slow_down(llm, monkeypatch, 0.002)
        stream = llm.stream("hello", LONG, request_id="mine")
        if how == "cancel":

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.ensure_future(read())
            await wait_until(lambda: num_steps(log) > 3)
            before = num_steps(log)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "break":
            async for _ in stream:
                break
            before = num_steps(log)
            await stream.aclose()  # type: ignore[attr-defined]
        elif how == "aclose":
            await anext(stream)
            before = num_steps(log)
            await stream.aclose()  # type: ignore[attr-defined]
        elif how == "abort":
            await anext(stream)
            before = num_steps(log)
            llm.abort("mine")
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].finish_reason is FinishReason.ABORT
        elif how == "cancel_awaited":
            task = asyncio.ensure_future(llm.generate("hello", LONG)._last())
            await wait_until(lambda: num_steps(log) > 3)
            before = num_steps(log)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            before = 0
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await llm.generate("hello", LONG)
            before = num_steps(log)
        await wait_until(lambda: is_idle(llm))
        assert num_steps(log) - before <= 2
        assert [event.reason for event in log.of(events.RequestFinished)] == ["abort"]
        assert len((await llm.generate("hello", params(3))).outputs[0].token_ids) == 3

    run(work)


def test_an_iteration_that_is_dropped_is_aborted(llm: AsyncLLM, log: EventLog) -> None:
    """Without aclose: Python's own finalizer of async generators does it."""

    async def work() -> None:
        async for _ in llm.stream("hello", LONG):
            break
        await wait_until(lambda: is_idle(llm))
        assert [event.reason for event in log.of(events.RequestFinished)] == ["abort"]

    run(work)


BAD: list[tuple[Any, type[Exception], str]] = [
    ("", InvalidRequestError, "empty"),
    ([5] * 512, ContextLengthError, "512 tokens"),
    ([10**6], InvalidRequestError, "from 0 to 383"),
    ({"text": "a"}, InvalidRequestError, "either 'prompt'"),
]


def test_bad_prompts_are_raised_where_they_are_awaited(llm: AsyncLLM) -> None:
    async def work() -> None:
        good = asyncio.ensure_future(llm.generate("hello", params(50))._last())
        for prompt, error, message in BAD:
            with pytest.raises(error, match=message):
                await llm.generate(prompt, params())
            with pytest.raises(error, match=message):
                await anext(llm.stream(prompt, params()))
        with pytest.raises(ChatTemplateError):
            await llm.chat_prompt([{"role": "user"}])
        assert len((await good).outputs[0].token_ids) == 50
        prompt = await llm.chat_prompt([{"role": "user", "content": "hi"}])
        assert (await llm.generate(prompt, params())).prompt_token_ids == prompt

    run(work)


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on(llm: AsyncLLM) -> None:
    async def work() -> None:
        first = llm.stream("one", params(100), request_id="mine")
        outputs = [await anext(first)]
        with pytest.raises(InvalidRequestError, match="'mine' is already in use"):
            await llm.generate("two", params(), request_id="mine")
        outputs += [output async for output in first]
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 100
        assert len((await llm.generate("two", params(3), request_id="mine")).outputs[0].token_ids) == 3

    run(work)


def test_close_while_running_ends_everybody(mortal: AsyncLLM, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        slow_down(mortal, monkeypatch, 0.002)
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
    assert type(log[-1]) is events.EngineStopped


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
        assert ends[-1] == "the engine is closed"

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
def test_the_engines_death_reaches_every_waiter(mortal: AsyncLLM, log: EventLog, fault: str) -> None:
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
    assert [event.state for event in log.of(events.HealthChanged)][-1] == "dead"


def test_the_loop_is_never_held_up_by_a_step(llm: AsyncLLM, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.3 s, and a task that ticks meanwhile."""

    async def work() -> None:
        slow_down(llm, monkeypatch, 0.3)
        gaps = []
        task = asyncio.ensure_future(llm.generate("hello", params(4))._last())
        last = time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        assert len((await task).outputs[0].token_ids) == 4
        # The machine may be busy with something else now and then; a loop that waits for steps ticks four times in all.
        assert len(gaps) > 100
        assert sorted(gaps)[int(0.98 * len(gaps))] < 0.05
        assert max(gaps) < 0.25

    run(work)
    assert sum(event.device_s for event in log.of(events.StepFinished)) > 1.2


def test_several_loops_share_one_engine(llm: AsyncLLM) -> None:
    expected = run(lambda: llm.generate("hello", params(20))._last())
    got: list[str] = []

    def work() -> None:
        got.append(text(run(lambda: llm.generate("hello", params(20))._last())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert got == [text(expected)] * 4


def test_a_loop_that_has_closed_harms_nobody(llm: AsyncLLM, log: EventLog) -> None:
    """Its requests go on without a reader until they end or the engine closes."""

    async def leave() -> None:
        stream = llm.stream("hello", params(30))
        await anext(stream)
        kept.append(stream)

    kept: list[AsyncIterator[RequestOutput]] = []
    asyncio.run(leave())
    assert len(run(lambda: llm.generate("hello", params(20))._last()).outputs[0].token_ids) == 20
    llm.check_health()
    assert len(log.of(events.RequestQueued)) == 2


def test_many_tasks(llm: AsyncLLM) -> None:
    """200 requests with mixed ends, all of which come."""

    def num_finished() -> float:
        return sum(metric.value for metric in llm.get_metrics() if metric.name == "jaxpaged_requests_finished_total")

    before = num_finished()

    async def work() -> None:
        async def ask(index: int) -> FinishReason | None:
            if index % 5 == 0:
                outputs = []
                async for output in llm.stream([3 + index, 7], params(1 + index % 23)):
                    outputs.append(output)
                    if index % 10 == 0:
                        return None
                return outputs[-1].outputs[0].finish_reason
            return (await llm.generate([3 + index, 7, 9], params(1 + index % 23))).outputs[0].finish_reason

        ends = await asyncio.gather(*(ask(index) for index in range(200)))
        assert ends.count(FinishReason.LENGTH) == 180
        await wait_until(lambda: is_idle(llm))
        llm._engine.scheduler.check()
        assert num_finished() - before == 200

    run(work)
