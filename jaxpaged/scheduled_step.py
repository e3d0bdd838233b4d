"""What a step computes: the type that goes from the scheduler to packing, and back with the results."""

import msgspec

from jaxpaged.sequence import Sequence


class ScheduledRow(msgspec.Struct, frozen=True, eq=False):
    """Tokens `start` to `start + num_tokens` of one sequence.

    Attributes:
        sequence: whose tokens.
        num_tokens: how many.
        start: position of the first.
        samples: the last of them is the sequence's last, so a new id comes out, and goes into the slot.
        slot: the sequence's slot on the device.
        takes_from_slot: its one token is an id that the host does not know yet: the one that the device last put into the slot.
        epoch: the sequence's admission that the row belongs to; another one has begun if the sequence's is larger.
    """

    sequence: Sequence
    num_tokens: int
    start: int
    samples: bool
    slot: int
    takes_from_slot: bool
    epoch: int

    @property
    def scored_positions(self) -> range:
        """Tokens of the prompt whose log-probabilities come out of the row: each is told by the token before it."""
        sequence = self.sequence
        return range(max(self.start + 1, sequence.first_unscored), min(self.start + self.num_tokens + 1, sequence.num_prompt_tokens))

    @property
    def is_awaited(self) -> bool:
        """Whether `Scheduler.update` will take in the row: its sequence has not ended, nor been admitted again, since."""
        return self.sequence.epoch == self.epoch and not self.sequence.is_finished


class ScheduledStep(msgspec.Struct, frozen=True, eq=False):
    """One step: at least one row, rows of one token first.

    Attributes:
        rows: what to compute.
        admitted: sequences that got a slot in this step, in order; each has a row, whose `start` is its prefix hit in tokens.
        preempted: sequences that lost their pages, in the order in which they did.
        decision: for people, why so many were admitted ("admitted 3 of 9: pages").
        prefix_queries_tokens: prompt tokens looked up in the prefix cache, at first admissions.
        prefix_hits_tokens: how many of them were found.
        prefill_recompute_tokens: tokens of the rows that had been computed before a preemption took them away.
    """

    rows: tuple[ScheduledRow, ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    decision: str
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefill_recompute_tokens: int = 0
