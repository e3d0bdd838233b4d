"""How many tokens of prompts go into a step, so that the times asked for are kept.

Running answers get their token in every step, so the gap between two of their tokens is the time of one step (two while an
id must be known first), and a chunk is never longer than the budget: the gap is bounded by two chunk times, whatever else
arrives. Every step takes at least one token of the prompt that is first in the queue, so every prompt is finished.

With `target_itl_s` the budget is what a step may hold to stay under it, by the times of the steps before. With
`target_ttft_s` prompts get no more of a step than they need to be in time. If both cannot be kept, `target_itl_s` is.
"""

from jaxpaged.config import SchedulerConfig
from jaxpaged.step_cost import StepCost

ITL_MARGIN = 0.9
"""Share of `target_itl_s` that a step is planned for: times scatter."""

TTFT_MARGIN = 0.5
"""Share of the time left that prompts are planned to take: more may come."""

MOST_LEAST_CHUNK_TOKENS = 16
"""Every step with prompts takes so many of their tokens, or a quarter of what fits into a step if that is less."""

STRIDE_SHARE = 4
"""Rows are added by this part of the largest step of late, and by one at least, before it is seen how long the step takes."""


class StepBudget:
    """The token budget of prompts, step by step.

    Args:
        policy: the targets.
        max_num_batched_tokens: tokens of a step at most.
        token_buckets: token counts that steps are padded to.
    """

    def __init__(self, policy: SchedulerConfig, max_num_batched_tokens: int, token_buckets: tuple[int, ...]) -> None:
        self._target_itl_s = policy.target_itl_s
        self._target_ttft_s = policy.target_ttft_s
        self.most_tokens = max_num_batched_tokens
        self._cost = StepCost(token_buckets)
        self.has_target = policy.target_itl_s is not None or policy.target_ttft_s is not None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from the time of a step of `num_tokens` tokens."""
        if self.has_target:
            self._cost.observe(num_tokens, seconds)

    def max_rows(self) -> int:
        """Sequences that can run together and leave room for a chunk without making a step too slow."""
        if self._target_itl_s is None or not self._cost.has_learnt:
            return self.most_tokens
        fitting, size, largest = self._fitting_tokens(), self._cost.only_size, self._cost.largest
        # Little is known of steps that are larger than any so far: they are tried in small strides.
        tried = largest + max(1, largest // STRIDE_SHARE)
        if size is not None and size <= fitting:
            return tried
        return max(1, min(fitting - self._least_chunk(fitting), tried))

    def prompt_tokens(self, num_ones: int, backlog: int, oldest_s: float | None) -> int:
        """Tokens of prompts for a step.

        Args:
            num_ones: rows of one token that are in the step already.
            backlog: prompt tokens still to be computed, waiting requests included.
            oldest_s: seconds that the oldest prompt without a first token has been here; None when there is none.
        """
        room = self.most_tokens - num_ones
        if num_ones == 0 or not self.has_target or not self._cost.has_learnt:
            return room
        fitting = self._fitting_tokens()
        least = min(room, self._least_chunk(fitting))
        if self._target_ttft_s is not None and oldest_s is not None:
            left_s = max((self._target_ttft_s - oldest_s) * TTFT_MARGIN, 1e-9)
            room = min(room, max(least, self._cost.tokens_per_step(num_ones, backlog / left_s, room)))
        return min(room, max(least, fitting - num_ones))

    def _fitting_tokens(self) -> int:
        """Tokens of a step that keeps `target_itl_s`."""
        if self._target_itl_s is None:
            return self.most_tokens
        return self._cost.most_tokens(self._target_itl_s * ITL_MARGIN, self.most_tokens)

    def _least_chunk(self, fitting: int) -> int:
        return max(1, min(MOST_LEAST_CHUNK_TOKENS, fitting // 4))
