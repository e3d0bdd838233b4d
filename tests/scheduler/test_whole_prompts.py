"""Prompts of encoders: each whole in one step, in the order of the queue, whatever else waits."""

import random

import pytest

from tests.scheduler.rules import add, make_scheduler


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_one_row(seed: int) -> None:
    source = random.Random(seed)
    scheduler = make_scheduler(
        max_num_batched_tokens=40, max_num_seqs=6, takes_whole_prompts=True, num_usable=30, enable_prefix_caching=False
    )
    waiting = [add(scheduler, str(number), source.randint(1, 40), max_tokens=1) for number in range(60)]
    expected = [(sequence.request_id, sequence.num_prompt_tokens) for sequence in waiting]
    rows = []
    steps = 0
    while (step := scheduler.schedule()) is not None:
        steps += 1
        assert sum(row.num_tokens for row in step.rows) <= 40
        rows += [(row.sequence.request_id, row.num_tokens) for row in step.rows]
        assert all(row.samples for row in step.rows)
        if steps % 2:  # two steps at once, and one
            scheduler.update(step, [1] * len(step.rows))
        else:
            ahead = scheduler.schedule()
            scheduler.update(step, [1] * len(step.rows))
            if ahead is not None:
                rows += [(row.sequence.request_id, row.num_tokens) for row in ahead.rows]
                scheduler.update(ahead, [1] * len(ahead.rows))
        scheduler.check()
    # In a step rows of one token go first.
    assert sorted(rows, key=lambda row: int(row[0])) == expected
    assert steps > 10


def test_without_it_the_same_prompts_are_cut() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40, max_num_seqs=6, num_usable=30, enable_prefix_caching=False)
    for number in range(3):
        add(scheduler, str(number), 30, max_tokens=1)
    step = scheduler.schedule()
    assert step is not None
    assert [row.num_tokens for row in step.rows] == [30, 10]
