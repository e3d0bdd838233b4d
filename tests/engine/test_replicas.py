"""Several engines behind one door: who gets what, that answers are those of one engine, and that one failing ends all."""

import asyncio
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged import async_llm, events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxpaged.intake import Intake
from jaxpaged.pool_map import fold
from jaxpaged.replicas import LoadSums, Replicas, pages_spoken_for
from jaxpaged.request import Request, RequestOutput, SamplingParams
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from server.prometheus_sink import PrometheusSink
from tests.event_log import EventLog
from tests.fakes import FailingRunner, Runner, ScriptRunner, free_talk
from tests.observability.samples import started
from tests.scripted_client import QUIET

pytestmark = pytest.mark.jax

PAGE = 4


class Door:
    """Engines behind one door, or one engine alone."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_engines: int,
        *,
        wrap: Callable[[int, ScriptRunner], Runner] = lambda _, runner: runner,
        max_in_flight: int = 2,
        **policy: Any,
    ) -> None:
        self.events = EventLog()
        sums = LoadSums(self.events)
        self.runners = [ScriptRunner(free_talk(60), vocab=tokenizer.vocab_size, page_size=PAGE, num_pages=60) for _ in range(num_engines)]
        engines = [
            Engine(
                wrap(index, runner),
                tokenizer,
                max_in_flight=max_in_flight,
                policy=SchedulerConfig(**policy),
                sink=sums.sink_of(index) if num_engines > 1 else self.events,
            )
            for index, runner in enumerate(self.runners)
        ]
        self.engine: Engine = engines[0] if num_engines == 1 else Replicas(engines, sums, self.events)
        self.intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset({2}), vocab=self.runners[0].vocab, seed=0)
        self.last: dict[str, RequestOutput] = {}

    def request(self, prompt: Any, request_id: str, max_tokens: int = 8) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self.intake.request(prompt, params, arrival_s=self.engine.clocks.monotonic(), request_id=request_id)

    def add(self, prompt: Any, request_id: str, max_tokens: int = 8) -> None:
        self.engine.add(self.request(prompt, request_id, max_tokens))

    def step(self) -> None:
        self.last |= {output.request_id: output for output in self.engine.step()}

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    @property
    def answers(self) -> dict[str, list[int]]:
        return {request_id: output.outputs[0].token_ids for request_id, output in self.last.items()}

    @property
    def owners(self) -> list[list[str]]:
        assert isinstance(self.engine, Replicas)
        return [sorted(engine.unfinished_ids) for engine in self.engine.engines]


def serve(door: Door, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    for index in range(30):
        prompt = [3 + index % 3] * rng.randint(1, 30) + [4 + index]
        door.add(prompt, f"r{index}", max_tokens=rng.randint(1, 30))
        for _ in range(rng.choice((0, 0, 1, 3))):
            door.step()
    door.run()
    return door.answers


@pytest.mark.parametrize("num_engines", [2, 4])
def test_answers_are_those_of_one_engine(script_tokenizer: Tokenizer, num_engines: int) -> None:
    alone = serve(Door(script_tokenizer, 1), 1)
    door = Door(script_tokenizer, num_engines)
    assert serve(door, 1) == alone
    assert all(runner.histories for runner in door.runners)
    assert (door.engine.pages.num_in_use, door.engine.num_unfinished, door.engine.has_step) == (0, 0, False)
    received, queued, finished = (
        [event.request_id for event in door.events.of(kind)]
        for kind in (events.RequestReceived, events.RequestQueued, events.RequestFinished)
    )
    assert sorted(received) == sorted(queued) == sorted(finished) == sorted(alone)


def test_requests_go_where_fewest_pages_are_spoken_for(script_tokenizer: Tokenizer) -> None:
    """Requests that wait count as well: all of these come before the first step."""
    door = Door(script_tokenizer, 2)
    for name, length in (("a", 40), ("b", 8), ("c", 8), ("d", 8), ("e", 20)):
        door.add(list(range(10, 10 + length)), name)
    assert door.owners == [["a"], ["b", "c", "d", "e"]]
    door.step()
    door.step()
    assert isinstance(door.engine, Replicas)
    first, second = door.engine.engines
    assert 0 < pages_spoken_for(first) < pages_spoken_for(second)
    door.add([200] * 9, "f")
    assert door.owners[0] == ["a", "f"]


def test_requests_go_where_most_of_them_is_cached(script_tokenizer: Tokenizer) -> None:
    door = Door(script_tokenizer, 2)
    one, other = list(range(10, 50)), list(range(60, 100))
    door.add(one, "one")
    door.add(other, "other")
    door.run()
    assert door.owners == [[], []]
    door.add([*other, 5], "like other")
    door.add([*other, 6], "also like other")
    door.add([*one, 6], "like one")
    door.add([*other[:8], *one], "a little like other")
    door.add({"prompt_token_ids": [*other, 6], "cache_salt": "x"}, "salted")
    assert door.owners == [["like one", "salted"], ["a little like other", "also like other", "like other"]]
    door.run()
    assert {event.request_id: event.num_cached_tokens for event in door.events.of(events.RequestFinished)}["like one"] == 40


def test_a_full_queue_sends_to_the_next_one(script_tokenizer: Tokenizer) -> None:
    door = Door(script_tokenizer, 2, max_num_queued_requests=1)
    door.add([7] * 5, "a")
    door.add([8] * 90, "b")
    assert door.owners == [["a"], ["b"]]
    with pytest.raises(QueueFullError):
        door.engine.scheduler.check_queue(3)
    with pytest.raises(QueueFullError):
        door.add([9], "c")
    assert [event.code for event in door.events.of(events.RequestRejected)] == ["queue_full"]
    door.step()
    door.engine.scheduler.check_queue(3)


def test_ids_are_known_at_the_door(script_tokenizer: Tokenizer) -> None:
    door = Door(script_tokenizer, 2)
    door.add([7] * 40, "a")
    with pytest.raises(InvalidRequestError, match="a"):
        door.add([8], "a")
    door.add([8], "b")
    assert door.engine.abort("nobody") is None
    output = door.engine.abort("b")
    assert output is not None
    assert output.request_id == "b"
    assert door.owners == [["a"], []]


def test_loads_are_told_of_all_together(script_tokenizer: Tokenizer) -> None:
    door = Door(script_tokenizer, 2)
    door.add([7] * 40, "a")
    door.add([8] * 40, "b")
    door.step()
    door.step()
    assert door.events.of(events.StepFinished)[-1].num_running == 2
    assert door.events.of(events.StepFinished)[-1].num_pages_total == 2 * 59
    door.run()
    last = door.events.of(events.StepFinished)[-1]
    assert (last.num_running, last.num_waiting, last.num_pages_in_use) == (0, 0, 0)


def test_each_engine_has_figures_of_its_own(script_tokenizer: Tokenizer) -> None:
    """Under vLLM's names, with the label `engine`, as in a replay of the log; ours are the sums."""
    door, sink = Door(script_tokenizer, 2), PrometheusSink("m")
    for length, name in ((40, "a"), (8, "b"), (8, "c"), (8, "d")):
        door.add(list(range(10, 10 + length)), name, max_tokens=4)
    door.step()
    door.step()
    assert door.owners == [["a"], ["b", "c", "d"]]
    door.add([200] * 30, "e")
    door.engine.control.pause("keep", clear_cache=False)

    def told() -> dict[str, Any]:
        return {family.name: family for family in text_string_to_metric_families(generate_latest(sink.registry).decode())}

    def by_engine(name: str, **labels: str) -> list[float]:
        samples = [sample for sample in told()[f"vllm:{name}"].samples if labels.items() <= sample.labels.items()]
        assert [sample.labels["engine"] for sample in samples] == ["0", "1"], samples
        return [sample.value for sample in samples]

    sink(started(num_engines=2, num_pages=59))
    assert by_engine("num_requests_running") == by_engine("kv_cache_usage_perc") == [0, 0]
    num_before = len(door.events)
    for event in door.events:
        sink(events.from_line(events.to_line(event)))
    assert isinstance(door.engine, Replicas)
    pools = [engine.pages for engine in door.engine.engines]
    assert by_engine("num_requests_running") == [1, 3]
    assert by_engine("num_requests_waiting") == [0, 1]
    assert by_engine("kv_cache_usage_perc") == [pool.num_in_use / 59 for pool in pools]
    assert all(pool.num_in_use for pool in pools)
    door.engine.control.resume()
    door.run()
    for event in door.events[num_before:]:
        sink(event)
    assert by_engine("num_requests_running") == by_engine("num_requests_waiting") == by_engine("kv_cache_usage_perc") == [0, 0]
    assert by_engine("generation_tokens") == [4, 3 * 4 + 8]
    assert by_engine("prompt_tokens") == [40, 54]
    assert by_engine("request_success", finished_reason="length") == [1, 4]
    assert told()["jaxpaged_generation_tokens"].samples[0].value == 24
    counts = {s.labels["engine"]: s.value for s in told()["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")}
    assert counts == {"0": 1, "1": 4}
    door.engine.control.pause("abort")
    assert {event.engine for event in door.events.of(events.LoadChanged)} == {0, 1}, "each tells its own"


def test_the_map_of_the_pool_is_that_of_all(script_tokenizer: Tokenizer) -> None:
    door = Door(script_tokenizer, 2)
    door.add([7] * 40, "a")
    door.add([8] * 9, "b")
    door.step()
    door.step()
    assert isinstance(door.engine, Replicas)
    copy = door.engine.copy_pool()
    first, second = (engine.copy_pool() for engine in door.engine.engines)
    assert [owner.request_id for owner in copy.owners] == ["a", "b"]
    assert [owner.slot for owner in copy.owners] == [
        first.owners[0].slot,
        second.owners[0].slot + door.engine.engines[0].scheduler.max_num_seqs,
    ]
    both, one, other = fold(copy), fold(first), fold(second)
    assert both.used == one.used + other.used
    assert both.used.count("9") == door.engine.pages.num_in_use
    door.run()
    assert fold(door.engine.copy_pool()).cached.count("9") == door.engine.pages.num_cached_idle > 0


def test_one_that_fails_ends_all(script_tokenizer: Tokenizer) -> None:
    """A step in which one dies may have brought ends of others: those are told as well."""

    def fails_later(index: int, runner: ScriptRunner) -> Runner:
        def before(step: int) -> None:
            if index == 1 and step == 4:
                raise RuntimeError("lost")

        return FailingRunner(runner, before=before)

    door = Door(script_tokenizer, 2, wrap=fails_later, max_in_flight=1)
    door.add([7] * 5, "a", max_tokens=4)
    door.add([8] * 5, "b", max_tokens=20)
    with pytest.raises(EngineDeadError, match="lost"):
        door.run()
    ended = {output.request_id: str(output.outputs[0].finish_reason) for output in door.engine.drain_failed()}
    assert ended == {"a": "length", "b": "error"}
    assert door.engine.is_dead
    with pytest.raises(EngineDeadError):
        door.engine.check_alive()
    door.engine.close()
    door.engine.close()
    assert [event.state for event in door.events.of(events.HealthChanged)] == ["dead"]
    assert [event.message for event in door.events.of(events.EngineStopped)] == ["a replica failed"]
    assert [runner.num_closed for runner in door.runners] == [1, 1]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_a_pause_is_everybodys(script_tokenizer: Tokenizer, mode: Any) -> None:
    alone = serve(Door(script_tokenizer, 1), 2)
    door = Door(script_tokenizer, 2)
    rng = random.Random(2)
    for index in range(30):
        door.add([3 + index % 3] * rng.randint(1, 30) + [4 + index], f"r{index}", max_tokens=rng.randint(1, 30))
        for _ in range(rng.choice((0, 0, 1, 3))):
            door.step()
        if index == 15:
            door.last |= {output.request_id: output for output in door.engine.control.pause(mode)}
            assert door.engine.control.is_paused
            assert not door.engine.has_step
            door.engine.probe()
    door.engine.control.resume()
    door.run()
    assert door.answers == alone
    door.engine.reset_prefix_cache()
    assert (door.engine.pages.num_cached_idle, door.engine.pages.num_in_use) == (0, 0)
    assert [event.state for event in door.events.of(events.HealthChanged)][-2:] == ["paused", "ready"]


def test_tasks_are_served_by_all(script_tokenizer: Tokenizer) -> None:
    """Through `AsyncLLM`, as the server calls it: answers, a pause, the map of the pool, the end."""
    prompts = [[10 + index] * (5 + index) for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    alone = Door(script_tokenizer, 1)
    for index, prompt in enumerate(prompts):
        alone.add(prompt, str(index), max_tokens=9)
    alone.run()
    door = Door(script_tokenizer, 2)
    with mock.patch.object(async_llm, "start_engine", return_value=Started(door.engine, door.intake)):
        client = AsyncLLM(config=QUIET, sinks=[])

    async def work() -> list[list[int]]:
        generations = [client.generate({"prompt_token_ids": prompt}, params) for prompt in prompts]
        outputs = await asyncio.gather(*generations)
        await client.pause_generation()
        assert await client.is_paused()
        await client.resume_generation()
        assert (await client.pool_copy()).num_usable == 2 * 59
        return [output.outputs[0].token_ids for output in outputs]

    with client:
        assert asyncio.run(work()) == [alone.answers[str(index)] for index in range(6)]
    assert all(runner.histories for runner in door.runners)
    assert [runner.num_closed for runner in door.runners] == [1, 1]
