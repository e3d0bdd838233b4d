"""The picture of the page pool: against a slow one that counts page by page, over tables that sequences really have."""

import random
from collections import Counter

import numpy as np
import pytest

from jaxpaged.page_manager import PageManager
from jaxpaged.pool_map import CACHED, DIGITS, FREE, MAX_CELLS, PageOwner, PoolCopy, PoolMap, copy_pool, fold
from jaxpaged.request import Request, SamplingParams
from jaxpaged.scheduler import Scheduler
from jaxpaged.sequence import Sequence

PARAMS = SamplingParams(max_tokens=3, temperature=0.0)


def slow_fold(copy: PoolCopy, max_cells: int) -> PoolMap:
    """The same, a page at a time."""
    each = -(-copy.num_usable // max_cells)
    holders: dict[int, list[int]] = {page: [] for page in range(1, copy.num_usable + 1)}
    rest = copy.pages.tolist()
    for owner in copy.owners:
        for page in rest[: owner.num_pages]:
            if page:
                holders[page].append(owner.slot)
        rest = rest[owner.num_pages :]
    owners, used, cached, shared = [], "", "", ""
    for start in range(1, copy.num_usable + 1, each):
        cell = range(start, min(start + each, copy.num_usable + 1))
        slots = Counter(slot for page in cell for slot in holders[page])
        num_cached = sum(page in rest for page in cell)
        most = max(slots.values(), default=0)
        owners.append(max(slot for slot, count in slots.items() if count == most) if slots else CACHED if num_cached else FREE)

        def digit(count: int, size: int = len(cell)) -> str:
            return str(-(-count * DIGITS // size))

        used += digit(sum(bool(holders[page]) for page in cell))
        cached += digit(num_cached)
        shared += digit(sum(len(holders[page]) > 1 for page in cell))
    several = [slots for slots in holders.values() if len(slots) > 1]
    return PoolMap(each, owners, used, cached, shared, len(several), sum(len(slots) - 1 for slots in several))


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_counting_page_by_page_gives(seed: int) -> None:
    rng = random.Random(seed)
    num_usable, max_cells = rng.choice(((1, 8), (7, 8), (8, 8), (9, 8), (50, 8), (63, 8), (64, 8), (100, 1024)))
    pages = list(range(1, num_usable + 1))
    idle = rng.sample(pages, rng.randint(0, num_usable))
    held = [page for page in pages if page not in idle]
    owners, entries = [], []
    for slot in rng.sample(range(8), rng.randint(0, 4) if held else 0):
        table = [rng.choice((*held, 0)) for _ in range(rng.randint(0, 12))]
        owners.append(PageOwner(slot, f"r{slot}", len(table)))
        entries += table
    copy = PoolCopy(num_usable, 16, tuple(owners), np.array(entries + idle, np.int32))
    assert fold(copy, max_cells) == slow_fold(copy, max_cells)


def test_a_large_pool_has_1024_cells_at_most() -> None:
    for num_usable in (1023, 1024, 1025, 100_000):
        made = fold(PoolCopy(num_usable, 16, (), np.arange(1, num_usable + 1, 2, dtype=np.int32)))
        assert len(made.owners) == len(made.used) == len(made.cached) == len(made.shared) <= MAX_CELLS
        assert len(made.owners) * made.pages_per_cell >= num_usable


def test_a_copy_has_the_tables_of_those_that_run_and_the_cached_pages() -> None:
    pages = PageManager(40, 4)
    scheduler = Scheduler(pages, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, clock=lambda: 0.0)
    prompt = list(range(10, 22))
    for name, tail in (("gone", [1]), ("one", [2]), ("two", [3]), ("waits", [4])):
        request = Request(request_id=name, prompt_token_ids=[*prompt, *tail], params=PARAMS, seed=0, arrival_s=0.0)
        scheduler.add(Sequence(request))
        if name == "gone":
            while (step := scheduler.schedule()) is not None:
                scheduler.update(step, [5] * len(step.rows))
        elif name == "two":
            step = scheduler.schedule()
            assert step is not None
            scheduler.update(step, [5] * len(step.rows))
    copy = copy_pool(scheduler, pages)
    assert copy.pages.dtype == np.int32
    assert [(owner.request_id, owner.num_pages) for owner in copy.owners] == [("one", 4), ("two", 4)]
    assert len({owner.slot for owner in copy.owners}) == 2
    made = fold(copy)
    assert (made.pages_per_cell, len(made.owners)) == (1, 39)
    assert (made.num_shared, made.num_saved) == (3, 3), "the prompt's whole pages are those of all"
    assert made.shared.count("9") == 3
    assert made.used.count("9") == pages.num_in_use
    assert made.cached.count("9") == pages.num_cached_idle
    assert set(made.owners) == {CACHED, FREE, *(owner.slot for owner in copy.owners)} - ({CACHED} if not pages.num_cached_idle else set())
