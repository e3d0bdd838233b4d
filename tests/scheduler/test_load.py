"""How full the pool gets, how often that is too full, and the times that are kept, under loads on a virtual clock."""

import math
import random
from collections.abc import Callable

import pytest

from jaxpaged.admission import _Load
from jaxpaged.config import SchedulerConfig
from jaxpaged.output_lengths import FIRST_GUESS_TOKENS, HISTORY, OutputLengths
from jaxpaged.page_forecast import Demand, peak_pages
from jaxpaged.scheduler import ScheduledStep
from jaxpaged.step_cost import StepCost
from tests.scheduler.load import Job, Report, burst, percentile, run_jobs
from tests.scheduler.rules import add, ids_of, make_scheduler, rows_of, step

BUCKETS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def make_cost(
    token_buckets: tuple[int, ...] = (), scatter: float = 0.0, per_token_s: float = 0.0001, per_step_s: float = 0.02
) -> Callable[[ScheduledStep], float]:
    """Weights are read once a step, tokens are computed, padding too, and caches are read; times scatter."""
    rng = random.Random(1)

    def cost(scheduled: ScheduledStep) -> float:
        num_tokens = sum(row.num_tokens for row in scheduled.rows)
        num_padded = next((bucket for bucket in token_buckets if bucket >= num_tokens), num_tokens)
        num_read = sum(row.start + row.num_tokens for row in scheduled.rows)
        return (per_step_s + per_token_s * num_padded + 5e-7 * num_read) * math.exp(rng.gauss(0, scatter))

    return cost


@pytest.mark.parametrize(
    ("seed", "rate", "num_pages"),
    [(0, 5, 400), pytest.param(1, 5, 400, marks=pytest.mark.tier("long", area="pages")), (2, 5, 800), (3, 4, 250)],
)
def test_a_tenfold_burst_makes_queues_longer_and_costs_little(
    seed: int, rate: float, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemptions at most 5 % of the requests, tokens/s at least 0.95 of the best fixed max_num_seqs (which looks at pages of now only)."""
    jobs = list(burst(random.Random(seed), rate=rate, calm_s=10, burst_s=10))
    ours = run_jobs(jobs, num_usable=num_pages, cost=make_cost())
    assert len(ours.ended_s) == len(jobs)
    preempted = ours.num_preemptions / len(jobs)
    prefill = ours.num_prefill_tokens / sum(job.num_prompt for job in jobs)
    assert preempted <= 0.05
    assert 1.0 <= prefill < 1.05
    monkeypatch.setattr(_Load, "peak_with", lambda self, candidate: 0.0)
    fixed: dict[int, Report] = {
        limit: run_jobs(jobs, num_usable=num_pages, cost=make_cost(), max_num_seqs=limit) for limit in (8, 12, 16, 24, 32, 40, 48, 64, 128)
    }
    best = max(fixed.values(), key=lambda report: report.tokens_per_s)
    share = ours.tokens_per_s / best.tokens_per_s
    limit = next(limit for limit, report in fixed.items() if report is best)
    print(
        f"\n{len(jobs)} requests, {num_pages} pages: preempted {preempted:.1%}, prefill {prefill:.3f} of the prompts, "
        f"{ours.tokens_per_s:.0f} tokens/s = {share:.3f} of the best "
        f"fixed max_num_seqs, {limit} ({best.tokens_per_s:.0f}, preempted {best.num_preemptions / len(jobs):.1%}); "
        f"8: {fixed[8].tokens_per_s:.0f}, 128: {fixed[128].tokens_per_s:.0f} (preempted {fixed[128].num_preemptions / len(jobs):.1%})"
    )
    assert share >= 0.95
    # That is not because nothing matters: a limit that is too small costs much, and none at all preempts often.
    assert fixed[8].tokens_per_s < 0.7 * best.tokens_per_s
    assert num_pages > 400 or fixed[128].num_preemptions > 0.07 * len(jobs)


@pytest.mark.parametrize(
    ("seeds", "rate", "num_pages"),
    [
        (range(10), 4, 250),
        *(
            pytest.param(range(24), rate, num_pages, marks=[pytest.mark.tier("long", area="pages")])
            for rate, num_pages in ((4, 250), (5, 400), (5, 800))
        ),
    ],
)
def test_preemptions_of_many_bursts(seeds: range, rate: float, num_pages: int) -> None:
    """At most 5 % of the requests in the worst of them; not because nobody ever loses pages."""
    shares = []
    for seed in seeds:
        jobs = list(burst(random.Random(seed), rate=rate, calm_s=10, burst_s=10))
        shares.append(run_jobs(jobs, num_usable=num_pages, cost=make_cost()).num_preemptions / len(jobs))
    print(f"\n{len(seeds)} bursts, {num_pages} pages: preempted {sum(shares) / len(shares):.1%}, in the worst {max(shares):.1%}")
    assert 0 < max(shares) <= 0.05
    assert sum(shares) / len(shares) <= 0.025


@pytest.mark.parametrize("token_buckets", [(), BUCKETS])
@pytest.mark.parametrize(("seed", "target_s"), [(0, 0.05), (1, 0.1), (2, 0.03)])
def test_a_burst_keeps_the_gap_between_tokens(seed: int, target_s: float, token_buckets: tuple[int, ...]) -> None:
    """P95 of the gaps at most 1.2 times target_itl_s; without the target it is far beyond."""
    jobs = list(burst(random.Random(seed), rate=2, calm_s=5, burst_s=5))

    def gaps_s(policy: SchedulerConfig) -> list[float]:
        cost = make_cost(token_buckets, scatter=0.05, per_token_s=0.0004)
        report = run_jobs(jobs, num_usable=800, cost=cost, policy=policy, token_buckets=token_buckets)
        assert len(report.ended_s) == len(jobs)
        return report.gaps_s

    kept = percentile(gaps_s(SchedulerConfig(target_itl_s=target_s)), 0.95)
    without = percentile(gaps_s(SchedulerConfig()), 0.95)
    print(
        f"\n{len(jobs)} requests, target_itl_s {target_s}, {'buckets' if token_buckets else 'no buckets'}: P95 gap {1000 * kept:.1f} ms "
        f"= {kept / target_s:.2f} of the target; without the target {1000 * without:.1f} ms"
    )
    assert kept <= 1.2 * target_s
    assert without > 1.8 * target_s


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("token_buckets", [(), BUCKETS])
@pytest.mark.parametrize("scatter", [0.0, 0.05])
@pytest.mark.parametrize(("num_first", "per_step_s", "per_token_s", "least_rows"), [(1, 0.01, 0.0005, 20), (8, 0.02, 0.0001, 40)])
def test_prompts_of_one_token_find_out_how_many_fit(
    num_first: int, per_step_s: float, per_token_s: float, least_rows: int, scatter: float, token_buckets: tuple[int, ...], depth: int
) -> None:
    """All steps are of one size at first, which says nothing of larger ones: by the average cost of a token no row more would fit."""
    jobs = [Job(0.0 if number < num_first else 0.5, 1, 120, 120) for number in range(120)]
    policy = SchedulerConfig(target_itl_s=0.03)
    cost = make_cost(token_buckets, scatter=scatter, per_step_s=per_step_s, per_token_s=per_token_s)
    report = run_jobs(jobs, num_usable=2000, cost=cost, policy=policy, token_buckets=token_buckets, depth=depth)
    assert report.max_running >= least_rows
    assert percentile(report.gaps_s, 0.95) <= 0.03
    assert max(report.gaps_s) <= 1.2 * 0.03


def test_a_row_that_is_tried_and_is_too_slow_is_not_tried_again() -> None:
    """20 ms a token: one row keeps 30 ms, two do not, which is learnt once and for good."""
    jobs = [Job(number * 0.01, 1, 60, 60) for number in range(20)]
    cost = make_cost(per_step_s=0.0, per_token_s=0.02)
    report = run_jobs(jobs, num_usable=2000, cost=cost, policy=SchedulerConfig(target_itl_s=0.03))
    assert report.max_running == 2
    assert sum(gap_s > 0.03 for gap_s in report.gaps_s) <= 2 * 60


@pytest.mark.parametrize("target_s", [1.0, 2.0])
def test_first_tokens_in_time_and_answers_that_flow(target_s: float) -> None:
    """With target_ttft_s alone prompts get what they need and no more: P95 is kept, and the gaps beside them shrink."""
    rng, now, jobs = random.Random(0), 0.0, []
    for _ in range(200):
        now += rng.expovariate(1.5)
        jobs.append(Job(now, int(16 * 64 ** rng.random()), int(16 * 16 ** rng.random()), 512))
    cost = make_cost(per_token_s=0.0004, scatter=0.05)
    kind = run_jobs(jobs, num_usable=800, cost=cost, policy=SchedulerConfig(target_ttft_s=target_s))
    greedy = run_jobs(jobs, num_usable=800, cost=cost)
    assert percentile(kind.ttfts_s, 0.95) <= target_s
    assert percentile(kind.gaps_s, 0.99) < 0.5 * percentile(greedy.gaps_s, 0.99)
    assert kind.tokens_per_s > 0.97 * greedy.tokens_per_s


def test_the_pool_is_full_while_requests_wait() -> None:
    rng = random.Random(0)
    jobs = [Job(0.0, rng.randint(16, 512), length := rng.randint(16, 256), length) for _ in range(64)]
    report = run_jobs(jobs, num_usable=160, cost=make_cost(), max_num_seqs=16, policy=SchedulerConfig(reserve_pages=0))
    assert sum(report.page_use) / len(report.page_use) > 0.9


def test_admission_waits_for_what_running_answers_will_probably_need() -> None:
    scheduler = make_scheduler(num_usable=40, page_size=4)
    for _ in range(8):
        scheduler._admission.lengths.record(60)
    for request_id in "abcd":
        add(scheduler, request_id, 4, max_tokens=200)
    # 16 pages each when they end, and all end at the same time: two of them fit, not three.
    scheduled = step(scheduler)
    assert scheduled.decision == "admitted 2 of 4: pages"
    # If answers are to be short, all fit.
    scheduler = make_scheduler(num_usable=40, page_size=4)
    for _ in range(8):
        scheduler._admission.lengths.record(20)
    for request_id in "abcd":
        add(scheduler, request_id, 4, max_tokens=200)
    assert ids_of(step(scheduler).admitted) == ["a", "b", "c", "d"]
    # Nor is more expected than was asked for.
    scheduler = make_scheduler(num_usable=40, page_size=4)
    for request_id in "abcd":
        add(scheduler, request_id, 4, max_tokens=20)
    assert ids_of(step(scheduler).admitted) == ["a", "b", "c", "d"]


def test_a_request_that_had_no_room_is_looked_at_again_when_there_may_be_some() -> None:
    scheduler = make_scheduler(num_usable=8, page_size=4, is_hopeful=True)
    a = add(scheduler, "a", 15, max_tokens=4)
    add(scheduler, "b", 7, max_tokens=4)
    add(scheduler, "c", [201] * 11, max_tokens=4)
    step(scheduler)
    assert step(scheduler).decision == "admitted 0 of 1: pages"
    looked_at = []
    real_match = scheduler._pages.match
    scheduler._pages.match = lambda token_ids, prefix: looked_at.append(1) or real_match(token_ids, prefix)  # type: ignore[method-assign, func-returns-value]
    assert step(scheduler).decision == "admitted 0 of 1: pages"
    assert not looked_at
    while not a.is_finished:
        step(scheduler)
    assert step(scheduler).decision == "admitted 1 of 1"
    assert looked_at


def test_pages_that_became_findable_make_room() -> None:
    """Alone, b needs 4 pages, and beside a only 3 are left; when a has computed what they begin with alike, it needs one."""
    scheduler = make_scheduler(num_usable=8, page_size=4, is_hopeful=True)
    add(scheduler, "a", [5] * 16, max_tokens=8)
    add(scheduler, "b", [5] * 13, max_tokens=2)
    assert step(scheduler).decision == "admitted 1 of 2: pages"
    assert ids_of(step(scheduler).admitted) == ["b"]


def test_expected_lengths_follow_the_history() -> None:
    lengths = OutputLengths()
    assert lengths.expected_remaining(0, 0.5) == FIRST_GUESS_TOKENS
    assert lengths.expected_remaining(1000, 0.5) == 1000
    for length in (10, 20, 30, 40):
        lengths.record(length)
    assert [lengths.expected_remaining(0, quantile) for quantile in (0.0, 0.3, 0.5, 0.99)] == [10, 20, 30, 40]
    # Of those that became longer than 20: 30 and 40.
    assert [lengths.expected_remaining(20, quantile) for quantile in (0.0, 0.49, 0.5)] == [10, 10, 20]
    assert lengths.expected_remaining(40, 0.5) == 40
    for _ in range(HISTORY):
        lengths.record(5)
    assert lengths.expected_remaining(0, 0.99) == 5
    assert lengths._sorted == [5] * HISTORY


def test_the_peak_is_the_largest_sum_before_an_end() -> None:
    assert peak_pages([], 1.0) == 0
    assert peak_pages([Demand(10, 3)], 0.5) == 8
    rng = random.Random(0)
    for _ in range(200):
        demands = [Demand(rng.randint(1, 30), rng.randint(0, 9)) for _ in range(rng.randint(1, 6))]
        by_hand = max(
            sum(demand.num_pages + moment * 0.25 for demand in demands if demand.remaining >= moment)
            for moment in range(1, max(demand.remaining for demand in demands) + 1)
        )
        assert peak_pages(demands, 0.25) == pytest.approx(by_hand)


def test_step_costs_are_learnt_from_steps_of_all_sizes() -> None:
    rng, cost = random.Random(0), StepCost()
    assert not cost.has_learnt
    for _ in range(200):
        num_tokens = rng.choice((1, 4, 30, 200, 512))
        cost.observe(num_tokens, (0.01 + 0.0002 * num_tokens) * math.exp(rng.gauss(0, 0.02)))
    assert cost.seconds(100) == pytest.approx(0.03, rel=0.1)
    assert cost.most_tokens(0.05, 512) == pytest.approx(200, rel=0.1)
    assert (cost.most_tokens(10.0, 512), cost.most_tokens(0.001, 512)) == (512, 0)
    # 1,000 tokens/s beside 10 others: n / (0.012 + 0.0002 n) = 1000.
    assert cost.tokens_per_step(10, 1000, 512) == pytest.approx(15, abs=2)
    assert cost.tokens_per_step(10, 1e9, 512) == 512


def test_step_costs_from_steps_of_one_size_or_in_buckets() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.observe(8, 0.04)
    assert cost.seconds(8) == pytest.approx(0.04)
    assert cost.most_tokens(0.02, 512) == 4
    cost = StepCost(BUCKETS)
    for num_tokens in (1, 2, 3, 5, 9, 17, 33, 65, 129, 257):
        cost.observe(num_tokens, 0.01 + 0.001 * next(bucket for bucket in BUCKETS if bucket >= num_tokens))
    assert cost.seconds(33) == cost.seconds(64) == pytest.approx(0.074)
    # 100 would fit, and cost as much as 128.
    assert (cost.most_tokens(0.11, 512), cost.most_tokens(0.139, 512), cost.most_tokens(0.011, 512)) == (64, 128, 0)


def test_the_target_bounds_the_rows() -> None:
    """20 ms and 1 ms a token, 10 % margin of 50 ms: a step of 25 tokens, a quarter of them for prompts, so 19 rows."""
    scheduler = make_scheduler(num_usable=500, max_num_seqs=64, max_num_batched_tokens=64, target_itl_s=0.05)
    for number in range(60):
        add(scheduler, f"r{number}", 8, max_tokens=100)
        scheduled = step(scheduler)
        scheduler.observe(scheduled, 0.02 + 0.001 * sum(row.num_tokens for row in scheduled.rows))
    assert scheduler.num_running == pytest.approx(19, abs=1)
    assert scheduled.decision.endswith(": target_itl_s")


def test_a_chunk_is_what_the_target_leaves() -> None:
    scheduler = make_scheduler(num_usable=500, max_num_batched_tokens=512, target_itl_s=0.1)
    add(scheduler, "a", 3, max_tokens=100)
    first = step(scheduler)
    scheduler.observe(first, 0.013)
    for _ in range(3):
        scheduler.observe(step(scheduler), 0.011)
    add(scheduler, "b", 300, max_tokens=1)
    scheduled = step(scheduler)
    # 10 ms and 1 ms a token, 10 % margin: 80 tokens fit.
    assert rows_of(scheduled)[1][:2] == ("b", 0)
    assert rows_of(scheduled)[1][2] == pytest.approx(79, abs=2)
    # Nobody is there to be kept waiting: the whole budget is used.
    scheduler.abort("a")
    assert rows_of(step(scheduler))[0][2] > 200
