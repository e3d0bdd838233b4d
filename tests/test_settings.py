"""Limits of a step from the options: platform defaults, buckets, and what is refused."""

import pytest

from jaxpaged.config import CompilationConfig, Config, ModelConfig, SchedulerConfig
from jaxpaged.errors import ConfigError
from jaxpaged.kv_groups import FULL, PageArithmetic
from jaxpaged.settings import decide_limits


def config(*, max_model_len: int | str | None = None, token_buckets: tuple[int, ...] | None = None, **scheduler: int) -> Config:
    return Config(
        model=ModelConfig(max_model_len=max_model_len),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**scheduler),
        compilation=CompilationConfig(token_buckets=token_buckets),
    )


def test_defaults_of_the_platforms() -> None:
    cpu = decide_limits(Config(), is_gpu=False, model_max_len=8192)
    assert cpu == (8192, 32, 512, (2, 4, 8, 16, 32, 64, 128, 256, 512))
    gpu = decide_limits(Config(), is_gpu=True, model_max_len=8192)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 2048)
    assert gpu.token_buckets == tuple(2**power for power in range(1, 12))


@pytest.mark.parametrize(("budget", "buckets"), [(1, (2,)), (2, (2,)), (3, (2, 3)), (16, (2, 4, 8, 16)), (100, (2, 4, 8, 16, 32, 64, 100))])
def test_buckets_are_powers_of_two_up_to_the_budget(budget: int, buckets: tuple[int, ...]) -> None:
    limits = decide_limits(config(max_num_batched_tokens=budget), is_gpu=False, model_max_len=100)
    assert limits.token_buckets == buckets
    for num_tokens in range(1, budget + 1):
        bucket = limits.bucket_for(num_tokens)
        assert bucket >= num_tokens
        assert not any(num_tokens <= other < bucket for other in buckets)


def test_rows_never_exceed_tokens_and_are_at_least_two() -> None:
    limits = decide_limits(config(max_num_seqs=8, max_num_batched_tokens=64), is_gpu=False, model_max_len=100)
    assert [limits.rows_of(bucket) for bucket in limits.token_buckets] == [2, 4, 8, 8, 8, 8]
    assert decide_limits(config(max_num_batched_tokens=16), is_gpu=False, model_max_len=100).max_num_seqs == 16
    assert decide_limits(config(max_num_seqs=1), is_gpu=False, model_max_len=100).rows_of(512) == 2


def test_buckets_given_are_sorted_and_each_once() -> None:
    limits = decide_limits(config(token_buckets=(64, 4, 64, 16), max_num_batched_tokens=64), is_gpu=False, model_max_len=100)
    assert limits.token_buckets == (4, 16, 64)


def test_a_bucket_smaller_than_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="largest token bucket 32 is smaller than max_num_batched_tokens 512") as caught:
        decide_limits(config(token_buckets=(4, 32)), is_gpu=False, model_max_len=100)
    assert caught.value.param == "compilation.token_buckets"


@pytest.mark.parametrize(
    ("is_gpu", "num_seqs", "budget", "message"),
    [
        (False, 64, 16, "max_num_seqs 64 is over max_num_batched_tokens 16"),
        (False, 513, None, "max_num_seqs 513 is over max_num_batched_tokens 512"),
        (True, 2049, None, "max_num_seqs 2049 is over max_num_batched_tokens 2048"),
    ],
)
def test_more_sequences_than_tokens_of_a_step_are_refused(is_gpu: bool, num_seqs: int, budget: int | None, message: str) -> None:
    wanted = Config(scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget))
    with pytest.raises(ConfigError, match=message) as caught:
        decide_limits(wanted, is_gpu=is_gpu, model_max_len=100)
    assert caught.value.param == "scheduler.max_num_seqs"


def test_pages_that_a_pool_can_use() -> None:
    limits = decide_limits(config(max_num_seqs=3, max_model_len=33), is_gpu=False, model_max_len=100)
    assert [limits.most_pages(PageArithmetic([FULL], page_size)) for page_size in (1, 16, 33, 64)] == [6 * 33, 6 * 3, 6, 6]


@pytest.mark.parametrize(("wanted", "expected"), [(None, 8192), ("auto", 8192), (2, 2), (100, 100), (8192, 8192)])
def test_context_lengths(wanted: int | str | None, expected: int) -> None:
    assert decide_limits(config(max_model_len=wanted), is_gpu=False, model_max_len=8192).max_model_len == expected


@pytest.mark.parametrize(("wanted", "message"), [(8193, "8193 is longer than the model's context of 8192"), (1, "at least 2")])
def test_context_lengths_that_cannot_be_are_refused(wanted: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        decide_limits(config(max_model_len=wanted), is_gpu=False, model_max_len=8192)
    assert caught.value.param == "model.max_model_len"
