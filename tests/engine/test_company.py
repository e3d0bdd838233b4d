"""D3: the same answer whatever the company, in float32: five mixes of neighbours, cache on and off, prompts in chunks and whole.

20 prompts on the tiny model in every run, whose answers must be equal; 200 on the real one in the long run, where two answers may
part at a tie (`tests.equality`). Two steps are in flight in all but the first run, which is each prompt alone.
"""

import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from jaxpaged import events
from jaxpaged.request import Request, SamplingParams
from jaxpaged.start import Started
from tests.engine.conftest import REAL_BUCKETS, real_bench, tiny_bench
from tests.equality import Equality
from tests.fakes import Bench, Canary
from tests.tiny_model import CORPUS

pytestmark = pytest.mark.jax

MIXES = ((2, 2), (3, 1), (5, 7), (8, 3), (8, 200))
"""Rows of a step, and requests that come before each step."""

type MakeBench = Callable[..., Bench]


def prompts_of(text: Sequence[int], count: int) -> list[list[int]]:
    """Every second prompt begins with one to three pages of a common text."""
    rng = random.Random(0)
    prompts = []
    for index in range(count):
        start = rng.randrange(len(text) - 70)
        shared = list(text[: rng.choice((16, 17, 32, 48))]) if index % 2 else []
        prompts.append([*shared, *text[start : start + rng.randint(1, 20)]])
    return prompts


def run_all(bench: Bench, requests: Sequence[Request], *, num_arriving: int, seed: int) -> dict[str, list[int]]:
    """All answers; the requests come in shuffled order."""
    waiting = random.Random(seed).sample(requests, len(requests))
    while waiting or bench.engine.has_work:
        for _ in range(min(num_arriving, len(waiting))):
            bench.engine.add(waiting.pop())
        bench.step()
    return {request.request_id: bench.ids(request.request_id) for request in requests}


def check_company(started: Started, make_bench: MakeBench, *, num_prompts: int, max_tokens: int, whole: int, chunk: int) -> Equality:
    """Compares the answers of every mix with those of each prompt alone."""
    text = started.intake.tokenizer.encode(" ".join(CORPUS) * 3)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        started.intake.request(prompt, params, arrival_s=0.0, request_id=f"prompt-{index}")
        for index, prompt in enumerate(prompts_of(text, num_prompts))
    ]
    alone = make_bench(enable_prefix_caching=False, max_num_seqs=1, max_in_flight=1)
    expected = run_all(alone, requests, num_arriving=1, seed=0)
    equality = Equality(started.engine.runner, max_tokens=128)
    for (num_seqs, num_arriving), enable_prefix_caching, budget in product(MIXES, (True, False), (whole, chunk)):
        bench = make_bench(
            enable_prefix_caching=enable_prefix_caching, max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_in_flight=2
        )
        what = f"{num_seqs} rows, {num_arriving} at once, cache {enable_prefix_caching}, budget {budget}"
        answers = run_all(bench, requests, num_arriving=num_arriving, seed=num_seqs)
        for request in requests:
            equality.check(what, request, expected[request.request_id], answers[request.request_id])
        finished = [event for event in bench.events.of(events.RequestFinished) if event.request_id in answers]
        assert any(event.num_cached_tokens for event in finished) == enable_prefix_caching, what
        assert num_seqs // 2 < max(event.num_seqs for event in bench.events.of(events.StepFinished)) <= num_seqs, what
        bench.after_check()
    equality.check_ties()
    return equality


def test_20_prompts_answer_alike_in_any_company(tiny: Started) -> None:
    def make_bench(*, max_in_flight: int, enable_prefix_caching: bool, **narrow: int) -> Bench:
        bench = tiny_bench(tiny, enable_prefix_caching=enable_prefix_caching, **narrow)
        bench.engine._max_in_flight = max_in_flight
        return bench

    equality = check_company(tiny, make_bench, num_prompts=20, max_tokens=6, whole=64, chunk=16)
    assert equality.ties == []
    assert equality.num_compared == 20 * 20 * 6


@pytest.mark.real
@pytest.mark.tier("long", area="pages")
@pytest.mark.timeout(7200)
def test_200_prompts_answer_alike_in_any_company(real: Started, real_canary: Canary) -> None:
    def make_bench(**options: int) -> Bench:
        return real_bench(real, canary=real_canary, **options)  # type: ignore[arg-type]

    equality = check_company(real, make_bench, num_prompts=200, max_tokens=4, whole=REAL_BUCKETS[-1], chunk=16)
    print(f"{equality.num_compared} tokens compared, ties: {equality.ties}")
    assert equality.num_compared > 20 * 200 * 3
