"""Driving a scheduler by hand, for tests of its rules."""

from jaxpaged.output_lengths import OutputLengths
from jaxpaged.page_manager import PageManager
from jaxpaged.scheduler import ScheduledStep, Scheduler, Sequence
from tests.scheduler.table_model import make_request


def make_scheduler(
    num_usable: int = 64,
    page_size: int = 4,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1000,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(
        PageManager(num_usable + 1, page_size, enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        clock=lambda: 0.0,
    )


def add(scheduler: Scheduler, request_id: str, prompt: int | list[int], **params: object) -> Sequence:
    """Queues a request; a number stands for a prompt of so many tokens, all its own."""
    tokens = [hash_free_id(request_id)] * prompt if isinstance(prompt, int) else prompt
    sequence = Sequence(make_request(request_id, tokens, **params))  # type: ignore[arg-type]
    scheduler.add(sequence)
    return sequence


def hash_free_id(text: str) -> int:
    return 100 + sum(text.encode())


def step(scheduler: Scheduler, token_id: int = 1) -> ScheduledStep:
    """One step in which every row samples `token_id`."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.update(scheduled, [token_id] * len(scheduled.rows))
    scheduler.check()
    return scheduled


def rows_of(scheduled: ScheduledStep) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.request_id, row.start, row.num_tokens, row.samples) for row in scheduled.rows]


def expect_short_answers(scheduler: Scheduler) -> None:
    """Makes admission believe that every answer ends at once, so that it lets in more than the pool can hold."""
    scheduler._admission.lengths = OutputLengths(0.0)
    scheduler._admission.lengths.record(1)


def fill_two(scheduler: Scheduler) -> tuple[Sequence, Sequence]:
    """Two sequences of 8 computed tokens in a pool of 5 pages of 4, both about to need a page that is not there."""
    expect_short_answers(scheduler)
    a = add(scheduler, "a", 7, max_tokens=5)
    b = add(scheduler, "b", 7, max_tokens=5)
    step(scheduler)
    step(scheduler)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (8, 8)
    return a, b
