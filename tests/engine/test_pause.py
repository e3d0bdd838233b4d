"""Pausing and resetting an engine: what becomes of requests that are there, of those that come, and that nothing is lost."""

from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.config import SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.metrics import EngineMetrics
from jaxpaged.request import FinishReason, SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.event_log import EventLog
from tests.fakes import Bench, ScriptRunner, free_talk
from tests.scheduler.rules import Hopeful

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("in_flight")]

VOCAB = 259
TALK = free_talk(VOCAB, avoid=(0, 1, 2))
PROMPTS = [[10 + key] * 21 for key in range(5)]


@pytest.fixture
def bench(script_tokenizer: Tokenizer) -> Bench:
    """Three rows, pages of 4."""
    return Bench(ScriptRunner(TALK, vocab=VOCAB, max_num_seqs=3, page_size=4), script_tokenizer, eos_token_ids=(2,))


def pause(bench: Bench, mode: Any = "abort", *, clear_cache: bool = True) -> None:
    bench._take(bench.engine.control.pause(mode, clear_cache=clear_cache))
    bench.engine.scheduler.check()


def expected(bench: Bench) -> list[list[int]]:
    """What each prompt is answered with, alone."""
    answers = [bench.ask(prompt, max_tokens=12).outputs[0].token_ids for prompt in PROMPTS]
    bench.engine.reset_prefix_cache()
    return answers


def num_steps(bench: Bench) -> int:
    return len(bench.events.of(events.StepFinished))


def test_abort_ends_all_and_takes_new_ones_after_resume(bench: Bench) -> None:
    answers = expected(bench)
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    for _ in range(4):
        bench.step()
    pause(bench)
    assert [bench.last[request_id].outputs[0].finish_reason for request_id in ids] == [FinishReason.ABORT] * 5
    assert (bench.engine.has_work, bench.pages.num_in_use, bench.pages.num_cached_idle) == (False, 0, 0)
    late = bench.add(PROMPTS[0], max_tokens=12)
    before = num_steps(bench)
    assert [bench.step() for _ in range(5)] == [[]] * 5
    assert (bench.engine.has_step, bench.engine.has_work, num_steps(bench) - before) == (False, True, 0)
    bench.engine.control.resume()
    bench.run()
    assert bench.ids(late) == answers[0]
    bench.after_check()


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("num_before", [1, 2, 5, 9])
def test_kept_requests_go_on_where_they_were(bench: Bench, clear_cache: bool, num_before: int) -> None:
    """With the cache cleared they are computed again, to the same answers; without, they keep their pages."""
    answers = expected(bench)
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    for _ in range(num_before):
        bench.step()
    num_running = bench.engine.scheduler.num_running
    said = len(bench.events.of(events.RequestPreempted))
    pause(bench, "keep", clear_cache=clear_cache)
    in_use = bench.pages.num_in_use
    assert (in_use == 0) == clear_cache
    assert (bench.engine.has_step, bench.engine.num_in_flight) == (False, 0)
    lost = bench.events.of(events.RequestPreempted)[said:]
    assert len(lost) == (num_running if clear_cache else 0)
    late = bench.add([99] * 5, max_tokens=3)
    assert bench.step() == []
    assert bench.pages.num_in_use == in_use
    for _ in range(2):
        bench.engine.control.resume()
    bench.run()
    assert [bench.ids(request_id) for request_id in ids] == answers
    assert len(bench.ids(late)) == 3
    bench.after_check()


def test_kept_many_times_over(bench: Bench) -> None:
    """More often than any request may be preempted for its pages, with samples and steps of all kinds between."""
    answers = expected(bench)
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    group = bench.add([7] * 19, n=3, max_tokens=12)
    alone = Bench(ScriptRunner(TALK, vocab=VOCAB), bench.tokenizer).ask([7] * 19, max_tokens=12).outputs[0].token_ids
    num_pauses = 0
    while bench.engine.has_work:
        bench.step()
        pause(bench, "keep", clear_cache=num_pauses % 5 < 2)
        bench.engine.control.resume()
        num_pauses += 1
        # An operator's wish is none of a request's preemptions, which would make it a privileged one.
        assert all(sequence.num_preemptions == 0 for sequence in bench.engine.scheduler.sequences)
    assert num_pauses > 10
    assert [bench.ids(request_id) for request_id in ids] == answers
    assert [answer.token_ids for answer in bench.last[group].outputs] == [alone] * 3
    bench.after_check()


def test_wait_lets_those_that_run_come_to_their_ends(bench: Bench) -> None:
    answers = expected(bench)
    lengths = [6, 9, 12, 12, 12]
    ids = [bench.add(prompt, max_tokens=length) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    for _ in range(3):
        bench.step()
    running = {sequence.request_id for sequence in bench.engine.scheduler.sequences[: bench.engine.scheduler.num_running]}
    assert len(running) == 3
    pause(bench, "wait")
    assert {request_id for request_id in ids if request_id in bench.last} == running
    assert [bench.ids(request_id) for request_id in ids[:3]] == [answers[0][:6], answers[1][:9], answers[2]]
    assert (bench.engine.scheduler.num_waiting, bench.engine.has_step) == (2, False)
    bench.engine.control.resume()
    bench.run()
    assert [bench.ids(request_id) for request_id in ids[3:]] == answers[3:]
    states = [event.state for event in bench.events.of(events.HealthChanged)]
    assert states == ["draining", "paused", "ready"]
    bench.after_check()


def test_wait_in_a_pool_that_is_too_small(script_tokenizer: Tokenizer) -> None:
    """Whoever loses its pages meanwhile has begun, and comes to its end all the same; one that has not begun waits."""
    runner = ScriptRunner(TALK, vocab=VOCAB, max_num_seqs=3, page_size=4, num_pages=16)
    bench = Bench(runner, script_tokenizer, eos_token_ids=(2,))
    bench.engine.scheduler._admission.lengths = Hopeful()  # so that all three are let in
    ids = [bench.add([10 + key] * 5, max_tokens=30) for key in range(3)]
    for _ in range(4):
        bench.step()
    assert (bench.engine.scheduler.num_running, bench.events.of(events.RequestPreempted)) == (3, [])
    late = bench.add([50] * 5, max_tokens=3, priority=-1)
    pause(bench, "wait")
    # The pool has 15 pages, and each answer comes to need 9.
    lost = [event.request_id for event in bench.events.of(events.RequestPreempted)]
    assert lost == [ids[2], ids[1]]
    assert [len(bench.ids(request_id)) for request_id in ids] == [30, 30, 30]
    assert bench.engine.unfinished_ids == [late]
    bench.engine.control.resume()
    bench.run()
    assert len(bench.ids(late)) == 3
    bench.after_check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_wait_takes_all_samples_of_a_request_that_has_begun(script_tokenizer: Tokenizer, prefix_caching: bool) -> None:
    """One row, so that samples run one after another; whichever runs when the pause comes, or has just ended."""
    runner = ScriptRunner(TALK, vocab=VOCAB, max_num_seqs=1, page_size=4)
    bench = Bench(runner, script_tokenizer, eos_token_ids=(2,), enable_prefix_caching=prefix_caching)
    alone = bench.ask([7] * 19, max_tokens=8).outputs[0].token_ids
    for num_before in range(1, 33, 3):
        bench.engine.reset_prefix_cache()
        group = bench.add([7] * 19, n=4, max_tokens=8)
        for _ in range(num_before):
            bench.step()
        assert group not in bench.last
        late = [bench.add([9] * 19, n=2, max_tokens=8, priority=-1), bench.add([8] * 5, max_tokens=3)]
        pause(bench, "wait")
        assert [answer.token_ids for answer in bench.last[group].outputs] == [alone] * 4
        assert bench.engine.unfinished_ids == late
        bench.engine.control.resume()
        bench.run()
        assert all(bench.last[request_id].finished for request_id in late)
    bench.after_check()


def test_wait_leaves_a_request_alone_of_which_no_sample_has_begun(bench: Bench) -> None:
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS[:3]]
    group = bench.add([7] * 19, n=3, max_tokens=3)
    bench.step()
    pause(bench, "wait")
    assert bench.engine.unfinished_ids == [group]
    assert [len(bench.ids(request_id)) for request_id in ids] == [12, 12, 12]
    bench.engine.control.resume()
    bench.run()
    bench.after_check()


def test_those_that_were_kept_come_to_their_ends_in_a_wait(bench: Bench) -> None:
    """Also when they have lost their pages to the first pause, and are computed again."""
    answers = expected(bench)
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    bench.step()
    bench.step()
    pause(bench, "keep", clear_cache=True)
    assert bench.engine.scheduler.num_running == 0
    pause(bench, "wait")
    assert [bench.ids(request_id) for request_id in ids[:3]] == answers[:3]
    assert bench.engine.unfinished_ids == ids[3:]
    bench.engine.control.resume()
    bench.run()
    assert [bench.ids(request_id) for request_id in ids] == answers
    bench.after_check()


def test_modes_one_after_the_other(bench: Bench) -> None:
    """Kept, then drained, then aborted; and each of them twice."""
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    bench.step()
    for _ in range(2):
        pause(bench, "keep", clear_cache=False)
    for _ in range(2):
        pause(bench, "wait")
    assert sorted(request_id for request_id in ids if request_id in bench.last) == sorted(ids[:3])
    for _ in range(2):
        pause(bench, "abort")
    assert bench.engine.num_unfinished == 0
    for _ in range(2):
        bench.engine.control.resume()
    bench.after_check()


def test_aborts_and_time_limits_work_while_paused(script_tokenizer: Tokenizer) -> None:
    times = [100.0]
    clocks = Clocks(monotonic=lambda: times[0], wall=lambda: times[0])
    log = EventLog()
    policy = SchedulerConfig(request_timeout_s=5.0)
    runner = ScriptRunner(TALK, vocab=VOCAB, max_num_seqs=3)
    engine = Engine(runner, script_tokenizer, policy=policy, sink=log, clocks=clocks)
    intake = Bench(runner, script_tokenizer).intake

    def request(key: int) -> Any:
        return intake.request([10 + key] * 9, SamplingParams(temperature=0.0, max_tokens=40), arrival_s=times[0], request_id=f"r{key}")

    for key in range(4):
        engine.add(request(key))
    engine.step()
    engine.control.pause("keep", clear_cache=False)
    times[0] = 103.0
    engine.add(request(4))
    gone = engine.abort("r0")
    assert gone is not None
    assert gone.outputs[0].finish_reason is FinishReason.ABORT
    assert (engine.has_step, engine.next_deadline_s) == (False, 105.0)
    times[0] = 105.5
    assert engine.has_step
    assert sorted(output.request_id for output in engine.step()) == ["r1", "r2", "r3"]
    assert (engine.has_step, engine.unfinished_ids, engine.pages.num_in_use) == (False, ["r4"], 0)
    engine.close()
    assert [event.reason for event in log.of(events.RequestFinished)] == ["abort"] * 5


@pytest.mark.parametrize("reset_running_requests", [False, True])
def test_a_reset_while_requests_run(bench: Bench, reset_running_requests: bool) -> None:
    """With steps in flight, too: answers stay, and nothing computed before the reset is found after it."""
    answers = expected(bench)
    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    for _ in range(5):
        bench.step()
    bench.engine.control.reset_prefix_cache(reset_running_requests=reset_running_requests)
    bench.engine.scheduler.check()
    assert bench.pages.num_cached_idle == 0
    assert (bench.pages.num_in_use == 0) == reset_running_requests
    again = bench.add(PROMPTS[0], max_tokens=12)
    bench.run()
    assert [bench.ids(request_id) for request_id in [*ids, again]] == [*answers, answers[0]]
    bench.after_check()


def test_gauges_are_right_without_a_step(script_tokenizer: Tokenizer) -> None:
    metrics = EngineMetrics()
    engine = Engine(ScriptRunner(TALK, vocab=VOCAB, max_num_seqs=2), script_tokenizer, sink=metrics)
    intake = Bench(ScriptRunner(TALK, vocab=VOCAB), script_tokenizer).intake

    def gauges() -> tuple[float, float, bool]:
        values = {metric.name: metric.value for metric in metrics.snapshot() if metric.kind == "gauge"}
        used = values["jaxpaged_kv_cache_usage_ratio"]
        return values["jaxpaged_num_requests_running"], values["jaxpaged_num_requests_waiting"], used > 0

    for key in range(3):
        engine.add(intake.request([10 + key] * 9, SamplingParams(max_tokens=9), arrival_s=0.0, request_id=f"r{key}"))
    engine.step()
    while engine.num_in_flight:
        engine.step()
        if gauges()[0] == 2:
            break
    assert gauges() == (2, 1, True)
    engine.abort("r2")
    assert gauges() == (2, 0, True)
    engine.abort("r0")
    engine.abort("r1")
    assert gauges() == (0, 0, False)
    engine.control.pause()
    engine.add(intake.request([9], SamplingParams(), arrival_s=0.0))
    assert gauges() == (0, 1, False)
    values = {metric.name: metric.value for metric in metrics.snapshot()}
    assert (values["jaxpaged_engine_is_paused"], values["jaxpaged_engine_is_sleeping"]) == (1, 0)
