"""The worst cases: pools that are too small, cancel storms, floods; at the size of every run and at that of a long one."""

import random
from itertools import product

import pytest

from jaxpaged.admission import _Load
from jaxpaged.kv_groups import FULL, KVGroup
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason
from jaxpaged.running_set import RunningSet
from jaxpaged.waiting_queue import WaitingQueue
from tests.scheduler.load import Job, percentile, run_jobs
from tests.scheduler.rules import Hopeful, add, make_scheduler, step
from tests.scheduler.simulation import Simulation, default_cost
from tests.scheduler.table_model import make_request

LONG = [pytest.mark.tier("long", area="pages"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("is_hopeful", [True, False])
@pytest.mark.parametrize("num_requests", [40, pytest.param(500, marks=LONG)])
def test_pool_of_little_more_than_the_largest_request(num_requests: int, depth: int, enable_prefix_caching: bool, is_hopeful: bool) -> None:
    """L4: requests of 40-90 % of the pool all end with their solo answers, each is preempted at most 3 times."""
    rng = random.Random(num_requests)
    page_size, largest = 4, 160
    num_usable = largest * 11 // 10 // page_size
    simulation = Simulation(
        num_usable=num_usable, page_size=page_size, max_num_batched_tokens=32, depth=depth, enable_prefix_caching=enable_prefix_caching
    )
    if is_hopeful:
        simulation.scheduler._admission.lengths = Hopeful()
    for index in range(num_requests):
        total = int(num_usable * page_size * rng.uniform(0.4, 0.9))
        max_tokens = int(total * rng.uniform(0.1, 0.9))
        prompt = [rng.randrange(7) for _ in range(total - max_tokens)]
        simulation.add(make_request(f"r{index}", prompt, max_tokens=max_tokens, ignore_eos=True))
    simulation.run(max_steps=200 * num_requests)
    simulation.check_answers()
    outcome = simulation.outcome
    assert len(simulation.ended) == num_requests
    assert (outcome.num_preemptions > 0) or not is_hopeful
    assert outcome.max_preemptions <= 2
    assert outcome.longest_drought < 50
    assert outcome.num_prefill_tokens <= 2 * outcome.num_prompt_tokens


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, KVGroup(32))], ids=["full", "full and window"])
@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=LONG)])
def test_cancel_storm_and_a_probe(num_requests: int, groups: tuple[KVGroup, ...], depth: int) -> None:
    """L5: whatever is cancelled at whatever moment, pages and slots are back at once, and a probe is as fast as in an idle engine."""
    rng = random.Random(1)

    def make_simulation() -> Simulation:
        return Simulation(num_usable=60, page_size=4, max_num_batched_tokens=24, groups=groups, depth=depth)

    def probe_s(simulation: Simulation) -> float:
        begun = simulation.now
        simulation.add(make_request("probe", [1, 2, 3], max_tokens=15, ignore_eos=True))
        simulation.run(max_steps=16 + 2 * depth)
        assert simulation.ended["probe"].finish_reason is FinishReason.LENGTH
        return simulation.now - begun

    simulation = make_simulation()

    def cancel(share: float) -> None:
        unfinished = simulation.scheduler.sequences
        for sequence in rng.sample(unfinished, int(len(unfinished) * share)):
            simulation.abort(sequence.request_id)

    for index in range(num_requests):
        simulation.add(make_request(f"r{index}", [rng.randrange(3) for _ in range(rng.randint(1, 60))], max_tokens=40))
        if rng.random() < 0.7:
            simulation.step(between=lambda: cancel(rng.choice((0.0, 0.1, 0.25))))
        cancel(rng.choice((0.0, 0.25)))
    cancel(1.0)
    assert simulation.outcome.num_aborted > num_requests // 2
    assert simulation.pages.num_in_use == 0
    assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0
    simulation.check_answers()
    assert probe_s(simulation) <= 2 * probe_s(make_simulation())


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seconds", [10.0, pytest.param(300.0, marks=LONG)])
def test_a_flood_of_prompts_does_not_keep_running_answers_waiting(seconds: float, depth: int) -> None:
    """L6 and O-43: prompts fill every step; gaps of a running answer stay under two chunk times, and every prompt has its turn."""
    budget = 64
    chunk_s = 0.01 + 0.001 * budget
    num_prompts = int(seconds / chunk_s) + 10
    # A prompt and a half for every step.
    jobs = [Job(0.0, 5, int(seconds / chunk_s), 10_000)]
    jobs += [Job(0.1 + number * chunk_s, 96, 1, 1) for number in range(num_prompts)]
    report = run_jobs(jobs, num_usable=3000, cost=default_cost, max_num_batched_tokens=budget, max_num_seqs=16, depth=depth)
    flood = [step_s for step_s in report.step_s if step_s > 0.99 * chunk_s]
    assert len(flood) > seconds / chunk_s
    assert max(report.gaps_s) <= 2 * chunk_s
    # Served in the order in which they came: nobody waits longer than the backlog is, which grows by half a prompt a step.
    assert max(report.ttfts_s) <= 0.6 * num_prompts * chunk_s * 96 / budget


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_decoders", [4, 31])
def test_a_long_prompt_beside_decoders_and_newcomers(num_decoders: int, depth: int) -> None:
    """O-43 the other way round: 8,000 tokens in chunks, with decoders beside them and short requests that keep coming."""
    budget, num_long = 64, 8000
    jobs = [Job(0.0, 5, 3000, 4000) for _ in range(num_decoders)]
    jobs += [Job(1.0, num_long, 1, 1)] + [Job(1.0 + 0.2 * number, 8, 4, 4) for number in range(200)]
    report = run_jobs(jobs, num_usable=20_000, cost=default_cost, max_num_batched_tokens=budget, max_num_seqs=48, depth=depth)
    chunk_s = 0.01 + 0.001 * budget
    solo_s = num_long / budget * chunk_s
    load = budget / (budget - num_decoders)
    assert report.ended_s[jobs[num_decoders]] - 1.0 <= 3 * solo_s * load
    assert max(report.gaps_s) <= 2 * chunk_s


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seconds", [10.0, pytest.param(300.0, marks=LONG)])
def test_long_prompts_come_one_after_another_beside_decoders(seconds: float, depth: int) -> None:
    """L6, the reverse: decoders in every step, and long prompts at 0.9 of what is left; each ends within 3 solo times by the load."""
    budget, num_decoders, num_long = 64, 24, 500
    chunk_s = 0.01 + 0.001 * budget
    solo_s, load = num_long / budget * chunk_s, budget / (budget - num_decoders)
    every_s = solo_s * load / 0.9
    prompts = [Job(1.0 + number * every_s, num_long, 1, 1) for number in range(int(seconds / every_s))]
    decoders = [Job(0.0, 5, int(1.5 * seconds / chunk_s), 100_000) for _ in range(num_decoders)]
    report = run_jobs(
        [*decoders, *prompts], num_usable=20_000, cost=default_cost, max_num_batched_tokens=budget, max_num_seqs=32, depth=depth
    )
    assert max(report.ended_s[job] - job.arrival_s for job in prompts) <= 3 * solo_s * load
    assert max(report.gaps_s) <= 2 * chunk_s
    assert report.end_s > seconds


@pytest.mark.parametrize("depth", [0, 1])
def test_many_long_prompts_at_once_all_end_in_their_turn(depth: int) -> None:
    budget, num_long, num_prompts = 64, 2000, 8
    jobs = [Job(0.0, num_long, 10, 10) for _ in range(num_prompts)]
    report = run_jobs(jobs, num_usable=2000, cost=default_cost, max_num_batched_tokens=budget, depth=depth)
    solo_s = (num_long / budget + 11) * (0.01 + 0.001 * budget)
    assert max(report.ended_s.values()) <= 3 * solo_s * num_prompts
    assert percentile(report.gaps_s, 1.0) <= 2 * (0.01 + 0.001 * budget)


def test_answers_do_not_depend_on_what_is_cached() -> None:
    """O-37 on the host's side: prompts with shared prefixes, cold, warm, warm after many others, and with the cache off."""
    rng = random.Random(0)
    shared = [rng.randrange(7) for _ in range(160)]
    prompts = [shared[:length] + [rng.randrange(7) for _ in range(rng.randint(1, 20))] for length in (0, 1, 15, 16, 17, 31, 32, 33, 160)]
    others = [[rng.randrange(7) for _ in range(rng.randint(1, 200))] for _ in range(100)]
    answers: dict[str, list[list[int]]] = {}
    for enable_prefix_caching in (True, False):
        simulation = Simulation(num_usable=60, page_size=16, max_num_batched_tokens=64, enable_prefix_caching=enable_prefix_caching)
        for name in ("cold", "warm", "others", "later"):
            for index, prompt in enumerate(others if name == "others" else prompts):
                simulation.add(make_request(f"{name}{index}", prompt, max_tokens=12))
            for _ in range(10_000):
                if simulation.is_idle:
                    break
                simulation.step()
            if name != "others":
                key = f"{name} {enable_prefix_caching}"
                answers[key] = [simulation.ended[f"{name}{index}"].output_token_ids for index in range(len(prompts))]
        simulation.check_answers()
        hits = [simulation.ended[f"warm{index}"].num_cached_tokens for index in range(len(prompts))]
        assert all(hits[index] >= 16 for index in (3, 4, 5, 6, 7, 8)) == enable_prefix_caching
        assert any(hits) == enable_prefix_caching
    assert all(answer == answers["cold True"] for answer in answers.values())


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("lengths", [(16, 16), (32, 32), (48, 48), (16, 17), (17, 16)])
def test_whole_prompt_cached_at_multiples_of_the_page_size(lengths: tuple[int, int], page_size: int) -> None:
    """O-39."""
    tokens = [number % 7 for number in range(64)]
    simulation = Simulation(num_usable=200, page_size=page_size, max_num_batched_tokens=64)
    for index, length in enumerate(lengths):
        simulation.add(make_request(f"r{index}", tokens[:length], max_tokens=1, ignore_eos=True))
        simulation.run(max_steps=3)
        # The flush of an idle engine would spoil the second.
        if index == 0:
            simulation.add(make_request("warm", tokens[:length], max_tokens=1, ignore_eos=True))
            simulation.step()
    simulation.check_answers()
    second = simulation.ended["r1"]
    assert second.num_cached_tokens == min((lengths[1] - 1), lengths[0]) // page_size * page_size
    assert second.num_cached_tokens <= lengths[1] - 1


@pytest.mark.parametrize("num_prompts", [20, pytest.param(200, marks=LONG)])
def test_the_same_answer_whatever_the_company(num_prompts: int) -> None:
    """D3 on the host's side: five mixes of neighbours, cache on and off, whole prompts and chunks, with and without overlap."""
    rng = random.Random(0)
    shared = [rng.randrange(7) for _ in range(40)]
    prompts = [shared[: rng.randint(0, 40)] + [rng.randrange(7) for _ in range(rng.randint(1, 40))] for _ in range(num_prompts)]
    answers = set()
    for enable_prefix_caching, max_num_batched_tokens, depth in product((True, False), (16, 512), (0, 1)):
        for mix in range(5):
            simulation = Simulation(
                num_usable=(40, 60, 100, 200, 400)[mix],
                page_size=4,
                max_num_seqs=(1, 3, 8, 16, 32)[mix],
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                depth=depth,
            )
            order = list(range(num_prompts))
            random.Random(mix).shuffle(order)
            for index in order:
                simulation.add(make_request(f"r{index}", prompts[index], max_tokens=20))
            simulation.run(max_steps=50 * num_prompts)
            answers.add(tuple(tuple(simulation.ended[f"r{index}"].output_token_ids) for index in range(num_prompts)))
    assert len(answers) == 1
    simulation.check_answers()


def test_a_step_looks_at_the_head_of_the_queue_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 sequences run and 500 requests wait for pages: no step matches prefixes, forecasts or sorts the queue once more."""
    scheduler = make_scheduler(num_usable=33 * 70, page_size=16, max_num_seqs=33, max_num_batched_tokens=512, max_model_len=40_000)
    for index in range(32):
        add(scheduler, f"r{index}", [index] * 100, max_tokens=900, ignore_eos=True)
    for _ in range(10):
        step(scheduler)
    for index in range(500):
        add(scheduler, f"waits{index}", [50] * 35_000, max_tokens=10)
    step(scheduler)
    calls: list[str] = []
    for owner, name in ((PageManager, "match"), (_Load, "peak_with"), (WaitingQueue, "__iter__"), (RunningSet, "victims")):
        real = vars(owner)[name]
        monkeypatch.setattr(owner, name, lambda *args, name=name, real=real, **kw: calls.append(name) or real(*args, **kw))
    for _ in range(50):
        scheduled = scheduler.schedule()
        assert scheduled is not None
        assert (scheduled.decision, len(scheduled.rows)) == ("admitted 0 of 500: pages", 32)
        scheduler.update(scheduled, [5] * 32)
    # Whether somebody may be displaced is asked once a step, of those that run.
    assert calls == ["victims"] * 50
