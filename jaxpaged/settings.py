"""The options of one engine after every "auto" and "none" has been decided: plain numbers that the engine's parts take."""

from typing import NamedTuple

from jaxpaged.config import Config
from jaxpaged.counts import counted
from jaxpaged.errors import ConfigError
from jaxpaged.kv_groups import PageArithmetic

CPU_MAX_NUM_SEQS, CPU_MAX_NUM_BATCHED_TOKENS = 32, 512
GPU_MAX_NUM_SEQS, GPU_MAX_NUM_BATCHED_TOKENS = 256, 2048
MIN_ROWS = 2
"""A dot with one row of bfloat16 is pathologically slow in XLA's CPU backend, so every bucket has at least two rows."""


class StepLimits(NamedTuple):
    """How much one step holds, and the token counts that programs are compiled for."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    token_buckets: tuple[int, ...]

    def bucket_for(self, num_tokens: int) -> int:
        """The smallest bucket that holds `num_tokens`."""
        return next(bucket for bucket in self.token_buckets if bucket >= num_tokens)

    def most_pages(self, arithmetic: PageArithmetic) -> int:
        """Pages beyond which a pool is of little use: twice what all sequences of a step take at their longest."""
        return 2 * self.max_num_seqs * arithmetic.peak_pages(self.max_model_len)

    def rows_of(self, bucket: int) -> int:
        """Rows of sequences in a bucket: no step has more sequences than tokens."""
        return max(MIN_ROWS, min(bucket, self.max_num_seqs))


def decide_limits(config: Config, *, is_gpu: bool, model_max_len: int) -> StepLimits:
    """Fills in the defaults of the platform and the model.

    Raises:
        ConfigError: limits contradict each other or the model.
    """
    scheduler, wanted = config.scheduler, config.model.max_model_len
    if isinstance(wanted, int) and wanted > model_max_len:
        raise ConfigError(
            f"max_model_len {wanted} is longer than the model's context of {counted(model_max_len, 'token')}", param="model.max_model_len"
        )
    if isinstance(wanted, int) and wanted < 2:
        raise ConfigError(
            f"max_model_len must be at least 2 (one token of prompt, one of answer), got {wanted}", param="model.max_model_len"
        )
    max_model_len = wanted if isinstance(wanted, int) else model_max_len
    budget = scheduler.max_num_batched_tokens or (GPU_MAX_NUM_BATCHED_TOKENS if is_gpu else CPU_MAX_NUM_BATCHED_TOKENS)
    if scheduler.max_num_seqs is not None and scheduler.max_num_seqs > budget:
        raise ConfigError(
            f"max_num_seqs {scheduler.max_num_seqs} is over max_num_batched_tokens {budget}, and every sequence of a step takes a token "
            "at least; lower it, or raise the budget",
            param="scheduler.max_num_seqs",
        )
    num_seqs = min(scheduler.max_num_seqs or (GPU_MAX_NUM_SEQS if is_gpu else CPU_MAX_NUM_SEQS), budget)
    buckets = config.compilation.token_buckets or _powers_of_two(budget)
    buckets = tuple(sorted(set(buckets)))
    if buckets[-1] < budget:
        raise ConfigError(
            f"the largest token bucket {buckets[-1]} is smaller than max_num_batched_tokens {budget}", param="compilation.token_buckets"
        )
    return StepLimits(max_model_len, num_seqs, budget, buckets)


def _powers_of_two(limit: int) -> tuple[int, ...]:
    buckets, bucket = [], MIN_ROWS
    while bucket < limit:
        buckets.append(bucket)
        bucket *= 2
    return (*buckets, max(limit, MIN_ROWS))
