"""The least time that a workload needs, by arithmetic."""

import pytest

from jaxpaged.bench.floor import Machine, Work, least_seconds


def test_reading_the_weights_bounds_a_lone_answer() -> None:
    # 10 steps of 1,000 bytes; the stored tokens: 4 + 5 + ... + 13 = 85 reads of 2 bytes.
    work = Work(weight_bytes=1_000, kv_bytes_per_token=2, dtype="float32", num_parallel=1, lengths=[(4, 10)])
    assert least_seconds(work, Machine(bandwidth=100.0, flops=1e9, dtype="float32")) == pytest.approx((10_000 + 170) / 100)


def test_answers_share_the_reading_of_the_weights() -> None:
    machine = Machine(bandwidth=100.0, flops=1e9, dtype="float32")
    four = [(0, 10)] * 4
    together = Work(weight_bytes=1_000, kv_bytes_per_token=0, dtype="float32", num_parallel=4, lengths=four)
    assert least_seconds(together, machine) == pytest.approx(100)
    assert least_seconds(together._replace(num_parallel=2), machine) == pytest.approx(200)


def test_multiplying_bounds_a_long_prompt() -> None:
    # 250 weights of 4 bytes, 2 operations each for 1,000 + 1 - 1 tokens.
    work = Work(weight_bytes=1_000, kv_bytes_per_token=0, dtype="float32", num_parallel=1, lengths=[(1_000, 1)])
    assert least_seconds(work, Machine(bandwidth=1e9, flops=1_000.0, dtype="float32")) == pytest.approx(500)
    assert least_seconds(work._replace(dtype="bfloat16"), Machine(bandwidth=1e9, flops=1_000.0, dtype="bfloat16")) == pytest.approx(1_000)
