"""A model made of arithmetic, and a pool that notices every wrong page.

`ShadowRunner` stands where the device stands. For each token of a step it writes one number into a plain list, at the slot
that the sequence's page table names; the number depends on the whole history up to that token, as keys and values do. Then
it reads the whole history back through the page table. Whatever the scheduler or the page manager does wrong with a page
(shared too early, recycled too early, matched to another prefix, one short) reads back as another number.

The next token is a function of what was read, so a wrong page changes the text too, and `solo_answer` says what the text
has to be without any engine.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpaged.page_manager import PageManager
from jaxpaged.request import FinishReason, Request, SamplingParams
from jaxpaged.scheduler import ScheduledStep, Scheduler, Sequence

MODULUS = (1 << 61) - 1
VOCAB = 9
END_TOKENS = frozenset({7, 8})


def advance(history: int, token_id: int) -> int:
    """The number stored for a token that follows `history`."""
    return (history * 1_000_003 + token_id * 7_919 + 12_345) % MODULUS


def next_token(history: int) -> int:
    """The scripted model: an end token once in 32 tokens or so, otherwise one of 7."""
    return 7 + history % 2 if (history >> 7) % 32 == 0 else (history >> 13) % 7


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int | None = 16,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    eos_token_ids: frozenset[int] = END_TOKENS,
) -> Request:
    """A greedy request."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
    )
    return Request(request_id=request_id, prompt_token_ids=prompt, params=params, seed=0, arrival_s=0.0, eos_token_ids=eos_token_ids)


def solo_answer(request: Request, *, max_model_len: int, num_slots: int) -> tuple[list[int], FinishReason]:
    """The answer to `request` as the rules say it, worked out without an engine.

    Args:
        request: what is asked.
        max_model_len: tokens of prompt and answer at most.
        num_slots: tokens that the whole page pool holds.
    """
    params, prompt = request.params, request.prompt_token_ids
    history = 0
    for token_id in prompt:
        history = advance(history, token_id)
    answer: list[int] = []
    while True:
        token_id = next_token(history)
        answer.append(token_id)
        ends = token_id in request.eos_token_ids and not params.ignore_eos
        if (ends or token_id in (params.stop_token_ids or ())) and len(answer) >= params.min_tokens:
            return answer, FinishReason.STOP
        total = len(prompt) + len(answer)
        # The last token is not stored, so one token more than the pool holds can come out.
        if len(answer) == params.max_tokens or total == max_model_len or total == num_slots + 1:
            return answer, FinishReason.LENGTH
        history = advance(history, token_id)


class ShadowRunner:
    """The device: slot numbers in, token ids out."""

    def __init__(self, page_manager: PageManager) -> None:
        self.page_manager = page_manager
        self.slots = [-1] * (page_manager.num_pages * page_manager.page_size)
        self._histories: dict[str, list[int]] = {}

    def history(self, sequence: Sequence) -> list[int]:
        """The numbers that the sequence's tokens should have in the pool."""
        history = self._histories.setdefault(sequence.request_id, [])
        for token_id in sequence.token_ids[len(history) :]:
            history.append(advance(history[-1] if history else 0, token_id))
        return history

    def read(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """What the pool has for the first `num_tokens` tokens, through the page table."""
        size = self.page_manager.page_size
        numbers = [number for page in sequence.pages for number in self.slots[page * size : (page + 1) * size]]
        return numbers[:num_tokens]

    def verify(self, sequence: Sequence, num_tokens: int) -> None:
        """Raises AssertionError unless the first `num_tokens` tokens read back as they were written."""
        assert self.read(sequence, num_tokens) == self.history(sequence)[:num_tokens], f"{sequence} reads a page that is not its own"

    def run(self, step: ScheduledStep) -> list[int]:
        """Writes the step's tokens, reads every row's history, and returns one id for each row (-1 where none is sampled)."""
        size, manager = self.page_manager.page_size, self.page_manager
        for row in step.rows:
            history = self.history(row.sequence)
            end, pages = row.start + row.num_tokens, row.sequence.pages
            assert len(pages) * size >= end, f"{row.sequence} has too few pages"
            for page in pages[row.start // size : (end - 1) // size + 1]:
                assert page != 0, "page 0 was given out"
                assert manager.ref_count(page) == 1, f"page {page} is written and shared"
                assert not manager.is_shareable(page), f"page {page} is written, and a match could find it"
            for position in range(row.start, end):
                self.slots[pages[position // size] * size + position % size] = history[position]
        ids = []
        for row in step.rows:
            end = row.start + row.num_tokens
            self.verify(row.sequence, end)
            ids.append(next_token(self.read(row.sequence, end)[-1]) if row.samples else -1)
        return ids


@dataclass
class Outcome:
    """What a simulation counted."""

    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    max_preemptions: int = 0
    num_prefill_tokens: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    longest_drought: int = 0
    trace: list[tuple[object, ...]] = field(default_factory=list)


class Simulation:
    """Scheduler, page manager and shadow pool, one step at a time, with every check there is after each."""

    def __init__(
        self,
        *,
        num_usable: int,
        page_size: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 1000,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pages = PageManager(num_usable + 1, page_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len
        )
        self.runner = ShadowRunner(self.pages)
        self.outcome = Outcome()
        self.ended: dict[str, Sequence] = {}
        self._drought = 0
        self._admissions: list[Sequence] = []  # running sequences, in order of admission

    def add(self, request: Request) -> Sequence:
        """Queues a request."""
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        self.outcome.num_prompt_tokens += sequence.num_prompt_tokens
        return sequence

    def abort(self, request_id: str) -> None:
        """Ends a request; must find it exactly once."""
        sequence = self.scheduler.abort(request_id)
        assert sequence is not None
        assert self.scheduler.abort(request_id) is None
        self.outcome.num_aborted += 1
        self._end(sequence)

    def finish(self, sequence: Sequence, stop: str) -> None:
        """Ends a sequence as a stop string does."""
        self.scheduler.finish(sequence, FinishReason.STOP, stop)
        self._end(sequence)

    def step(self, between: Callable[[], None] | None = None) -> ScheduledStep | None:
        """One engine step. `between` runs after the step was scheduled and before its results are taken in."""
        scheduler = self.scheduler
        unfinished = scheduler.sequences
        queue = list(unfinished[scheduler.num_running :])
        step = scheduler.schedule()
        if step is None:
            assert not unfinished, "there are requests and nothing runs"
            return None
        self._check_step(step)
        self._check_order(step, queue)
        ids = self.runner.run(step)
        if between is not None:
            between()
        for sequence in scheduler.update(step, ids):
            self._end(sequence)
            self.outcome.num_finished += 1
        scheduler.check()
        for sequence in scheduler.sequences:
            self.runner.verify(sequence, sequence.num_computed_tokens)
        self._count(step)
        return step

    def run(self, *, max_steps: int) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if self.step() is None:
                break
        assert not self.scheduler.sequences, f"unfinished after {max_steps} steps: {self.scheduler.sequences}"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing runs: every page is free or cached, and all are free after a flush."""
        self.scheduler.check()
        assert self.pages.num_in_use == 0
        self.pages.reset_prefix_cache()
        assert self.pages.num_free == self.pages.num_usable
        self.pages.check([])

    def check_answers(self) -> None:
        """Every answer equals its solo run; one that was cut short from outside is the beginning of it."""
        num_slots = self.pages.num_usable * self.pages.page_size
        for sequence in self.ended.values():
            answer, reason = solo_answer(sequence.request, max_model_len=self.scheduler.max_model_len, num_slots=num_slots)
            if sequence.finish_reason is FinishReason.ABORT or isinstance(sequence.stop_reason, str):
                assert answer[: sequence.num_output_tokens] == sequence.output_token_ids
            else:
                assert (answer, reason) == (sequence.output_token_ids, sequence.finish_reason)

    def _end(self, sequence: Sequence) -> None:
        assert sequence.request_id not in self.ended, f"{sequence} ended twice"
        assert sequence.is_finished
        assert sequence.finish_reason is not None
        assert not sequence.pages
        self.ended[sequence.request_id] = sequence

    def _check_step(self, step: ScheduledStep) -> None:
        rows, scheduler = step.rows, self.scheduler
        assert rows
        assert len({row.sequence.request_id for row in rows}) == len(rows) <= scheduler.max_num_seqs
        assert sum(row.num_tokens for row in rows) <= scheduler.max_num_batched_tokens
        assert [row.num_tokens == 1 for row in rows] == sorted((row.num_tokens == 1 for row in rows), reverse=True)
        for row in rows:
            sequence, end = row.sequence, row.start + row.num_tokens
            assert row.num_tokens >= 1
            assert row.start == sequence.num_computed_tokens
            assert row.samples == (end == len(sequence.token_ids))
            assert end <= len(sequence.token_ids) < sequence.max_total_tokens
            # Exactly as many pages as the tokens take, at multiples of the page size too.
            assert len(sequence.pages) == -(-end // self.pages.page_size)
        in_rows = {row.sequence.request_id for row in rows}
        assert all(sequence.request_id in in_rows for sequence in step.admitted)
        assert not (step.admitted and step.preempted), "a request was admitted in a step that had to preempt"
        for sequence in step.preempted:
            assert sequence.request_id not in in_rows
            assert not sequence.pages
        for sequence in step.admitted:
            assert sequence.num_cached_tokens < sequence.num_prompt_tokens, "a hit covers the last prompt token"

    def _check_order(self, step: ScheduledStep, queue: list[Sequence]) -> None:
        """First come, first served; the last admitted is the first to lose its pages, and the first to get them back."""
        assert list(step.admitted) == queue[: len(step.admitted)], "not the head of the queue was admitted"
        running = [sequence for sequence in self._admissions if not sequence.is_finished]
        kept = running[: len(running) - len(step.preempted)]
        assert list(step.preempted) == running[len(kept) :][::-1], "another than the last admitted was preempted"
        self._admissions = [*kept, *step.admitted]
        expected = [*self._admissions, *reversed(step.preempted), *queue[len(step.admitted) :]]
        assert list(self.scheduler.sequences) == expected, "a request was lost, or is not where it belongs"

    def _count(self, step: ScheduledStep) -> None:
        outcome = self.outcome
        outcome.num_steps += 1
        outcome.num_preemptions += len(step.preempted)
        for sequence in step.preempted:
            outcome.max_preemptions = max(outcome.max_preemptions, sequence.num_preemptions)
        outcome.num_prefill_tokens += sum(row.num_tokens for row in step.rows if row.num_tokens > 1 or not row.samples)
        outcome.num_hit_tokens += step.prefix_hits_tokens
        self._drought = 0 if any(row.samples for row in step.rows) else self._drought + 1
        outcome.longest_drought = max(outcome.longest_drought, self._drought)
        outcome.trace.append(
            (*((row.sequence.request_id, row.start, row.num_tokens, tuple(row.sequence.pages)) for row in step.rows), step.decision)
        )


def simulate(seed: int) -> Outcome:
    """One random world: limits, pool, arrivals, aborts and stop strings all come from `seed`.

    Raises:
        AssertionError: something is wrong with a step, a page, a count or an answer.
    """
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 3, 4, 8))
    num_usable = rng.randint(max(4, 24 // page_size), 60 // page_size + 4)
    max_model_len = rng.choice((30, 50, 1000))
    simulation = Simulation(
        num_usable=num_usable,
        page_size=page_size,
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((1, 3, 8, 16, 64)),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.8,
    )
    longest_prompt = min(max_model_len - 1, num_usable * page_size - 1)
    families = [[rng.randrange(3) for _ in range(longest_prompt)] for _ in range(3)]
    arrivals = deque(sorted(rng.randrange(150) for _ in range(rng.randint(4, 24))))
    abort_chance = rng.choice((0.0, 0.01, 0.05))
    reset_chance = rng.choice((0.0, 0.0, 0.05))
    num_added = 0

    def disturb() -> None:
        if rng.random() < abort_chance and (unfinished := simulation.scheduler.sequences):
            simulation.abort(rng.choice(unfinished).request_id)
        if rng.random() < reset_chance:
            simulation.pages.reset_prefix_cache()

    for now in range(5000):
        while arrivals and arrivals[0] <= now:
            arrivals.popleft()
            family = rng.choice(families)
            length = rng.randint(1, longest_prompt if rng.random() < 0.2 else min(12, longest_prompt))
            shared = rng.randint(0, length)
            max_tokens = rng.choice((None, 1, rng.randint(1, 60)))
            request = make_request(
                f"r{num_added}",
                family[:shared] + [rng.randrange(3) for _ in range(length - shared)],
                max_tokens=max_tokens,
                min_tokens=rng.choice((0, 0, 1 if max_tokens is None else rng.randint(0, max_tokens))),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=(rng.randrange(7),) if rng.random() < 0.2 else (),
            )
            simulation.add(request)
            num_added += 1
        disturb()
        step = simulation.step(between=disturb)
        if step is None and not arrivals:
            break
        for sequence in simulation.scheduler.sequences:
            if rng.random() < 0.01 and sequence.num_output_tokens:
                simulation.finish(sequence, "a stop string")
        if step is not None:
            simulation.outcome.trace.append((now, simulation.pages.num_free, simulation.pages.num_cached_idle))
    assert not simulation.scheduler.sequences, "requests are left over after 5,000 steps"
    assert len(simulation.ended) == num_added, "a request was lost"
    simulation.check_answers()
    simulation.check_idle()
    return simulation.outcome
