"""What a simulation counts."""

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What a simulation counted."""

    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_expired: int = 0
    num_late_rows: int = 0
    num_preemptions: int = 0
    max_preemptions: int = 0
    num_displacements: int = 0
    num_prefill_tokens: int = 0
    num_prefill_tokens_of_prompts: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_hit_tokens: int = 0
    longest_drought: int = 0
    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    trace: list[tuple[object, ...]] = field(default_factory=list)
