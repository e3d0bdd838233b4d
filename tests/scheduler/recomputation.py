"""What preemptions cost, at whose cost, and who keeps its pages from then on: worked out apart from the scheduler."""

from jaxpaged.scheduler import Sequence


class Recomputation:
    """The books of tokens that are computed again.

    Attributes:
        kept: running sequences that nobody may preempt, since all the pages that they can ever need are kept for them.
    """

    def __init__(self) -> None:
        self.kept: set[Sequence] = set()
        self._once: dict[Sequence, int] = {}  # the most tokens that were ever lost at once
        self._charged: dict[Sequence, int] = {}  # tokens that were lost, of those that have not come back
        self._own: dict[Sequence, int] = {}  # those not found in the cache by one that came back, at its own cost
        self._num_spare = 0  # what those that have ended did not recompute of their prompts
        self._num_evicted = 0
        self._num_evicted_of_prompts = 0
        self._admitted: set[Sequence] = set()

    def once_computed(self, sequence: Sequence) -> int:
        """Tokens up to which computing is recomputing."""
        return self._once.get(sequence, 0)

    def preempted(self, sequence: Sequence) -> None:
        """It lost its pages to another."""
        self._once[sequence] = max(self._once.get(sequence, 0), sequence.num_lost_tokens)
        self._charged[sequence] = sequence.num_lost_tokens

    def evicted(self, sequence: Sequence) -> None:
        """It lost its pages to an operator."""
        self.kept.discard(sequence)
        self._once[sequence] = max(self._once.get(sequence, 0), sequence.num_lost_tokens)
        self._num_evicted += sequence.num_lost_tokens
        self._num_evicted_of_prompts += min(sequence.num_lost_tokens, sequence.num_prompt_tokens)

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """It was let in, with `num_found` tokens from the prefix cache."""
        self._admitted.add(sequence)
        num_again = max(0, self._charged.pop(sequence, 0) - num_found)
        if sequence.num_preemptions == 2 or sequence in self._own or num_again > self._num_spare:
            self.kept.add(sequence)
            self._own[sequence] = self._own.get(sequence, 0) + num_again
        else:
            self._num_spare -= num_again

    def ended(self, sequence: Sequence) -> None:
        """It leaves what it might have recomputed of its prompt and has not."""
        self.kept.discard(sequence)
        num_prompt = min(sequence.num_prompt_tokens, max(sequence.num_computed_tokens, self.once_computed(sequence)))
        self._num_spare += max(0, num_prompt - self._own.get(sequence, 0))

    def most_prefill(self) -> int:
        """Twice the prompts that were ever let in, and once the answers of those that were preempted; and what an operator has evicted."""
        most = self._num_evicted
        for sequence in self._admitted:
            num_answer = sequence.num_tokens - sequence.num_prompt_tokens if sequence in self._once else 0
            most += 2 * sequence.num_prompt_tokens + num_answer
        return most

    def most_prefill_of_prompts(self) -> int:
        """Twice the prompts that were ever let in, answers apart; and the prompts' part of what an operator has evicted."""
        return self._num_evicted_of_prompts + 2 * sum(sequence.num_prompt_tokens for sequence in self._admitted)
