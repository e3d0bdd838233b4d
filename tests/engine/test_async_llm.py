"""`AsyncLLM`: many tasks, one engine thread, and the same answers as alone."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import jaxpaged
from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ChatTemplateError, ContextLengthError, EngineDeadError, InvalidRequestError
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind
from tests.engine.async_bench import TIMEOUT_S, is_idle, params, run, text, wait_until
from tests.event_log import EventLog
from tests.fakes import FailingRunner

pytestmark = pytest.mark.jax


def test_three_at_once_answer_as_each_alone(mortal: AsyncLLM) -> None:
    assert jaxpaged.AsyncLLM is jaxpaged.AsyncLLMEngine is AsyncLLM

    async def work() -> None:
        async with mortal:
            alone = [text(await mortal.generate(prompt, params())) for prompt in ("a", "b", "c")]
            together = await asyncio.gather(mortal.generate("a", params()), mortal.generate("b", params()), mortal.generate("c", params()))
            assert [text(output) for output in together] == alone
            assert [output.prompt for output in together] == ["a", "b", "c"]
            assert len(set(alone)) == 3
        with pytest.raises(EngineDeadError, match="closed"):
            mortal.check_health()

    run(work)


def test_a_generation_can_be_awaited_twice_and_iterated(async_llm: AsyncLLM) -> None:
    async def work() -> None:
        generation = async_llm.generate("hello", params())
        first, second = await generation, await generation
        assert text(first) == text(second)
        assert first.request_id != second.request_id
        outputs = [output async for output in async_llm.generate("hello", params())]
        assert [text(output) for output in outputs][-1] == text(first)
        assert all(text(after).startswith(text(before)) for before, after in zip(outputs, outputs[1:], strict=False))
        deltas = [output async for output in async_llm.generate("hello", params(output_kind=RequestOutputKind.DELTA))]
        assert "".join(text(output) for output in deltas) == text(first)
        final = [output async for output in async_llm.generate("hello", params(output_kind=RequestOutputKind.FINAL_ONLY))]
        assert [text(output) for output in final] == [text(first)]

    run(work)


def test_stream_gives_deltas(async_llm: AsyncLLM) -> None:
    async def work() -> None:
        expected = await async_llm.generate("hello", params(40))
        outputs = [output async for output in async_llm.stream("hello", params(40))]
        assert "".join(text(output) for output in outputs) == text(expected)
        assert [i for output in outputs for i in output.outputs[0].token_ids] == expected.outputs[0].token_ids
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) > 5

    run(work)


def test_a_slow_reader_gets_several_tokens_at_once(async_llm: AsyncLLM, async_log: EventLog) -> None:
    async def work() -> None:
        expected = await async_llm.generate("hello", params(60))
        stream = async_llm.stream("hello", params(60))
        outputs = [await anext(stream)]
        await wait_until(lambda: is_idle(async_llm))
        outputs += [output async for output in stream]
        assert len(outputs) <= 3
        assert "".join(text(output) for output in outputs) == text(expected)
        assert [i for output in outputs for i in output.outputs[0].token_ids] == expected.outputs[0].token_ids

    run(work)


BAD: list[tuple[Any, type[Exception], str]] = [
    ("", InvalidRequestError, "empty"),
    ([5] * 512, ContextLengthError, "512 tokens"),
    ([10**6], InvalidRequestError, "from 0 to 383"),
    ({"text": "a"}, InvalidRequestError, "A prompt object holds"),
]


def test_bad_prompts_are_raised_where_they_are_awaited(async_llm: AsyncLLM) -> None:
    async def work() -> None:
        good = asyncio.ensure_future(async_llm.generate("hello", params(50))._last())
        for prompt, error, message in BAD:
            with pytest.raises(error, match=message):
                await async_llm.generate(prompt, params())
            with pytest.raises(error, match=message):
                await anext(async_llm.stream(prompt, params()))
        with pytest.raises(ChatTemplateError):
            await async_llm.chat_prompt([{"role": "user"}])
        assert len((await good).outputs[0].token_ids) == 50
        prompt = await async_llm.chat_prompt([{"role": "user", "content": "hi"}])
        assert (await async_llm.generate(prompt, params())).prompt_token_ids == prompt

    run(work)


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on(async_llm: AsyncLLM) -> None:
    async def work() -> None:
        first = async_llm.stream("one", params(100), request_id="mine")
        outputs = [await anext(first)]
        with pytest.raises(InvalidRequestError, match="'mine' is already in use"):
            await async_llm.generate("two", params(), request_id="mine")
        outputs += [output async for output in first]
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 100
        assert len((await async_llm.generate("two", params(3), request_id="mine")).outputs[0].token_ids) == 3

    run(work)


def test_the_loop_is_never_held_up_by_a_step(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that waits for a step does not turn while it runs; here each step goes on until it has."""
    turns = 0

    def before(_: int) -> None:
        seen, deadline = turns, time.monotonic() + TIMEOUT_S
        while turns < seen + 100:
            assert time.monotonic() < deadline, "the loop waits for the step"
            time.sleep(0.001)

    async def work() -> None:
        nonlocal turns
        monkeypatch.setattr(async_llm._engine, "runner", FailingRunner(async_llm._engine.runner, before=before))
        task = asyncio.ensure_future(async_llm.generate("hello", params(4))._last())
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len((await task).outputs[0].token_ids) == 4

    run(work)
    assert turns >= 400


def test_several_loops_share_one_engine(async_llm: AsyncLLM) -> None:
    expected = run(lambda: async_llm.generate("hello", params(20))._last())
    got: list[str] = []

    def work() -> None:
        got.append(text(run(lambda: async_llm.generate("hello", params(20))._last())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert got == [text(expected)] * 4


def test_a_loop_that_has_closed_harms_nobody(async_llm: AsyncLLM, async_log: EventLog) -> None:
    """Its requests go on without a reader until they end or the engine closes."""

    async def leave() -> None:
        stream = async_llm.stream("hello", params(30))
        await anext(stream)
        kept.append(stream)

    kept: list[AsyncIterator[RequestOutput]] = []
    asyncio.run(leave())
    assert len(run(lambda: async_llm.generate("hello", params(20))._last()).outputs[0].token_ids) == 20
    async_llm.check_health()
    assert len(async_log.of(events.RequestQueued)) == 2


def test_many_tasks(async_llm: AsyncLLM) -> None:
    """200 requests with mixed ends, all of which come."""

    def num_finished() -> float:
        return sum(metric.value for metric in async_llm.get_metrics() if metric.name == "jaxpaged_requests_finished_total")

    before = num_finished()

    async def work() -> None:
        async def ask(index: int) -> FinishReason | None:
            if index % 5 == 0:
                outputs = []
                async for output in async_llm.stream([3 + index, 7], params(1 + index % 23)):
                    outputs.append(output)
                    if index % 10 == 0:
                        return None
                return outputs[-1].outputs[0].finish_reason
            return (await async_llm.generate([3 + index, 7, 9], params(1 + index % 23))).outputs[0].finish_reason

        ends = await asyncio.gather(*(ask(index) for index in range(200)))
        assert ends.count(FinishReason.LENGTH) == 180
        await wait_until(lambda: is_idle(async_llm))
        async_llm._engine.scheduler.check()
        assert num_finished() - before == 200

    run(work)
