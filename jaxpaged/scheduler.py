"""What runs in the next step: token budget, admission, chunks of prompts, preemption.

One step is chosen in three passes, and nothing in a later pass takes from an earlier one:

    1. one token for each running sequence that has one to compute (decoding, or the last token of a prompt)
    2. chunks of the prompts that are running, oldest first, as far as the token budget and the pages go
    3. waiting requests, first come first served, while tokens, rows and pages last

Pages are allocated for the tokens of the step and no more. When pass 1 finds none, the sequence that was admitted last
loses its pages, goes to the front of the queue and is recomputed later, through the prefix cache. A request is admitted
only when the pages for all its known tokens, and for those of every running sequence, and one token more of each, are
there: so admission never causes a preemption in the next step, and a preempted request waits until another has ended.
That bounds how often a request can be preempted: by the number of those admitted before it.
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from jaxpaged.errors import ConfigError, ContextLengthError, InvalidRequestError, PoolTooSmallError
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason
from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.sequence import Sequence, SequenceStatus

__all__ = ["ScheduledRow", "ScheduledStep", "Scheduler", "Sequence", "SequenceStatus"]


class Scheduler:
    """Owns all unfinished sequences and their page tables. Only the engine's thread calls it.

    Args:
        page_manager: the pool.
        max_num_seqs: rows of a step at most (never more than the token budget, so that every running row can go on).
        max_num_batched_tokens: tokens of a step at most.
        max_model_len: tokens of prompt and answer at most.

    Raises:
        ConfigError: a limit is not positive.
    """

    def __init__(self, page_manager: PageManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len}
        for name, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit}", param=name)
        self._pages = page_manager
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: list[Sequence] = []  # in order of admission

    @property
    def num_waiting(self) -> int:
        """Requests without pages, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with pages."""
        return len(self._running)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All unfinished sequences: running ones in order of admission, then waiting ones in order of the queue."""
        return (*self._running, *self._waiting.values())

    def check_fits(self, num_prompt: int) -> None:
        """Checks that a prompt of `num_prompt` tokens can ever run.

        Raises:
            InvalidRequestError: the prompt is empty.
            ContextLengthError: the prompt leaves no room for an answer in the context.
            PoolTooSmallError: the prompt and one token can never fit in the page pool.
        """
        pool, num_usable = self._pages, self._pages.num_usable
        if num_prompt == 0:
            raise InvalidRequestError("The prompt is empty: give at least one token", param="prompt")
        if num_prompt >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens and the context {self.max_model_len}, which leaves no room for an answer: "
                f"shorten the prompt to at most {self.max_model_len - 1} tokens",
                param="prompt",
            )
        if pool.pages_for(num_prompt + 1) > num_usable:
            raise PoolTooSmallError(
                f"The prompt has {num_prompt} tokens and needs {pool.pages_for(num_prompt + 1)} pages with the first token of the answer, "
                f"and the page pool has {num_usable} pages of {pool.page_size} tokens: shorten the prompt to at most "
                f"{num_usable * pool.page_size - 1} tokens or give the pool more memory (--cache.memory)",
                param="prompt",
            )

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the queue and sets its `max_total_tokens`.

        An answer may be cut short by the context, or by a pool that it would fill alone; either ends it with LENGTH.

        Raises:
            InvalidRequestError: the request id is in use, or the prompt can never run (see `check_fits`).
        """
        pool, num_prompt, num_usable = self._pages, sequence.num_prompt_tokens, self._pages.num_usable
        self.check_fits(num_prompt)
        if any(sequence.request_id == other.request_id for other in self._running) or sequence.request_id in self._waiting:
            raise InvalidRequestError(f"The request id {sequence.request_id!r} is already in use", param="request_id")
        max_tokens = sequence.request.params.max_tokens
        # The last token of an answer is never computed, so it needs no place in the pool.
        sequence.max_total_tokens = min(
            self.max_model_len,
            num_usable * pool.page_size + 1,
            self.max_model_len if max_tokens is None else num_prompt + max_tokens,
        )
        self._waiting[sequence.request_id] = sequence

    def schedule(self) -> ScheduledStep | None:
        """Chooses the next step and allocates its pages; None when there is nothing to run.

        The page tables are as the step needs them; `num_computed_tokens` moves on in `update`.
        """
        ones: list[ScheduledRow] = []
        chunks: list[ScheduledRow] = []
        preempted: list[Sequence] = []
        partial = self._schedule_one_token_rows(ones, preempted)
        budget = self._schedule_chunks(partial, self.max_num_batched_tokens - len(ones), chunks)
        while not ones and not chunks and self._running:
            # Prompts in progress hold every page between them.
            preempted.append(self._preempt_last())
            budget = self._schedule_chunks(partial, self.max_num_batched_tokens, chunks)
        step = self._admit(ones, chunks, preempted, budget)
        return step if step.rows else None

    def update(self, step: ScheduledStep, token_ids: SequenceOf[int]) -> list[Sequence]:
        """Takes in what a step computed: sampled ids, ends, pages that have filled up.

        Whole pages of known ids become findable, those of a sequence that ends here too, before it lets go of them.
        A sequence that was aborted after `schedule` is passed over.

        Args:
            step: what `schedule` returned.
            token_ids: the sampled id of each row of `step`; ignored for rows that do not sample.

        Returns:
            Sequences that ended in this step, in the order of rows. Their pages are given back.
        """
        finished = []
        page_size = self._pages.page_size
        for row, token_id in zip(step.rows, token_ids, strict=True):
            sequence = row.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            end = row.start + row.num_tokens
            sequence.num_computed_tokens = end
            if row.samples and sequence.append(token_id):
                finished.append(sequence)
                continue
            if row.start // page_size != end // page_size:
                self._commit(sequence)
        if finished:
            for sequence in finished:
                self._release(sequence, commit=True)
            self._running = [sequence for sequence in self._running if not sequence.is_finished]
        return finished

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends a sequence from outside: a stop string was found in its text, it failed, or it is no longer wanted.

        A sequence that has ended already gives nothing back again; but a stop string in its last token turns LENGTH into STOP, and a
        failure after that turns either into ERROR.
        """
        if sequence.is_finished:
            known = sequence.finish_reason
            if (known is FinishReason.LENGTH and reason is FinishReason.STOP) or (
                known is not FinishReason.ABORT and reason is FinishReason.ERROR
            ):
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            del self._waiting[sequence.request_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        # What a failed step wrote is not to be found by others.
        self._release(sequence, commit=reason is not FinishReason.ERROR)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request in whatever state it is. None when no such request is unfinished."""
        sequence = self._waiting.get(request_id)
        if sequence is None:
            sequence = next((other for other in self._running if other.request_id == request_id), None)
        if sequence is not None:
            self.finish(sequence, FinishReason.ABORT)
        return sequence

    def check(self) -> None:
        """Verifies the books between steps: queues, page tables, reference counts. Raises AssertionError naming what is wrong."""
        pages = self._pages
        pages.check([sequence.pages for sequence in self._running])
        assert len(self._running) <= self.max_num_seqs, "more sequences run than rows fit in a step"
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence} is among the running"
            assert len(sequence.pages) == pages.pages_for(sequence.num_computed_tokens), f"{sequence} has the wrong number of pages"
            assert 0 < sequence.num_computed_tokens < len(sequence.token_ids), f"{sequence} has nothing to compute"
        for request_id, sequence in self._waiting.items():
            assert sequence.request_id == request_id
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED), f"{sequence} is in the queue"
            assert not sequence.pages, f"{sequence} waits and has pages"
            assert sequence.num_computed_tokens == 0, f"{sequence} waits and has computed tokens"

    def _schedule_one_token_rows(self, ones: list[ScheduledRow], preempted: list[Sequence]) -> list[Sequence]:
        """Pass 1; returns the running sequences that have more than one token to compute."""
        partial = []
        page_size = self._pages.page_size
        running = self._running
        index = 0
        # Preemption shortens the list from its end, never before `index`.
        while index < len(running):
            sequence = running[index]
            index += 1
            start = sequence.num_computed_tokens
            if len(sequence.token_ids) - start > 1:
                partial.append(sequence)
            elif start < len(sequence.pages) * page_size or self._allocate_by_force(sequence, preempted):
                ones.append(ScheduledRow(sequence, 1, start, True))
        return partial

    def _allocate_by_force(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """One page more for `sequence`, at the cost of the last admitted ones; False when that is `sequence` itself."""
        while (pages := self._pages.allocate(1)) is None:
            victim = self._preempt_last()
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.pages += pages
        return True

    def _preempt_last(self) -> Sequence:
        """Takes the pages of the sequence admitted last. Its full pages are in the prefix cache already, since `update` commits at once."""
        victim = self._running.pop()
        victim.num_lost_tokens = victim.num_computed_tokens
        self._release(victim, commit=False)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = SequenceStatus.PREEMPTED
        self._waiting[victim.request_id] = victim
        self._waiting.move_to_end(victim.request_id, last=False)
        return victim

    def _schedule_chunks(self, partial: list[Sequence], budget: int, chunks: list[ScheduledRow]) -> int:
        """Pass 2: chunks as long as budget and pages allow, preempting nobody; returns the budget that is left."""
        for sequence in partial:
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            start = sequence.num_computed_tokens
            room = (len(sequence.pages) + self._pages.num_available) * self._pages.page_size - start
            num_tokens = min(sequence.num_pending_tokens, budget, room)
            if num_tokens > 0:
                chunks.append(self._chunk(sequence, num_tokens))
                budget -= num_tokens
        return budget

    def _chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        start = sequence.num_computed_tokens
        pages = self._pages.allocate(self._pages.pages_for(start + num_tokens) - len(sequence.pages))
        if pages is None:
            raise AssertionError(f"{sequence}: no pages for {num_tokens} tokens that were there a moment ago")
        sequence.pages += pages
        return ScheduledRow(sequence, num_tokens, start, start + num_tokens == len(sequence.token_ids))

    def _admit(self, ones: list[ScheduledRow], chunks: list[ScheduledRow], preempted: list[Sequence], budget: int) -> ScheduledStep:
        """Pass 3, and the step it completes."""
        admitted: list[Sequence] = []
        num_waiting = len(self._waiting)
        queries = hits = 0
        reason = "preemption" if preempted else ""
        # Pages that running sequences will need for what they have to compute already, and one token more of each.
        promised = sum(self._num_pages_wanted(sequence) for sequence in self._running) if self._waiting and not preempted else 0
        while self._waiting and not reason:
            sequence = next(iter(self._waiting.values()))
            if len(self._running) == self.max_num_seqs:
                reason = "rows"
            elif budget == 0:
                reason = "tokens"
            elif not self._take_cached_pages(sequence, promised):
                if not self._running:
                    raise AssertionError(f"{sequence} does not fit in an idle engine: {self._pages.num_in_use} pages are in use by nobody")
                reason = "pages"
            else:
                if sequence.status is SequenceStatus.WAITING and self._pages.enable_prefix_caching:
                    sequence.num_cached_tokens = sequence.num_computed_tokens
                    queries += sequence.num_prompt_tokens
                    hits += sequence.num_cached_tokens
                del self._waiting[sequence.request_id]
                sequence.status = SequenceStatus.RUNNING
                self._running.append(sequence)
                admitted.append(sequence)
                row = self._chunk(sequence, min(sequence.num_pending_tokens, budget))
                chunks.append(row)
                budget -= row.num_tokens
                promised += self._num_pages_wanted(sequence)
        decision = ""
        if num_waiting:
            decision = f"admitted {len(admitted)} of {num_waiting}" + (f": {reason}" if reason else "")
        ones += [row for row in chunks if row.num_tokens == 1]
        rows = (*ones, *(row for row in chunks if row.num_tokens > 1))
        return ScheduledStep(rows, tuple(admitted), tuple(preempted), decision, queries, hits)

    def _num_pages_wanted(self, sequence: Sequence) -> int:
        """Pages to come for the known tokens of `sequence` and the next one.

        For each time that it was preempted it is expected to go on for as long as its answer is by now, so that it is
        not readmitted only to be preempted again.
        """
        num_tokens = len(sequence.token_ids) + 1 + sequence.num_preemptions * sequence.num_output_tokens
        # The last token of an answer is never computed.
        return self._pages.pages_for(min(num_tokens, sequence.max_total_tokens - 1)) - len(sequence.pages)

    def _take_cached_pages(self, sequence: Sequence, promised: int) -> bool:
        """Gives a waiting sequence its cached prefix, if the pages that it wants beyond are there; else changes nothing."""
        sequence.pages = self._pages.match(sequence.token_ids, digests=sequence.page_digests)
        if self._num_pages_wanted(sequence) > self._pages.num_available - promised:
            self._pages.release(sequence.pages)
            sequence.pages = []
            return False
        sequence.num_computed_tokens = len(sequence.pages) * self._pages.page_size
        return True

    def _commit(self, sequence: Sequence) -> None:
        self._pages.commit(sequence.token_ids, sequence.pages, sequence.num_computed_tokens, digests=sequence.page_digests)

    def _release(self, sequence: Sequence, *, commit: bool) -> None:
        if commit:
            self._commit(sequence)
        self._pages.release(sequence.pages)
        sequence.num_pages_freed = len(sequence.pages)
        sequence.pages = []
