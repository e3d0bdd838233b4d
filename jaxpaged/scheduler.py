"""What runs in the next step: token budget, chunks of prompts, preemption; and what its results change.

One step is chosen in four passes, and nothing in a later pass takes from an earlier one:

    0. a waiting request of strictly higher priority takes the place of running ones, if the last step had no room for it
    1. one token for each running sequence that has one to compute (decoding, or the last token of a prompt; `running_rows`)
    2. chunks of the prompts that are running, in the order of the queue, as far as the token budget and the pages go; a waiting
       request that comes before one of them in that order is let in before its chunk
    3. the other waiting requests, in the order of the queue, while tokens, slots and pages last (`admission`)

Pages are allocated for the tokens of the step and no more. When pass 1 finds none, the sequence of the lowest priority that
was admitted last loses its pages, goes back to its place in the queue and is recomputed later, through the prefix cache. One
that has lost them twice, or that may not be computed once more (`admission`), comes back only when all the pages that it can
ever need are there and kept for it, and never loses them again: so every request is preempted at most twice, and all prefill
together is at most twice the prompts and once the answers of those that were preempted.

Steps may be scheduled ahead of their results. `schedule` advances its sequences at once, as the device will; an id that is
not known yet is pending, and the device takes it from the sequence's slot. `update` makes ids known, in the order of steps.
Whatever a sequence gives up (pages, slot) may be given out again at once, since the device runs steps in order.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from jaxpaged.admission import Admission
from jaxpaged.admission_limits import AdmissionLimits, Deadlines
from jaxpaged.config import SchedulerConfig
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason
from jaxpaged.running_rows import RunningRows
from jaxpaged.running_set import RunningSet
from jaxpaged.sample_groups import SampleGroups
from jaxpaged.scheduled_step import ScheduledRow, ScheduledStep
from jaxpaged.sequence import NO_SLOT, Sequence, SequenceStatus
from jaxpaged.step_budget import StepBudget
from jaxpaged.step_draft import StepDraft
from jaxpaged.waiting_queue import WaitingQueue

__all__ = ["ScheduledRow", "ScheduledStep", "Scheduler", "Sequence", "SequenceStatus"]

DEFAULT_POLICY = SchedulerConfig()
_QUEUE_KEY = attrgetter("queue_key")


class Scheduler:
    """Owns all unfinished sequences and their page tables; those in `running` have pages. Only the engine's thread calls it.

    Args:
        page_manager: the pool.
        max_num_seqs: rows of a step at most (never more than the token budget, so that every running row can go on).
        max_num_batched_tokens: tokens of a step at most.
        max_model_len: tokens of prompt and answer at most.
        clock: monotonic seconds.
        policy: priorities, targets and limits of the queue; its sizes of a step are not looked at.
        token_buckets: token counts that steps are padded to, if they are: a step costs what its bucket costs.
        takes_whole_prompts: no prompt is cut into chunks, as encoders need it; none may be longer than the token budget then.

    Raises:
        ConfigError: a limit is not positive, or contradicts another.
    """

    def __init__(
        self,
        page_manager: PageManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        clock: Callable[[], float],
        policy: SchedulerConfig = DEFAULT_POLICY,
        token_buckets: tuple[int, ...] = (),
        takes_whole_prompts: bool = False,
    ) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len}
        for name, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit}", param=name)
        self._pages = page_manager
        self._clock = clock
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._limits = AdmissionLimits(page_manager, policy, max_model_len)
        self._deadlines = Deadlines(policy)
        self._budget = StepBudget(policy, max_num_batched_tokens, token_buckets)
        self._queue = WaitingQueue(policy.ageing_s)
        self._samples = SampleGroups(page_manager)
        self.running = self._running = RunningSet(page_manager, self.max_num_seqs)
        self._rows = RunningRows(page_manager, self._queue, self._running)
        self._admission = Admission(page_manager, self._queue, self._running, self._limits, self._budget, takes_whole_prompts)
        self._unfinished: dict[str, Sequence] = {}
        self._in_flight: deque[ScheduledStep] = deque()
        self._is_paused = self._is_draining = False

    @property
    def num_waiting(self) -> int:
        """Requests without pages, preempted ones included."""
        return len(self._queue) + len(self._samples)

    @property
    def num_running(self) -> int:
        """Requests with pages."""
        return len(self._running.sequences)

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and are not taken in yet."""
        return len(self._in_flight)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """All unfinished sequences: running ones (best priority first, then in order of admission), then the queue in order."""
        return (*self._running.sequences, *self._queue, *self._samples.held)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is scheduled until `resume`."""
        return self._is_paused

    @property
    def is_draining(self) -> bool:
        """Whether no new request is let in until `resume`, and those that have begun go on."""
        return self._is_draining

    @property
    def is_drained(self) -> bool:
        """Whether it is draining, and none that has begun is left."""
        return self._is_draining and not self._running.sequences and self._queue.first_of(self._samples.has_begun) is None

    @property
    def next_deadline_s(self) -> float | None:
        """When, by the clock, `expire` may next have something to end; None without time limits."""
        return self._deadlines.next_s

    @property
    def most_prompt_tokens(self) -> int:
        """The longest prompt that `check_fits` lets through."""
        return self._limits.most_prompt_tokens

    def check_fits(self, num_prompt: int) -> None:
        """Raises as `AdmissionLimits.check_fits` for a prompt of `num_prompt` tokens that can never run."""
        self._limits.check_fits(num_prompt)

    def check_queue(self, num_prompt: int) -> None:
        """Raises QueueFullError when the limits of the queue do not let one more prompt of so many tokens in."""
        num_waiting_tokens = self._queue.num_prompt_tokens + self._samples.num_prompt_tokens
        self._limits.check_queue(num_prompt, self.num_waiting, num_waiting_tokens)

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue, behind all of its priority, and sets its `max_total_tokens`.

        An answer may be cut short by the context, or by a pool that it would fill alone; either ends it with LENGTH.

        Raises:
            InvalidRequestError: the request id is in use, or the prompt can never run (see `check_fits`).
            QueueFullError: too much waits already.
        """
        self._check_new(sequence)
        self.check_queue(sequence.num_prompt_tokens)
        self._enqueue(sequence, has_queue_limit=True)

    def add_sample(self, sequence: Sequence) -> None:
        """As `add`, for a further sample of a request whose first one was added just now: the limits of the queue were asked then."""
        self._check_new(sequence)
        self._enqueue(sequence, has_queue_limit=False)

    def schedule(self) -> ScheduledStep | None:
        """Chooses the next step and allocates its pages, as if all earlier steps had run.

        Returns:
            None when there is nothing to run, or nothing before `update` has taken in a step that is in flight.
        """
        if self._is_paused:
            return None
        draft = StepDraft()
        displacer = None if self._is_draining else self._admission.displace(draft, self._rows.preempt)
        partial = self._rows.take_one_token_each(draft, is_ahead=bool(self._in_flight))
        if partial or len(self._queue):
            draft.budget = self._prompt_budget(partial, len(draft.ones))
            partial.sort(key=_QUEUE_KEY)
            if displacer in partial:
                partial.remove(displacer)
                self._rows.take_chunk(displacer, draft)
            self._take_chunks(partial, draft)
            while partial and not draft.ones and not draft.chunks and not self._in_flight and (victim := self._running.victim()):
                # Prompts in progress hold every page between them.
                self._rows.preempt(victim, draft)
                self._take_chunks(partial, draft)
            self._admission.admit(draft, only=self._samples.has_begun if self._is_draining else None)
        if not draft.ones and not draft.chunks:
            if draft.preempted:
                raise AssertionError(f"{draft.preempted} lost their pages and nobody got them")
            return None
        for sequence in draft.admitted:
            self._samples.begin(sequence)
            # Its prompt may have been in the prefix cache already.
            self._free_followers(sequence)
        step = draft.step()
        self._in_flight.append(step)
        return step

    def update(self, step: ScheduledStep, token_ids: SequenceOf[int]) -> list[Sequence]:
        """Takes in what a step computed: sampled ids, ends, pages that have filled up. Once for every step, in their order.

        Whole pages of known ids become findable, those of a sequence that ends here too, before it lets go of them.
        Rows of sequences that have ended since `schedule` are passed over, and so is what they were admitted for before a
        preemption; an id that was on its way at a preemption is taken in, and only then may its sequence come back.

        Args:
            step: what `schedule` returned.
            token_ids: the sampled id of each row of `step`; ignored for rows that do not sample.

        Returns:
            Sequences that ended in this step, in the order of rows. Their pages are given back.

        Raises:
            AssertionError: an earlier step has not been taken in.
        """
        if not self._in_flight or self._in_flight.popleft() is not step:
            raise AssertionError("steps must be taken in once each, in the order in which they were scheduled")
        finished = []
        full: list[Sequence] = []
        page_size, running = self._pages.page_size, SequenceStatus.RUNNING
        for row, token_id in zip(step.rows, token_ids, strict=True):
            sequence = row.sequence
            if sequence.epoch != row.epoch or sequence.finish_reason is not None:
                continue
            end = row.start + row.num_tokens
            if sequence.status is running:
                sequence.num_confirmed_tokens = end
                if row.start // page_size != end // page_size:
                    full.append(sequence)
            if row.samples:
                sequence.num_pending_ids -= 1
                if sequence.append(token_id):
                    finished.append(sequence)
        for sequence in finished:
            if sequence.max_total_tokens > sequence.num_prompt_tokens + 1:
                # How long an answer would have become, one of a single token does not tell.
                self._admission.lengths.record(sequence.num_output_tokens)
            self._end(sequence, commit=True)
        for sequence in full:
            if not sequence.is_finished:
                self._commit(sequence)
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
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if reason is FinishReason.STOP:
            self._admission.lengths.record(sequence.num_output_tokens)
        # What a failed step wrote is not to be found by others.
        self._end(sequence, commit=reason is not FinishReason.ERROR)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request in whatever state it is. None when no such request is unfinished."""
        sequence = self._unfinished.get(request_id)
        if sequence is not None:
            self.finish(sequence, FinishReason.ABORT)
        return sequence

    def expire(self) -> list[Sequence]:
        """Ends requests whose time limit is over, with ABORT, and says why in their `message`; the engine asks before each step."""
        expired = []
        for sequence, error in self._deadlines.expired(self._clock()):
            sequence.message, sequence.error_code = error.message, error.code
            self.finish(sequence, FinishReason.ABORT)
            expired.append(sequence)
        return expired

    def observe(self, step: ScheduledStep, seconds: float) -> None:
        """Tells how long a step took, so that later ones keep `target_itl_s` and `target_ttft_s`."""
        self._budget.observe(sum(row.num_tokens for row in step.rows), seconds)

    def pause(self) -> None:
        """Schedules nothing until `resume`; running sequences keep their pages, requests may be added and aborted."""
        self._is_paused, self._is_draining = True, False

    def drain(self) -> None:
        """Lets no new request in until `resume`; those that have begun go on to their ends, with all samples and over preemptions."""
        self._is_paused, self._is_draining = False, True

    def resume(self) -> None:
        """Goes on after `pause` or `drain`."""
        self._is_paused = self._is_draining = False

    def evict_running(self) -> tuple[Sequence, ...]:
        """Takes the pages of all that run; they are computed again later. An operator's wish does not count as a preemption.

        Returns:
            Those that lost their pages. They keep their answers and their places in the queue.
        """
        draft = StepDraft()
        for sequence in reversed(tuple(self._running.sequences)):
            num_preemptions = sequence.num_preemptions
            self._rows.preempt(sequence, draft)
            sequence.num_preemptions, sequence.num_charged_tokens = num_preemptions, 0
        return tuple(draft.preempted)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached pages; what unfinished sequences have computed so far is never shared either."""
        self._pages.reset_prefix_cache()

    def check(self) -> None:
        """Verifies the books between steps: queues, page tables, reference counts. Raises AssertionError naming what is wrong."""
        pages, running = self._pages, self._running
        pages.check([table for sequence in running.sequences for table in sequence.tables])
        running.check()
        self._samples.check()
        for sequence in running.sequences:
            assert sequence.status is SequenceStatus.RUNNING, f"{sequence} is among the running"
            for group, table in zip(pages.groups, sequence.tables, strict=True):
                assert len(table) == pages.pages_for(sequence.num_computed_tokens), f"{sequence} has the wrong number of pages"
                first = group.first_page(sequence.num_computed_tokens, pages.page_size)
                assert all(table[first:]), f"{sequence} has given back a page that it still sees"
            assert 0 < sequence.num_computed_tokens < sequence.num_tokens, f"{sequence} has nothing to compute"
            assert sequence.num_confirmed_tokens <= sequence.num_computed_tokens
            assert sequence.num_tokens <= sequence.max_total_tokens, f"{sequence} is too long"
        waiting = [*self._queue, *self._samples.held]
        for sequence in waiting:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED), f"{sequence} is in the queue"
            assert not any(sequence.tables), f"{sequence} waits and has pages"
            assert sequence.slot == NO_SLOT, f"{sequence} waits and has a slot"
            assert sequence.num_computed_tokens == 0, f"{sequence} waits and has computed tokens"
        known = [*running.sequences, *waiting]
        assert len(known) == len(self._unfinished), "a sequence is lost"
        assert {sequence.request_id: sequence for sequence in known} == self._unfinished, "a sequence is lost"
        if not self._in_flight:
            assert not any(sequence.num_pending_ids for sequence in known), "an id is pending and no step is in flight"

    def _check_new(self, sequence: Sequence) -> None:
        self.check_fits(sequence.num_prompt_tokens)
        if sequence.request_id in self._unfinished:
            raise InvalidRequestError(f"The request id {sequence.request_id!r} is already in use", param="request_id")

    def _enqueue(self, sequence: Sequence, *, has_queue_limit: bool) -> None:
        sequence.max_total_tokens = self._limits.max_total_tokens(sequence)
        sequence.tables = self._pages.empty_tables()
        self._unfinished[sequence.request_id] = sequence
        self._queue.place(sequence, self._clock())
        self._deadlines.add(sequence, has_queue_limit=has_queue_limit)
        if not self._samples.holds(sequence):
            self._queue.add(sequence)

    def _take_chunks(self, partial: list[Sequence], draft: StepDraft) -> None:
        """Tokens for prompts in progress, in the order of the queue: whoever waits and comes before one of them is let in before it."""
        for sequence in partial:
            if not self._is_draining and len(self._queue) and self._queue.first().queue_key < sequence.queue_key:
                self._admission.admit(draft, ahead_of=sequence)
            self._rows.take_chunk(sequence, draft)

    def _prompt_budget(self, partial: list[Sequence], num_ones: int) -> int:
        if not self._budget.has_target:
            return self.max_num_batched_tokens - num_ones
        backlog = self._queue.num_prompt_tokens + sum(sequence.num_uncomputed_tokens for sequence in partial)
        first = [sequence for sequence in partial if not sequence.num_output_tokens]
        if len(self._queue):
            first.append(self._queue.first())
        oldest_s = self._clock() - min(sequence.queued_s for sequence in first) if first else None
        return self._budget.prompt_tokens(num_ones, backlog, oldest_s)

    def _commit(self, sequence: Sequence) -> None:
        self._pages.commit(sequence.token_ids, sequence.tables, sequence.num_confirmed_tokens, sequence.prefix)
        if sequence.num_confirmed_tokens <= sequence.num_prompt_tokens:
            # A page of a prompt is what others may be waiting for.
            self._running.version += 1
        self._free_followers(sequence)

    def _free_followers(self, sequence: Sequence) -> None:
        for follower in self._samples.freed_by_progress(sequence):
            self._queue.add(follower)

    def _end(self, sequence: Sequence, *, commit: bool) -> None:
        """Takes a sequence with a `finish_reason` out of wherever it is."""
        self._admission.settle(sequence)
        if sequence.slot != NO_SLOT:
            self._running.leave(sequence, commit=commit)
        elif sequence in self._queue:
            self._queue.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.num_pending_ids = 0
        del self._unfinished[sequence.request_id]
        for follower in self._samples.freed_by_end(sequence):
            self._queue.add(follower)
