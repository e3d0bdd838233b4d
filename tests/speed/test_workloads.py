"""Workloads: the same for everybody, of the lengths that they promise."""

import hashlib
import json
import math
import statistics

import pytest

from jaxpaged.bench.workloads import LOGNORMAL_MAX, Lengths, arriving, make
from jaxpaged.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "digest"),
    # Of the ids that the peers' scripts draw by themselves: all engines of a comparison are asked the same.
    [("b1", "60172dec239813a7"), ("mixed16", "4d64c283b8ce9a81"), ("prefix16", "94574643ff9fa4bd"), ("batch16", "ff49ec0b630e2ee2")],
)
def test_the_ids_are_those_of_every_other_engine(name: str, digest: str) -> None:
    jobs = [[job.prompt, job.num_output] for job in make(name)]
    assert hashlib.sha256(json.dumps(jobs).encode()).hexdigest()[:16] == digest


def test_a_seed_is_a_workload() -> None:
    assert make("mixed16", seed=1) == make("mixed16", seed=1) != make("mixed16", seed=2)


@pytest.mark.parametrize("vocab_size", [4, 260, 151_936])
def test_ids_are_in_the_vocabulary(vocab_size: int) -> None:
    for name in ("b1", "mixed4", "prefix3", "batch2", "lognormal5", "random3"):
        assert all(3 <= token < vocab_size for job in make(name, vocab_size=vocab_size) for token in job.prompt)


def test_a_shared_prefix_is_shared_and_nothing_else() -> None:
    jobs = make("prefix16")
    assert len({tuple(job.prompt[:512]) for job in jobs}) == 1
    assert len({tuple(job.prompt[512:]) for job in jobs}) == 16
    assert all(16 <= len(job.prompt) - 512 <= 64 and job.num_output == 64 for job in jobs)


def test_log_normal_lengths_have_their_means() -> None:
    """The cut at 2,048 takes what is beyond: the means that are left were computed from the distribution, not from this code."""

    def cut_mean(mean: int) -> float:
        """E[min(X, max)] of a log-normal X."""
        sigma, mu, normal = 1.1, math.log(mean) - 1.1**2 / 2, statistics.NormalDist()
        at = (math.log(LOGNORMAL_MAX) - mu) / sigma
        return mean * normal.cdf(at - sigma) + LOGNORMAL_MAX * (1 - normal.cdf(at))

    jobs = make("lognormal4000")
    for lengths, mean in (([len(job.prompt) for job in jobs], 161), ([job.num_output for job in jobs], 338)):
        assert statistics.fmean(lengths) == pytest.approx(cut_mean(mean), rel=0.06)
        assert (max(lengths), min(lengths) >= 1) == (LOGNORMAL_MAX, True)


def test_random_lengths_keep_their_spread() -> None:
    jobs = make("random500", lengths=Lengths(100, 10, 0.5))
    assert (min(len(job.prompt) for job in jobs), max(len(job.prompt) for job in jobs)) == (50, 150)
    assert (min(job.num_output for job in jobs), max(job.num_output for job in jobs)) == (5, 15)
    assert {(len(job.prompt), job.num_output) for job in make("random3", lengths=Lengths(7, 2))} == {(7, 2)}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_their_rate_and_their_burstiness(burstiness: float) -> None:
    jobs = arriving(make("batch4000"), 20.0, burstiness=burstiness)
    gaps = [after.arrival_s - before.arrival_s for before, after in zip(jobs, jobs[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    # A gamma distribution's deviation over its mean.
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
    assert jobs[0].arrival_s == 0.0


def test_without_a_rate_all_come_at_once() -> None:
    jobs = make("mixed16")
    assert arriving(jobs, math.inf) == jobs
    assert {job.arrival_s for job in jobs} == {0.0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixd16", "the nearest is mixed16"),
        ("nothing like it", "known are b1, mixed16"),
        ("b2", "there is no workload 'b2'"),
        ("mixed0", "1 to 100,000 requests, got 0"),
        ("mixed100001", "1 to 100,000 requests, got 100,001"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make(name)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)])
def test_a_rate_that_is_none_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="must be over 0"):
        arriving(make("b1"), rate, burstiness=burstiness)
