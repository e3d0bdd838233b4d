"""Samples of one prompt wait until the first of them has put the prompt into the prefix cache, and then share its pages."""

from jaxpaged.page_manager import PageManager
from jaxpaged.sequence import Sequence, SequenceStatus


class SampleGroups:
    """Who waits for whom. A group has a leader, the first that was added, and followers that are held back.

    Nobody is held when there is nothing to share: without a prefix cache, or when the prompt fills no page before its last token.
    """

    def __init__(self, page_manager: PageManager) -> None:
        self._pages = page_manager
        self._leaders: dict[str, Sequence] = {}
        self._followers: dict[str, list[Sequence]] = {}
        self._num_open: dict[str, int] = {}
        self._begun: set[str] = set()
        self._num_held = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        """Sequences that are held back; `num_prompt_tokens` are theirs."""
        return self._num_held

    def holds(self, sequence: Sequence) -> bool:
        """Whether a new sequence has to wait for its leader; the first of a group becomes the leader."""
        group = sequence.request.sample_group
        if group is not None:
            self._num_open[group] = self._num_open.get(group, 0) + 1
        if group is None or not self._pages.enable_prefix_caching or self._num_shared_tokens(sequence) == 0:
            return False
        if group not in self._leaders:
            self._leaders[group] = sequence
            return False
        self._followers.setdefault(group, []).append(sequence)
        self._count([sequence], 1)
        return True

    def begin(self, sequence: Sequence) -> None:
        """A sequence is let in."""
        if (group := sequence.request.sample_group) is not None:
            self._begun.add(group)

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence, or another sample of its request, was let in before."""
        return sequence.status is SequenceStatus.PREEMPTED or sequence.request.sample_group in self._begun

    @property
    def held(self) -> list[Sequence]:
        """All that are held back."""
        return [sequence for followers in self._followers.values() for sequence in followers]

    def freed_by_progress(self, sequence: Sequence) -> list[Sequence]:
        """Followers that may be queued now, since the whole pages of the prompt of `sequence` are computed, by it or by others before."""
        group = sequence.request.sample_group
        if group is None or self._leaders.get(group) is not sequence or sequence.num_confirmed_tokens < self._num_shared_tokens(sequence):
            return []
        del self._leaders[group]
        return self._count(self._followers.pop(group, []), -1)

    def freed_by_end(self, sequence: Sequence) -> list[Sequence]:
        """Called when `sequence` ends. A follower is forgotten; after a leader the first of its followers may be queued and leads."""
        group = sequence.request.sample_group
        if group is None:
            return []
        self._num_open[group] -= 1
        if not self._num_open[group]:
            del self._num_open[group]
            self._begun.discard(group)
        followers = self._followers.get(group, [])
        if sequence in followers:
            followers.remove(sequence)
            self._count([sequence], -1)
            return []
        if self._leaders.get(group) is not sequence:
            return []
        del self._leaders[group]
        if not followers:
            self._followers.pop(group, None)
            return []
        leader = self._leaders[group] = followers.pop(0)
        return self._count([leader], -1)

    def check(self) -> None:
        """Raises AssertionError if a sequence is held back and has nothing to wait for."""
        for group, followers in self._followers.items():
            leader = self._leaders.get(group)
            assert leader is not None, f"{followers} wait for nobody"
            assert not leader.is_finished, f"{followers} wait for {leader}, which has ended"
            assert leader.num_confirmed_tokens < self._num_shared_tokens(leader), f"{followers} wait for what {leader} has computed"
        assert self._begun <= self._num_open.keys(), "requests that have ended are remembered"
        assert self._num_held == len(self.held), "the samples that are held back are miscounted"
        assert self.num_prompt_tokens == sum(sequence.num_prompt_tokens for sequence in self.held), "their prompts are miscounted"

    def _count(self, sequences: list[Sequence], sign: int) -> list[Sequence]:
        self._num_held += sign * len(sequences)
        self.num_prompt_tokens += sign * sum(sequence.num_prompt_tokens for sequence in sequences)
        return sequences

    def _num_shared_tokens(self, sequence: Sequence) -> int:
        size = self._pages.page_size
        return (sequence.num_prompt_tokens - 1) // size * size
