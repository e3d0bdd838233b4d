"""Several answers to one prompt (`n`): each that of a request of its own, over pages that they share; one request to whoever asked."""

import asyncio
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.clocks import Clocks
from jaxpaged.config import SchedulerConfig
from jaxpaged.detokenizer import Detokenizer
from jaxpaged.engine import Engine
from jaxpaged.errors import InvalidRequestError, QueueFullError
from jaxpaged.mailbox import merge_deltas
from jaxpaged.request import (
    MAX_SAMPLES,
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    samples_of,
)
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from tests.engine.async_bench import is_idle, params, run, wait_until
from tests.engine.conftest import tiny_bench
from tests.event_log import EventLog
from tests.fakes import Bench, ScriptRunner, free_talk

pytestmark = pytest.mark.jax

PROMPT = list(range(5, 45))  # two whole pages of 16 and a half
WARM = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12}


def samples(bench: Bench, request_id: str) -> list[list[int]]:
    """The ids of each answer of a finished request."""
    outputs = bench.last[request_id].outputs
    assert [answer.index for answer in outputs] == list(range(len(outputs)))
    return [answer.token_ids for answer in outputs]


def alone(bench: Bench, prompt: list[int], n: int, **fields: Any) -> list[list[int]]:
    """The answers of n requests of one answer each, with the seeds that the samples have."""
    request = bench.intake.request(prompt, SamplingParams(**fields), arrival_s=0.0)
    return [bench.ask(prompt, **{**fields, "seed": sample.seed}).outputs[0].token_ids for sample in samples_of(request, n)]


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_samples_are_those_of_separate_requests(tiny: Started, enable_prefix_caching: bool) -> None:
    bench = tiny_bench(tiny, enable_prefix_caching=enable_prefix_caching)
    expected = alone(bench, PROMPT, 5, seed=11, **WARM)
    assert len({tuple(ids) for ids in expected}) == 5
    bench.engine.reset_prefix_cache()
    bench.events.clear()
    request_id = bench.add(PROMPT, n=5, seed=11, **WARM)
    other = bench.add("something else", seed=12, **WARM)
    bench.run()
    assert samples(bench, request_id) == expected
    assert bench.ask(PROMPT, n=1, seed=11, **WARM).outputs[0].token_ids == expected[0]
    again = bench.ask(PROMPT, n=5, seed=11, **WARM)
    assert [answer.token_ids for answer in again.outputs] == expected
    last = bench.last[request_id]
    assert (last.finished, last.prompt_token_ids, last.error) == (True, PROMPT, None)
    # The first computes the prompt; the others find its two whole pages, if there is a cache to find them in.
    admitted = {event.request_id: event.num_cached_tokens for event in bench.events.of(events.RequestScheduled)}
    found = 32 if enable_prefix_caching else 0
    assert [admitted[f"{request_id}#{index}"] for index in range(5)] == [0] + [found] * 4
    assert last.num_cached_tokens == 0
    assert {event.request_id for event in bench.events.of(events.RequestFinished)} >= {request_id, other}


def test_unseeded_samples_differ_and_leave_others_their_streams(tiny: Started) -> None:
    bench = tiny_bench(tiny)
    first = [answer.token_ids for answer in bench.ask(PROMPT, n=3, **WARM).outputs]
    assert len({tuple(ids) for ids in first}) == 3
    assert [answer.token_ids for answer in bench.ask(PROMPT, n=3, **WARM).outputs] != first
    # One request is one draw of a seed, however many samples it has.
    seeds = [tiny_bench(tiny).intake.request(PROMPT, SamplingParams(n=n), arrival_s=0.0).seed for n in (1, 9)]
    assert seeds[0] == seeds[1]


def test_greedy_samples_are_equal(tiny: Started) -> None:
    bench = tiny_bench(tiny)
    answers = bench.ask(PROMPT, n=3, temperature=0.0, ignore_eos=True, max_tokens=9).outputs
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert len(answers[0].token_ids) == 9
    assert len({answer.text for answer in answers}) == 1


def test_pages_of_the_prompt_are_held_once(tiny: Started) -> None:
    """Two whole pages for all, and what each has beyond them for itself; all of it comes back."""
    bench = tiny_bench(tiny)
    bench.add(PROMPT, n=6, temperature=1.0, ignore_eos=True, max_tokens=20)
    for _ in range(6):
        bench.step()
    assert bench.engine.scheduler.num_running == 6
    tables = [sequence.pages for sequence in bench.engine.scheduler.sequences]
    assert all(table[:2] == tables[0][:2] for table in tables)
    own = [page for table in tables for page in table[2:]]
    assert len(own) == len(set(own)) == bench.pages.num_in_use - 2
    assert [bench.pages.ref_count(page) for page in tables[0][:2]] == [6, 6]
    bench.run()
    bench.after_check()


def test_one_request_is_said_once(tiny: Started) -> None:
    bench = tiny_bench(tiny)
    bench.events.clear()
    request_id = bench.add(PROMPT, n=3, seed=1, **WARM)
    bench.run()
    told = [type(event).__name__ for event in bench.events if not isinstance(event, events.StepFinished)]
    assert {name: told.count(name) for name in told} == {
        "RequestReceived": 1,
        "RequestQueued": 1,
        "RequestScheduled": 3,
        "RequestFirstToken": 1,
        "RequestFinished": 1,
    }
    (finished,) = bench.events.of(events.RequestFinished)
    assert (finished.request_id, finished.reason, finished.num_samples) == (request_id, "length", 3)
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (len(PROMPT), 36)


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_outputs_on_the_way(tiny: Started, kind: RequestOutputKind) -> None:
    """Deltas hold the answers that moved, cumulative outputs hold all; put together both are the last ones."""
    bench = tiny_bench(tiny, max_num_seqs=4)
    expected = [answer.token_ids for answer in bench.ask(PROMPT, n=6, seed=3, **WARM).outputs]
    request_id = bench.add(PROMPT, n=6, seed=3, output_kind=kind, **WARM)
    bench.run()
    outputs = bench.outputs[request_id]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.DELTA:
        # Six answers have four rows; the prompt is cached, so all rows are taken soon after the first.
        assert len(outputs[3].outputs) == 4
        assert max(len(output.outputs) for output in outputs) == 4
        assert all(answer.token_ids for output in outputs for answer in output.outputs)
        ends = [answer.index for output in outputs for answer in output.outputs if answer.finish_reason is not None]
        assert sorted(ends) == list(range(6))
        joined = outputs[0]
        for output in outputs[1:]:
            joined = merge_deltas(joined, output)
        outputs = [joined]
    else:
        assert all([answer.index for answer in output.outputs] == list(range(6)) for output in outputs)
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
    assert [answer.token_ids for answer in outputs[-1].outputs] == expected
    assert [answer.text for answer in outputs[-1].outputs] == [answer.text for answer in bench.ask(PROMPT, n=6, seed=3, **WARM).outputs]


def test_deltas_are_merged_by_index() -> None:
    def delta(finished: bool, **texts: str) -> RequestOutput:
        outputs = [CompletionOutput(index=int(name[1:]), text=text, token_ids=[ord(text)]) for name, text in texts.items()]
        template = samples_template()
        return RequestOutput(**{**template, "outputs": outputs, "finished": finished})

    merged = merge_deltas(delta(False, i0="a", i2="c"), delta(True, i0="b", i1="d"))
    assert [(answer.index, answer.text, answer.token_ids) for answer in merged.outputs] == [
        (0, "ab", [97, 98]),
        (1, "d", [100]),
        (2, "c", [99]),
    ]
    assert merged.finished


def samples_template() -> dict[str, Any]:
    return {"request_id": "x", "prompt": None, "prompt_token_ids": [1], "metrics": RequestMetrics(arrival_s=0.0)}


VOCAB = 259
TALK = free_talk(VOCAB, avoid=(0, 1, 2))


def script(tokenizer: Tokenizer, **options: Any) -> Bench:
    return Bench(ScriptRunner(TALK, vocab=VOCAB, **options), tokenizer, eos_token_ids=(2,))


@pytest.mark.usefixtures("in_flight")
def test_more_samples_than_rows_and_pages(script_tokenizer: Tokenizer) -> None:
    """128 answers of 2 rows and 11 pages: they queue, and every page comes back."""
    bench = script(script_tokenizer, max_num_seqs=2, num_pages=12, page_size=4)
    answers = bench.ask([9] * 10, n=MAX_SAMPLES, max_tokens=5).outputs
    assert len(answers) == MAX_SAMPLES
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    bench.after_check()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.usefixtures("in_flight")
def test_an_abort_ends_all(script_tokenizer: Tokenizer, num_steps: int) -> None:
    bench = script(script_tokenizer, max_num_seqs=3, page_size=4)
    request_id = bench.add([9] * 23, n=5, max_tokens=50, output_kind=RequestOutputKind.DELTA)
    for _ in range(num_steps):
        bench.step()
    assert bench.engine.abort(f"{request_id}#0") is None, "a sample is not a request"
    last = bench.abort(request_id)
    assert last is not None
    assert last.finished
    assert [(answer.index, answer.finish_reason) for answer in last.outputs] == [(index, FinishReason.ABORT) for index in range(5)]
    assert bench.abort(request_id) is None
    bench.run()
    bench.after_check()


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize("method", ["append", "finish"])
def test_a_sample_that_fails_fails_the_request(script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """In the middle of its text (7th token of any), or in the last of it (2nd answer that ends)."""
    inner = getattr(Detokenizer, method)
    num_calls = 0

    def raise_once(self: Detokenizer, *args: Any) -> str:
        nonlocal num_calls
        if self._min_tokens == 1:  # marks it for the fault
            num_calls += 1
            if num_calls == (7 if method == "append" else 2):
                raise RuntimeError("no text for this")
        return inner(self, *args)

    monkeypatch.setattr(Detokenizer, method, raise_once)
    bench = script(script_tokenizer, max_num_seqs=8)
    request_id = bench.add([9] * 23, n=3, max_tokens=20, min_tokens=1)
    other = bench.add([8] * 23, n=2, max_tokens=20)
    bench.run()
    last = bench.last[request_id]
    assert last.error == "the answer's text could not be made: no text for this"
    reasons = [answer.finish_reason for answer in last.outputs]
    # An answer that had ended before keeps its end.
    assert reasons.count(FinishReason.ERROR) == (3 if method == "append" else 2)
    assert [len(ids) for ids in samples(bench, other)] == [20, 20]
    bench.after_check()


def test_the_least_happy_end_is_the_requests(script_tokenizer: Tokenizer) -> None:
    """One answer stops, the others go on to their length."""
    bench = script(script_tokenizer, max_num_seqs=8)
    request_id = bench.add([9] * 5, n=3, max_tokens=6)
    bench.step()
    bench.step()
    first = bench.engine.scheduler.sequences[0]
    bench.engine.scheduler.finish(first, FinishReason.STOP, "enough")
    row_answer = bench.engine._requests._by_sequence[first.request_id]
    bench.engine._requests._end_text(*row_answer)
    bench.run()
    reasons = [answer.finish_reason for answer in bench.last[request_id].outputs]
    assert sorted(map(str, reasons)) == ["length", "length", "stop"]
    assert [event.reason for event in bench.events.of(events.RequestFinished)][-1] == "length"


def test_ids_of_samples_are_in_use(script_tokenizer: Tokenizer) -> None:
    bench = script(script_tokenizer)
    bench.add([9] * 5, n=2, request_id="x")
    for taken in ("x", "x#0", "x#1"):
        with pytest.raises(InvalidRequestError, match=f"'{taken}' is already in use"):
            bench.add([9], request_id=taken)
    bench.add([9], request_id="y#1")
    with pytest.raises(InvalidRequestError, match="'y#1' is already in use"):
        bench.add([9], n=2, request_id="y")
    bench.run()
    bench.ask([9], request_id="x#1")
    bench.after_check()


def test_a_full_queue_takes_all_samples_or_none(script_tokenizer: Tokenizer) -> None:
    policy = SchedulerConfig(max_num_queued_requests=2)
    bench = Bench(ScriptRunner(TALK, vocab=VOCAB), script_tokenizer, eos_token_ids=(2,), policy=policy)
    bench.add([9] * 5, n=4, request_id="x")
    with pytest.raises(QueueFullError, match="4 requests are waiting"):
        bench.add([9] * 5, n=2)
    assert bench.engine.scheduler.num_waiting == 4
    bench.run()
    assert len(samples(bench, "x")) == 4
    bench.after_check()


@pytest.mark.parametrize("n", [0, -1, MAX_SAMPLES + 1, 10**9])
def test_n_has_limits(n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"n must be between 1 and 128, got {n}"):
        SamplingParams(n=n)


def test_best_of_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="best_of is not supported: ask for n answers"):
        SamplingParams(n=2, best_of=3)


def test_several_answers_through_the_async_api(async_llm: AsyncLLM, async_log: EventLog) -> None:
    async def work() -> None:
        warm = params(12, n=3, temperature=1.0, seed=5)
        last = await async_llm.generate("hello there", warm)
        assert [answer.index for answer in last.outputs] == [0, 1, 2]
        texts = dict.fromkeys(range(3), "")
        async for output in async_llm.stream("hello there", warm):
            for answer in output.outputs:
                texts[answer.index] += answer.text
        assert texts == {answer.index: answer.text for answer in last.outputs}
        one = await async_llm.generate("hello there", params(12, temperature=1.0, seed=5))
        assert one.outputs[0].token_ids == last.outputs[0].token_ids
        slow = async_llm.stream("hello there", warm)
        outputs = [await anext(slow)]
        await wait_until(lambda: is_idle(async_llm))
        outputs += [output async for output in slow]
        joined = outputs[0]
        for output in outputs[1:]:
            joined = merge_deltas(joined, output)
        assert [answer.token_ids for answer in joined.outputs] == [answer.token_ids for answer in last.outputs]
        stream = async_llm.stream("hello there", params(300, n=4))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await wait_until(lambda: is_idle(async_llm))
        assert async_log.of(events.RequestFinished)[-1].reason == "abort"
        await asyncio.sleep(0)

    run(work)


class Hand(list[float]):
    """A clock that is moved by hand."""

    def __call__(self) -> float:
        return self[0]


@pytest.mark.parametrize(("limits", "ends_all"), [({"queue_timeout_s": 5.0}, False), ({"request_timeout_s": 5.0}, True)])
def test_time_limits_are_the_requests(script_tokenizer: Tokenizer, limits: dict[str, float], ends_all: bool) -> None:
    """A request that was started does not end because one of its samples waits for a row; one that takes too long ends as a whole."""
    now = Hand([100.0])
    clocks = Clocks(monotonic=now, wall=now)
    log = EventLog()
    runner = ScriptRunner(TALK, vocab=VOCAB, max_num_seqs=2)
    engine = Engine(runner, script_tokenizer, policy=SchedulerConfig(**limits), sink=log, clocks=clocks)
    bench = Bench(runner, script_tokenizer)
    request = bench.intake.request([9] * 5, SamplingParams(n=3, max_tokens=8, temperature=0.0), arrival_s=100.0)
    engine.add(request)
    engine.step()
    now[0] = 106.0
    outputs = [output for _ in range(30) for output in engine.step()]
    assert outputs[-1].finished
    assert [event.reason for event in log.of(events.RequestFinished)] == ["abort" if ends_all else "length"]
    if ends_all:
        assert outputs[-1].error == "The request took longer than 5 s (request_timeout_s)"
        assert {answer.finish_reason for answer in outputs[-1].outputs} == {FinishReason.ABORT}
    else:
        assert [len(answer.token_ids) for answer in outputs[-1].outputs] == [8, 8, 8]
        # Of one that nobody has started, its time in the queue counts.
        waiting = bench.intake.request([9] * 5, SamplingParams(n=2, max_tokens=8, temperature=0.0), arrival_s=106.0)
        engine.add(waiting)
        now[0] = 112.0
        assert [output.error for output in engine.step()] == ["The request waited 5 s and was not started (queue_timeout_s)"]
    assert engine.num_unfinished == 0
    engine.scheduler.check()
