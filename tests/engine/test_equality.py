"""Batch = alone, chunked = whole, preempted = not, prefix-cached = not, overlapped steps = not, on the real model in float32.

The first run is each prompt alone, without a prefix cache, one step after another; in the others two steps are in flight. Every
step of every run is checked: the books of scheduler and pool, the pool's buffers, which must never move, and that nothing is compiled.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

from jaxpaged import events
from jaxpaged.programs import COMPILE_EVENT
from jaxpaged.request import Request, SamplingParams
from jaxpaged.start import Started
from tests.engine.conftest import real_bench, tiny_bench
from tests.equality import TIE_MARGIN, Equality
from tests.fakes import Bench, Canary
from tests.tiny_model import CORPUS

pytestmark = [pytest.mark.jax, pytest.mark.real]

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 18, 20, 24, 28, 31, 32, 33, 34)
LENGTHS += (35, 36, 37, 39, 40, 41, 43, 44, 45, 46, 47, 48, 49, 50, 52, 55, 63, 64, 65, 96)
EMBED = 576
ANSWERS = ((3, 3, 2, 5, 3, 3), (1, 1, 2, 1))
"""Tokens of the answers to short prompts (the first 20) and to long ones."""


class World:
    """40 prompts with their parameters, what each answers alone, and what is counted over all runs."""

    def __init__(self, real: Started, canary: Canary, long_canary: Canary, scale: int) -> None:
        self.real, self.canary, self.long_canary = real, canary, long_canary
        self.is_long = scale > 1
        self.num_compiled = 0
        self.num_steps = 0
        runner = real.engine.runner
        self._pointers = self._pool_pointers()
        self.equality = Equality(runner, max_tokens=64 if scale == 1 else 256)
        text = real.intake.tokenizer.encode(" ".join(CORPUS) * 3)
        self.requests: list[Request] = []
        for index, length in enumerate(LENGTHS):
            # Even ones begin alike, so that there is something to share.
            start = 0 if index % 2 == 0 else 3 * index
            sampling: dict[str, Any] = {"temperature": 0.8, "seed": index} if index % 5 == 4 else {"temperature": 0.0}
            answers = ANSWERS[index // 20]
            params = SamplingParams(max_tokens=answers[index % len(answers)] * scale, ignore_eos=index % 3 > 0, **sampling)
            self.requests.append(real.intake.request(text[start : start + length], params, arrival_s=0.0, request_id=f"prompt-{index}"))
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        self.solo: dict[str, list[int]] = {}
        alone = self.bench(enable_prefix_caching=False, max_in_flight=1)
        for request in self.requests:
            alone.engine.add(request)
            alone.run()
            self.solo[request.request_id] = alone.ids(request.request_id)
        assert self.num_compiled == 0

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)

    def bench(self, **options: Any) -> Bench:
        """An engine over the real model that checks the pool after each step."""
        return real_bench(self.real, canary=self.canary, after=self._after_step, **{"max_in_flight": 2, **options})

    def compare(self, what: str, bench: Bench, requests: Sequence[Request] | None = None) -> None:
        """Holds the answers of a bench against the solo run, and runs the after-check."""
        assert self.num_compiled == 0, "something was compiled after ready"
        for request in self.requests if requests is None else requests:
            self.equality.check(what, request, self.solo[request.request_id], bench.ids(request.request_id))
        bench.after_check()
        self.equality.check_ties()
        self.num_compiled = 0  # what looks at a tie is compiled when the first one is met
        assert self.real.engine.runner.num_compiled_while_running == 0

    def _after_step(self) -> None:
        self.num_steps += 1
        assert self._pool_pointers() == self._pointers, "the pool was copied"

    def _pool_pointers(self) -> tuple[int, int]:
        pool = self.real.engine.runner.pool
        return pool.k.unsafe_buffer_pointer(), pool.v.unsafe_buffer_pointer()

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        self.num_compiled += event == COMPILE_EVENT


LONG = pytest.param(8, marks=[pytest.mark.tier("long", area="models"), pytest.mark.timeout(1800)])


@pytest.fixture(scope="module", params=[1, LONG], ids=["short", "long"])
def world(real: Started, real_canary: Canary, long_real_canary: Canary, request: pytest.FixtureRequest) -> Iterator[World]:
    """Answers of 1 to 5 tokens; the long version has eight times as many."""
    world = World(real, real_canary, long_real_canary, request.param)
    yield world
    world.close()


def run_shuffled(requests: Sequence[Request], bench: Bench, *, seed: int, arrive: Callable[[random.Random], int]) -> None:
    """Adds the prompts in shuffled order (but short ones before long ones), `arrive` of them before each step."""
    rng = random.Random(seed)
    half = len(requests) // 2
    waiting = [*rng.sample(requests[half:], len(requests) - half), *rng.sample(requests[:half], half)]
    while waiting or bench.engine.has_work:
        for _ in range(min(arrive(rng), len(waiting))):
            bench.engine.add(waiting.pop())
        bench.step()


@pytest.mark.min_jax
@pytest.mark.parametrize("num_seqs", [2, 3, 8, 17])
def test_o56_a_batch_answers_as_each_alone(world: World, num_seqs: int) -> None:
    bench = world.bench(max_num_seqs=num_seqs, enable_prefix_caching=False)
    # Two and three rows take the program of one, so that every third prompt will do; the long version takes all.
    requests = world.requests if num_seqs > 3 or world.is_long else world.requests[::3]
    run_shuffled(requests, bench, seed=num_seqs, arrive=lambda rng: 40 if num_seqs == 17 else rng.choice((num_seqs, 0, num_seqs // 2)))
    assert max(event.num_seqs for event in bench.events.of(events.StepFinished)) == num_seqs
    world.compare(f"batches of {num_seqs}", bench, requests)


def test_o56_chunks_and_preempted_requests_answer_as_the_whole(world: World) -> None:
    """Pages are taken from prompts half done and from answers half done; without the cache, so that all is computed again."""
    # Pages are taken between steps, when none is in flight.
    bench = world.bench(max_num_seqs=17, max_num_batched_tokens=48, enable_prefix_caching=False, max_in_flight=1)
    rng = random.Random(2)
    lost: list[int] = []
    for request in rng.sample(world.requests, len(world.requests)):
        bench.engine.add(request)
    while bench.engine.has_work:
        bench.step()
        scheduler = bench.engine.scheduler
        for _ in range(rng.choice((0, 0, 2))):
            if scheduler.num_running > 1:
                lost.append(scheduler.sequences[scheduler.num_running - 1].num_output_tokens)
                bench.evict()
    assert lost.count(0) >= 5
    assert len(lost) - lost.count(0) >= 2
    steps = bench.events.of(events.StepFinished)
    assert sum(step.num_prefill_tokens > 0 and step.num_tokens == 48 for step in steps) > 10, "hardly a step was full of prompts"
    world.compare("chunks and preemption", bench)


def test_o37_a_cached_prefix_answers_as_a_fresh_one(world: World) -> None:
    """While it fills and when it is full."""
    bench = world.bench(enable_prefix_caching=True, max_num_seqs=17)
    for what in ("cold cache", "warm cache"):
        run_shuffled(world.requests, bench, seed=3, arrive=lambda _: 4)
        for request in world.requests:
            world.equality.check(what, request, world.solo[request.request_id], bench.ids(request.request_id))
        num_cached = sum(output.num_cached_tokens for output in bench.last.values())
        assert num_cached >= (200 if what == "cold cache" else 800), "the cache was hardly used"
        if what == "cold cache":
            bench.check_conservation()
            bench.last.clear()
            bench.events.clear()
    world.compare("warm cache", bench)


def test_the_first_run_is_what_the_model_says(world: World) -> None:
    """The runs above could all be wrong alike: one answer is held against another program, token by token."""
    request = world.requests[22]
    answer = world.solo[request.request_id]
    for index, token_id in enumerate(answer):
        logits = world.equality.oracle.logits([*request.prompt_token_ids, *answer[:index]])
        assert logits[token_id] > logits.max() - TIE_MARGIN
    assert len(answer) >= 2


def test_the_pool_stayed_where_it_is(world: World) -> None:
    """100 steps and more with the same two buffers; each step was looked at. And the canary sings its whole song."""
    bench = real_bench(world.real, canary=world.long_canary, after=world._after_step)
    bench.after_check()
    while world.num_steps < 100:
        bench.ask("Once upon a time", max_tokens=8)
    print(f"{world.equality.num_compared} tokens compared over {world.num_steps} steps, ties: {world.equality.ties}")
    runner = world.real.engine.runner
    for layout, program in runner.programs.items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == runner.pool_bytes + layout.num_slots * (4 + 8 * runner.vocab + 4 * EMBED), (
            f"{layout.num_tokens}: the pool is not updated in place"
        )
        assert memory.temp_size_in_bytes < 64 * 2**20, f"{layout.num_tokens}: {memory.temp_size_in_bytes} bytes of temporaries"


def test_the_margin_tells_a_tie_from_a_mistake(tiny: Started) -> None:
    """The rule itself, on the tiny model: right answers pass, a wrong id fails, and so does a missing one."""
    runner = tiny.engine.runner
    bench = tiny_bench(tiny)
    equality = Equality(runner, max_tokens=16)
    for index in range(6):
        sampling: dict[str, Any] = {"temperature": 1.3, "seed": index} if index % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=5, ignore_eos=True, **sampling)
        request = tiny.intake.request([10 + index, 20, 30, 40], params, arrival_s=0.0, request_id=f"margin-{index}")
        bench.engine.add(request)
        bench.run()
        answer = bench.ids(request.request_id)
        equality.check("itself", request, answer, answer)
        for at in (0, 4):
            history = [*request.prompt_token_ids, *answer[:at]]
            margin = equality.oracle.margin(request, history, answer[at])
            assert margin > TIE_MARGIN
            if params.is_greedy:
                assert equality.oracle.logits(history).argmax() == answer[at]
            wrong = [*answer[:at], answer[at] + 1, *answer[at + 1 :]]
            with pytest.raises(AssertionError, match="instead of"):
                equality.check("a wrong id", request, answer, wrong)
        with pytest.raises(AssertionError, match="tokens instead of"):
            equality.check("a missing id", request, answer, answer[:-1])
    assert equality.ties == []
