"""Small steps for tests of one rule at a time."""

from jaxpaged.config import SchedulerConfig
from jaxpaged.kv_groups import FULL, KVGroup
from jaxpaged.output_lengths import OutputLengths
from jaxpaged.page_manager import PageManager
from jaxpaged.scheduler import ScheduledStep, Scheduler, Sequence
from tests.scheduler.table_model import make_request


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Hopeful(OutputLengths):
    """Expects nothing more of anybody, so that more is let in than the pool can hold."""

    def expected_remaining(self, num_tokens: int, quantile: float) -> int:
        return 0


def make_scheduler(
    num_usable: int = 64,
    page_size: int = 4,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1000,
    enable_prefix_caching: bool = True,
    groups: tuple[KVGroup, ...] = (FULL,),
    clock: Clock | None = None,
    is_hopeful: bool = False,
    takes_whole_prompts: bool = False,
    **policy: object,
) -> Scheduler:
    scheduler = Scheduler(
        PageManager(num_usable + 1, page_size, enable_prefix_caching, groups),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        clock=clock or Clock(),
        policy=SchedulerConfig(**policy),  # type: ignore[arg-type]
        takes_whole_prompts=takes_whole_prompts,
    )
    if is_hopeful:
        scheduler._admission.lengths = Hopeful()
    return scheduler


def add(scheduler: Scheduler, request_id: str, prompt: int | list[int], **fields: object) -> Sequence:
    """Queues a request; a number stands for a prompt of so many tokens, all its own."""
    tokens = [100 + sum(request_id.encode())] * prompt if isinstance(prompt, int) else prompt
    sequence = Sequence(make_request(request_id, tokens, **fields))  # type: ignore[arg-type]
    scheduler.add(sequence)
    return sequence


def fill_two(scheduler: Scheduler) -> tuple[Sequence, Sequence]:
    """Two sequences of 8 computed tokens in a pool of 4 pages of 4, both about to need a page that is not there."""
    a = add(scheduler, "a", 7, max_tokens=5)
    b = add(scheduler, "b", 7, max_tokens=5)
    step(scheduler)
    step(scheduler)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (8, 8)
    return a, b


def step(scheduler: Scheduler, token_id: int = 1) -> ScheduledStep:
    """One step in which every row samples `token_id`."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.update(scheduled, [token_id] * len(scheduled.rows))
    scheduler.check()
    return scheduled


def schedule(scheduler: Scheduler) -> ScheduledStep:
    """Schedules a step that stays in flight."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.check()
    return scheduled


def update(scheduler: Scheduler, scheduled: ScheduledStep, token_id: int = 1) -> list[Sequence]:
    """Takes in a step in which every row sampled `token_id`."""
    finished = scheduler.update(scheduled, [token_id] * len(scheduled.rows))
    scheduler.check()
    return finished


def rows_of(scheduled: ScheduledStep) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.request_id, row.start, row.num_tokens, row.samples) for row in scheduled.rows]


def ids_of(sequences: tuple[Sequence, ...]) -> list[str]:
    return [sequence.request_id for sequence in sequences]
