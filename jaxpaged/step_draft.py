"""A step while it is put together."""

from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.sequence import Sequence


class StepDraft:
    """What the passes of `Scheduler.schedule` have decided so far.

    Attributes:
        ones: rows of running sequences with one token to compute.
        chunks: rows of prompts.
        budget: tokens that chunks may still take.
        admitted: sequences that got a slot.
        preempted: sequences that lost their pages.
        reason: why nobody else is let in; empty as long as somebody may be.
        decision: why so many were admitted.
    """

    __slots__ = ("_hits", "_queries", "_recomputed", "admitted", "budget", "chunks", "decision", "ones", "preempted", "reason")

    def __init__(self) -> None:
        self.ones: list[ScheduledRow] = []
        self.chunks: list[ScheduledRow] = []
        self.budget = 0
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.reason = ""
        self.decision = ""
        self._queries = self._hits = self._recomputed = 0

    def take(self, sequence: Sequence, num_tokens: int, rows: list[ScheduledRow]) -> None:
        """Adds a row for the next tokens of a sequence, whose pages are there, and moves the sequence on as the device will."""
        start = sequence.num_computed_tokens
        end = sequence.num_computed_tokens = start + num_tokens
        num_known = len(sequence.token_ids)
        samples = end == num_known + sequence.num_pending_ids
        rows.append(ScheduledRow(sequence, num_tokens, start, samples, sequence.slot, start >= num_known, sequence.epoch))
        if samples:
            sequence.num_pending_ids += 1
        if start < sequence.num_once_computed:
            self._recomputed += min(end, sequence.num_once_computed) - start

    def take_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """As `take`, out of the budget."""
        self.take(sequence, num_tokens, self.chunks)
        self.budget -= num_tokens

    def admit(self, sequence: Sequence, *, counts_hits: bool) -> None:
        """Notes an admission; a first one counts in the hit rate of the prefix cache."""
        self.admitted.append(sequence)
        if counts_hits:
            self._queries += sequence.num_prompt_tokens
            self._hits += sequence.num_cached_tokens

    def step(self) -> ScheduledStep:
        """The finished step."""
        rows = self.ones
        if self.chunks:
            rows += [row for row in self.chunks if row.num_tokens == 1]
            rows += [row for row in self.chunks if row.num_tokens > 1]
        return ScheduledStep(
            tuple(rows), tuple(self.admitted), tuple(self.preempted), self.decision, self._queries, self._hits, self._recomputed
        )
