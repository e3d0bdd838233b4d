"""Beam search through the engine: what the reference finds over the model in numpy, over shared pages, and what ends it early."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.beam_requests import BeamRequests, all_or_none
from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams
from jaxpaged.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from jaxpaged.intake import Intake
from jaxpaged.llm import LLM
from jaxpaged.output_lengths import OutputLengths
from jaxpaged.request import CompletionOutput, FinishReason, Request, RequestMetrics, RequestOutput, SamplingParams
from jaxpaged.start import Started
from tests.beam_reference import Table, reference_search
from tests.engine.async_bench import is_idle, params, run, slow_down, wait_until
from tests.engine.conftest import tiny_bench
from tests.event_log import EventLog
from tests.models import numpy_llama
from tests.tiny_engine import tiny_config
from tests.tiny_model import tiny_weights

pytestmark = pytest.mark.jax

EOS = 2
PROMPTS = [[3 + (index * 31 + position * 7) % 380 for position in range(length)] for index, length in enumerate((1, 15, 16, 17, 40))]


def table_of(prompt: list[int], num_ids: int) -> Table:
    """What the tiny model says of the ids after an answer's beginning."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "theta": 10_000.0, "num_last": 1}
    weights = tiny_weights(has_head=False)

    def table(beginning: tuple[int, ...]) -> np.ndarray:
        logits = numpy_llama.logits(weights, [*prompt, *beginning], windows=(None, None), **shape)[0, :num_ids]
        return logits - np.logaddexp.reduce(logits)

    return table


@pytest.fixture(scope="module")
def log() -> EventLog:
    return EventLog()


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, programs: Path, log: EventLog) -> Iterator[LLM]:
    with LLM(config=tiny_config(tiny_folder, programs=programs, max_num_queued_requests=3), sinks=[log]) as llm:
        yield llm


@pytest.fixture
def calm(llm: LLM, log: EventLog) -> Iterator[LLM]:
    """Afterwards nothing may be left, and every request has had its end."""
    log.clear()
    yield llm
    engine = llm.engine
    assert (engine.num_unfinished, engine.pages.num_in_use, llm._turns.mail) == (0, 0, {})
    engine.scheduler.check()
    finished = [event.request_id for event in log.of(events.RequestFinished)]
    assert sorted(finished) == sorted(event.request_id for event in log.of(events.RequestQueued))


def check(llm: LLM, prompt: list[int], given: BeamSearchParams, found: BeamSearchOutput, *, max_tokens: int | None = None) -> None:
    ends: set[int] = set() if given.ignore_eos else {EOS}
    num_ids = llm.get_tokenizer().vocab_size
    max_tokens = max_tokens or given.max_tokens
    table = table_of(prompt, num_ids)
    expected = reference_search(table, width=given.beam_width, max_tokens=max_tokens, ends=ends, penalty=given.length_penalty)
    assert [tuple(answer.output_token_ids) for answer in found.sequences] == expected.answers
    assert [answer.score for answer in found.sequences] == pytest.approx(expected.scores, abs=1e-4)
    assert found.error is None
    for answer in found.sequences:
        assert answer.tokens[: answer.num_prompt_tokens] == prompt
        assert all(len(told) == 2 * given.beam_width for told in answer.logprobs)
        assert answer.output_text == llm.get_tokenizer().decode(answer.output_token_ids)


@pytest.mark.parametrize(("width", "max_tokens"), [(1, 6), (3, 10), (10, 5)])
def test_answers_are_those_of_the_reference(calm: LLM, width: int, max_tokens: int) -> None:
    """All prompts at once; a width of 10 does not fit in the rows of a step."""
    given = BeamSearchParams(width, max_tokens, length_penalty=1.0 if width == 3 else 0.5)
    outputs = calm.beam_search(PROMPTS, given, concurrency_limit=2)
    assert len(outputs) == len(PROMPTS)
    for prompt, found in zip(PROMPTS, outputs, strict=True):
        check(calm, prompt, given, found)
    assert calm.engine.runner.num_compiled_while_running == 0


def test_ends_among_the_beams(calm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Common ids as end tokens, so that answers of several lengths compete."""
    given, prompt = BeamSearchParams(4, 8, length_penalty=0.0), PROMPTS[3]
    table = table_of(prompt, calm.get_tokenizer().vocab_size)
    ends = frozenset(np.argsort(-table(()))[3:5].tolist())
    monkeypatch.setattr(calm._intake, "eos_token_ids", ends)
    (found,) = calm.beam_search(prompt, given)
    expected = reference_search(table, width=4, max_tokens=8, ends=ends, penalty=0.0)
    assert [tuple(answer.output_token_ids) for answer in found.sequences] == expected.answers
    assert len({len(answer.output_token_ids) for answer in found.sequences}) > 1
    assert FinishReason.STOP in {answer.finish_reason for answer in found.sequences}


def test_beams_share_full_pages(calm: LLM, log: EventLog) -> None:
    """Each request computes less than a page and its new token; pages of 16 fill up on the way."""
    calm.reset_prefix_cache()
    calm.beam_search(PROMPTS[4], BeamSearchParams(4, 40, ignore_eos=True))
    finished = log.of(events.RequestFinished)
    assert len(finished) == 1 + 39 * 4
    assert finished[0].num_cached_tokens == 0
    assert all(event.num_prompt_tokens - event.num_cached_tokens <= 16 for event in finished[1:])
    assert {event.num_cached_tokens for event in finished[1:]} == {32, 48, 64}


def test_the_context_ends_answers(calm: LLM) -> None:
    long = [3 + (position * 11) % 370 for position in range(508)]
    for prompt, left in ((long, 4), ([*long, 9, 8, 7], 1)):
        (found,) = calm.beam_search(prompt, given := BeamSearchParams(3, 32))
        if left == 1:
            check(calm, prompt, given, found, max_tokens=left)
        assert [len(answer.tokens) for answer in found.sequences] == [512] * 3
        assert {answer.finish_reason for answer in found.sequences} == {FinishReason.LENGTH}
    with pytest.raises(ContextLengthError, match="prompt 1: "):
        calm.beam_search([PROMPTS[0], [5] * 512], given)


def test_the_limit_of_the_queue_is_asked_once_for_each_search(calm: LLM) -> None:
    """Three may wait, and eight run; ten beams are one search, and the searches that come later are let in."""
    given = BeamSearchParams(10, 3, ignore_eos=True)
    assert len(calm.beam_search(PROMPTS, given)) == 5
    with pytest.raises(QueueFullError):
        calm.beam_search(PROMPTS, given, concurrency_limit=5)


def test_streams_go_on_beside_a_search(calm: LLM) -> None:
    alone = "".join(output.outputs[0].text for output in calm.stream("hello", params(30)))
    given = BeamSearchParams(3, 10)
    stream = calm.stream("hello", params(30))
    text = next(stream).outputs[0].text
    (found,) = calm.beam_search(PROMPTS[1], given)
    check(calm, PROMPTS[1], given, found)
    assert text + "".join(output.outputs[0].text for output in stream) == alone


def test_an_error_in_the_middle_leaves_nothing_behind(calm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    take = BeamRequests.take

    def fail_later(self: BeamRequests, outputs: list[RequestOutput]) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise KeyboardInterrupt
        take(self, outputs)

    monkeypatch.setattr(BeamRequests, "take", fail_later)
    with pytest.raises(KeyboardInterrupt):
        calm.beam_search(PROMPTS[:3], BeamSearchParams(2, 8))


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_refused(calm: LLM) -> None:
    for limit in (0, True, 1.5):
        with pytest.raises(InvalidRequestError, match="concurrency_limit"):
            calm.beam_search("hello", BeamSearchParams(2, 2), concurrency_limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
        calm.beam_search("hello", SamplingParams())  # type: ignore[arg-type]
    intake = Intake(calm.get_tokenizer(), generation_config={}, eos_token_ids=frozenset({2}), vocab=384, seed=0, max_logprobs=5)
    assert intake.beam_request("a", BeamSearchParams(2, 8), arrival_s=0.0).params.logprobs == 4
    with pytest.raises(InvalidRequestError, match="beam_width 3 needs the 6 likeliest ids at each step, and the limit of this engine is 5"):
        intake.beam_request("a", BeamSearchParams(3, 8), arrival_s=0.0)


def test_a_failed_step_ends_the_search(calm: LLM) -> None:
    """With what there was before it."""
    given = BeamSearchParams(2, 8)
    request = calm._intake.beam_request(PROMPTS[1], given, arrival_s=0.0)
    for reason, error in ((FinishReason.ERROR, "NaN"), (FinishReason.ABORT, None)):
        search = BeamRequests(request, given, 500)
        (first,) = search.next_requests()
        assert (first.is_let_in, first.request_id) == (False, f"{request.request_id}#0.0")
        search.take([calm.generate({"prompt_token_ids": first.prompt_token_ids}, first.params)[0]])
        beams = search.next_requests()
        assert [(beam.is_let_in, beam.request_id) for beam in beams] == [(True, f"{request.request_id}#1.{index}") for index in (0, 1)]
        fine = calm.generate([{"prompt_token_ids": beam.prompt_token_ids} for beam in beams], first.params)[0]
        broken = RequestOutput(
            request_id="b",
            prompt=None,
            prompt_token_ids=[],
            outputs=[CompletionOutput(finish_reason=reason)],
            finished=True,
            metrics=RequestMetrics(arrival_s=0.0),
            error=error,
        )
        search.take([fine, broken])
        assert search.is_done
        found = search.output(calm.get_tokenizer())
        assert found.error == error
        assert [len(answer.output_token_ids) for answer in found.sequences] == [1, 1]
        assert {answer.finish_reason for answer in found.sequences} == {reason}


def test_answers_of_one_token_say_nothing_about_lengths(tiny: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the admission of others would count on all answers being short."""
    recorded: list[int] = []
    monkeypatch.setattr(OutputLengths, "record", lambda self, length: recorded.append(length))
    bench = tiny_bench(tiny)
    recorded.clear()
    bench.ask(PROMPTS[1], max_tokens=1)
    bench.ask(PROMPTS[1], max_tokens=2, ignore_eos=True)
    assert recorded == [2]


@pytest.mark.parametrize("num_pages", [4, 65])
def test_the_longest_prompt_is_the_longest_that_fits(tiny: Started, num_pages: int) -> None:
    """By the pool, or by the context."""
    scheduler = tiny_bench(tiny, num_pages=num_pages).engine.scheduler
    most = scheduler.most_prompt_tokens
    assert most == {4: 47, 65: 511}[num_pages]
    scheduler.check_fits(most)
    with pytest.raises(InvalidRequestError):
        scheduler.check_fits(most + 1)


def test_async_searches(async_llm: AsyncLLM, calm: LLM) -> None:
    """Several at once, beside an answer: what `LLM` finds. The name is in the requests of the steps."""
    assert {jaxpaged.BeamSearchParams, jaxpaged.BeamSearchOutput} == {BeamSearchParams, BeamSearchOutput}
    given = BeamSearchParams(3, 6)
    expected = calm.beam_search(PROMPTS[:3], given)

    async def work() -> None:
        searches = [async_llm.beam_search(prompt, given, f"search-{index}") for index, prompt in enumerate(PROMPTS[:3])]
        answer, *found = await asyncio.gather(async_llm.generate("hello", params()), *searches)
        assert [[one.tokens for one in output.sequences] for output in found] == [
            [one.tokens for one in output.sequences] for output in expected
        ]
        assert len(answer.outputs[0].token_ids) == 10
        with pytest.raises(ContextLengthError):
            await async_llm.beam_search([5] * 600, given)
        assert is_idle(async_llm)

    run(work)


def test_an_async_search_that_is_left_or_aborted(async_llm: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_begun(name: str) -> bool:
        return any(event.request_id.startswith(f"{name}#2.") for event in async_log.of(events.RequestQueued))

    async def work() -> None:
        slow_down(async_llm, monkeypatch, 0.05)
        given = BeamSearchParams(3, 400, ignore_eos=True)
        left = asyncio.ensure_future(async_llm.beam_search("hello", given, "left"))
        await wait_until(lambda: is_begun("left"))
        await async_llm.pause("keep", clear_cache=False)
        await wait_until(lambda: bool(async_llm._engine.unfinished_ids))
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await wait_until(lambda: not async_llm._engine.unfinished_ids)
        await async_llm.resume()
        stopped = asyncio.ensure_future(async_llm.beam_search("hello", given, "stopped"))
        await wait_until(lambda: is_begun("stopped"))
        await async_llm.pause("abort")
        found = await stopped
        assert {answer.finish_reason for answer in found.sequences} == {FinishReason.ABORT}
        assert len(found.sequences) == 3
        assert 2 <= len(found.sequences[0].output_token_ids) < 400
        await async_llm.resume()

    run(work)


@pytest.mark.parametrize("how", ["pause", "abort"])
def test_an_async_search_that_is_ended_between_two_steps(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """When it has no open request that could be aborted: the step that comes next is, and not kept for `resume`."""
    asked: list[int] = []

    def next_requests(search: BeamRequests, make: Callable[[BeamRequests], list[Request]] = BeamRequests.next_requests) -> list[Request]:
        asked.append(len(made := make(search)))
        if len(asked) == 3 and how == "pause":
            pausing = threading.Thread(target=asyncio.run, args=(async_llm.pause("abort"),))
            pausing.start()
            pausing.join()
        elif len(asked) == 3:
            async_llm.abort("ended")
        return made

    async def work() -> None:
        monkeypatch.setattr(BeamRequests, "next_requests", next_requests)
        found = await asyncio.wait_for(async_llm.beam_search("hello", BeamSearchParams(3, 400, ignore_eos=True), "ended"), 60)
        assert asked == [1, 3, 3]
        assert [(len(one.output_token_ids), one.finish_reason) for one in found.sequences] == [(2, FinishReason.ABORT)] * 3
        monkeypatch.undo()
        later = asyncio.ensure_future(async_llm.beam_search("hello", BeamSearchParams(2, 3, ignore_eos=True), "ended"))
        await async_llm.resume()
        assert {one.finish_reason for one in (await later).sequences} == {FinishReason.LENGTH}
        assert is_idle(async_llm)

    run(work)


def test_one_that_raises_takes_the_others_along() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise InvalidRequestError("no")

    async def work() -> None:
        with pytest.raises(InvalidRequestError):
            await all_or_none([wait(), fail(), wait()])
        assert ended == ["cancelled"] * 2

    run(work)


def test_an_engine_that_dies_ends_async_searches(mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        slow_down(mortal, monkeypatch, 0.05)
        search = asyncio.ensure_future(mortal.beam_search("hello", BeamSearchParams(3, 400, ignore_eos=True)))
        await asyncio.sleep(0.05)
        await mortal._thread.call(lambda engine: engine.die(RuntimeError("the device is lost")))
        with pytest.raises(EngineDeadError):
            await search

    run(work)
