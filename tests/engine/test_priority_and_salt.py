"""Priorities and cache salts from the front ends down: who goes first, and that tenants never share a page."""

import asyncio
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import InvalidRequestError
from jaxpaged.llm import LLM
from jaxpaged.request import SamplingParams
from jaxpaged.start import Started
from tests.engine.async_bench import params, run
from tests.engine.conftest import tiny_bench
from tests.event_log import EventLog

pytestmark = pytest.mark.jax

LONG = list(range(5, 45))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def llm(one_row_llm: LLM) -> LLM:
    """One row, so that the order of admission shows."""
    return one_row_llm


@pytest.fixture
def log(one_row_log: EventLog) -> EventLog:
    return one_row_log


def first_scheduled(log: EventLog) -> list[str]:
    return list(dict.fromkeys(event.request_id for event in log.of(events.RequestScheduled)))


def test_lower_goes_first(llm: LLM, log: EventLog) -> None:
    log.clear()
    outputs = llm.generate(["a", "b", "c", "d"], GREEDY, priority=[5, 0, -3, 0])
    ids = [output.request_id for output in outputs]
    assert first_scheduled(log) == [ids[2], ids[1], ids[3], ids[0]]
    log.clear()
    outputs = llm.generate(["a", "b"], GREEDY, priority=7)
    assert first_scheduled(log) == [output.request_id for output in outputs]
    log.clear()
    slow = llm.stream("a", GREEDY, priority=3)
    next(slow)
    (quick,) = llm.chat([{"role": "user", "content": "now"}], GREEDY, priority=-1)
    assert [event.request_id for event in log.of(events.RequestPreempted)] == [first_scheduled(log)[0]]
    assert quick.metrics.finished_s is not None
    assert len(list(slow)) == 3


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], "1 priorities for 2 prompts"),
        ("ab", "priority must be an integer"),
        (1.5, "integer or a list, got float"),
        (10**9, "between -1000000 and 1000000"),
        ([0, 1.5], "1.5"),
    ],
)
def test_a_priority_is_an_integer_for_all_or_each(llm: LLM, unchecked_types: None, priority: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["a", "b"], GREEDY, priority=priority)
    assert llm.engine.num_unfinished == 0


def test_priority_through_the_async_api(async_llm: AsyncLLM, async_log: EventLog) -> None:
    async def work() -> None:
        others = [asyncio.ensure_future(async_llm.generate(f"{index}", params(60))._last()) for index in range(12)]
        await asyncio.sleep(0.02)
        first = await async_llm.generate("at once", params(2), "urgent", priority=-1)
        assert not all(task.done() for task in others)
        assert first.finished
        deltas = [output async for output in async_llm.stream("b", params(2), priority=4)]
        assert deltas[-1].finished
        with pytest.raises(InvalidRequestError, match="priority must be an integer"):
            await async_llm.generate("a", params(2), priority=10**8)
        await asyncio.gather(*others)

    run(work)


@pytest.mark.parametrize("form", ["prompt", "prompt_token_ids"])
def test_tenants_never_hit_each_others_pages(llm: LLM, form: str) -> None:
    """The same prompt, over and over: found by the same tenant alone, and the answer is the same for all."""
    prompt: Any = LONG if form == "prompt_token_ids" else llm.get_tokenizer().decode(LONG)
    llm.reset_prefix_cache()
    seen: set[str | None] = set()
    answers = []
    for salt in [None, "ann", "bob", "ann", None, "Ann", "ann ", "bob", "a" * 128]:
        (output,) = llm.generate({form: prompt, "cache_salt": salt}, GREEDY)
        assert (output.num_cached_tokens > 0) == (salt in seen), f"salt {salt!r}"
        seen.add(salt)
        answers.append(output.outputs[0].token_ids)
    assert all(answer == answers[0] for answer in answers)
    if form == "prompt":
        assert output.prompt == prompt


def test_a_tenants_samples_share_and_others_do_not(tiny: Started) -> None:
    """While they run, too: six answers for two tenants at once, in one batch."""
    bench = tiny_bench(tiny)
    for salt in ("ann", "bob"):
        bench.add({"prompt_token_ids": LONG, "cache_salt": salt}, n=3, max_tokens=8, ignore_eos=True)
    while bench.engine.scheduler.num_running < 6:
        bench.step()
    pages: dict[str | None, set[int]] = {}
    for sequence in bench.engine.scheduler.sequences:
        pages.setdefault(sequence.request.cache_salt, set()).update(sequence.pages)
    assert pages["ann"].isdisjoint(pages["bob"])
    assert [len(own) for own in pages.values()] == [2 + 3, 2 + 3]
    bench.run()
    bench.after_check()


@pytest.mark.parametrize("salt", ["", "x" * 129, 5, b"ann"])
def test_a_salt_is_a_short_text(llm: LLM, unchecked_types: None, salt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cache_salt must be a string of 1 to 128 characters"):
        llm.generate({"prompt": "a", "cache_salt": salt}, GREEDY)


def test_a_salt_alone_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"'cache_salt' if wanted, got \[\]"):
        llm.generate({"cache_salt": "ann"}, GREEDY)
