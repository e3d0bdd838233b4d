"""The page pool as a picture: which request holds which page, and which pages several of them share.

`copy_pool` takes one int32 copy of the page tables on the engine's thread, between two steps; `fold` makes the picture of it anywhere else.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from jaxpaged.page_manager import PageManager
from jaxpaged.scheduler import Scheduler

FREE, CACHED = -1, -2
"""Owners of cells that no request holds a page of."""
MAX_CELLS = 1024
DIGITS = 9


class PageOwner(NamedTuple):
    """A sequence that holds pages.

    Attributes:
        slot: its place in the device's state, its own while it runs.
        num_pages: entries of its page tables, shared ones included.
    """

    slot: int
    request_id: str
    num_pages: int


class PoolCopy(NamedTuple):
    """Who held what at a moment.

    Attributes:
        num_usable: pages that can be given out; they are numbered from 1.
        page_size: tokens per page.
        owners: the running sequences.
        pages: the entries of their page tables, one sequence after another, then the cached pages that nobody uses. 0: given back.
    """

    num_usable: int
    page_size: int
    owners: tuple[PageOwner, ...]
    pages: np.ndarray


class PoolMap(msgspec.Struct, frozen=True):
    """The pool in at most `MAX_CELLS` cells of `pages_per_cell` pages each, in the order of pages.

    Attributes:
        owners: the slot that holds most pages of each cell; `FREE` or `CACHED`: no slot holds any.
        used, cached, shared: one digit for each cell, 0 to 9: what share of its pages is in use, is cached and idle, is held several times.
        num_shared: pages that are held several times.
        num_saved: entries of page tables beyond the pages behind them: what sharing saves.
    """

    pages_per_cell: int
    owners: list[int]
    used: str
    cached: str
    shared: str
    num_shared: int
    num_saved: int


def copy_pool(scheduler: Scheduler, pages: PageManager) -> PoolCopy:
    """Copies the tables; only the engine's thread may call it. 15 ns a page."""
    running = scheduler.running.sequences
    idle = pages.idle_pages
    owners = tuple(PageOwner(sequence.slot, sequence.request_id, sum(map(len, sequence.tables))) for sequence in running)
    tables = chain.from_iterable(chain.from_iterable(sequence.tables for sequence in running))
    count = sum(owner.num_pages for owner in owners) + len(idle)
    return PoolCopy(pages.num_usable, pages.page_size, owners, np.fromiter(chain(tables, idle), np.int32, count))


def join_pools(copies: Sequence[PoolCopy], max_num_seqs: int) -> PoolCopy:
    """The pools of several engines, one behind the other, as one.

    Args:
        copies: of each pool; at least one.
        max_num_seqs: slots that each engine has; those of the second follow them.
    """
    owners, tables, idle, first = list[PageOwner](), list[np.ndarray](), list[np.ndarray](), 0
    for number, copy in enumerate(copies):
        owners += [owner._replace(slot=owner.slot + number * max_num_seqs) for owner in copy.owners]
        pages = np.where(copy.pages > 0, copy.pages + np.int32(first), copy.pages)
        num_entries = sum(owner.num_pages for owner in copy.owners)
        tables.append(pages[:num_entries])
        idle.append(pages[num_entries:])
        first += copy.num_usable
    return PoolCopy(first, copies[0].page_size, tuple(owners), np.concatenate([*tables, *idle]))


def fold(copy: PoolCopy, max_cells: int = MAX_CELLS) -> PoolMap:
    """The picture.

    Args:
        copy: of the pool.
        max_cells: of the picture.
    """
    per_cell = -(-copy.num_usable // max_cells)
    num_cells = -(-copy.num_usable // per_cell)
    lengths = [owner.num_pages for owner in copy.owners]
    num_entries = sum(lengths)
    entries, idle = copy.pages[:num_entries], copy.pages[num_entries:]
    slots = np.repeat(np.array([owner.slot for owner in copy.owners], np.int64), lengths)
    is_held = entries > 0
    places, slots = entries[is_held].astype(np.int64) - 1, slots[is_held]
    holders = np.bincount(places, minlength=copy.num_usable)
    is_cached = np.zeros(copy.num_usable, bool)
    is_cached[idle - 1] = True
    sizes = np.bincount(np.arange(copy.num_usable) // per_cell, minlength=num_cells)

    def count(flags: np.ndarray) -> np.ndarray:
        return np.bincount(np.flatnonzero(flags) // per_cell, minlength=num_cells)

    num_cached = count(is_cached)
    cells = np.where(num_cached > 0, CACHED, FREE)
    if len(places):
        # Of each cell and slot the entries; those with the most are written last, and stay.
        num_slots = int(slots.max()) + 1
        keys, counts = np.unique(places // per_cell * num_slots + slots, return_counts=True)
        keys = keys[np.argsort(counts, kind="stable")]
        cells[keys // num_slots] = keys % num_slots
    is_shared = holders > 1
    return PoolMap(
        pages_per_cell=per_cell,
        owners=cells.tolist(),
        used=_digits(count(holders > 0), sizes),
        cached=_digits(num_cached, sizes),
        shared=_digits(count(is_shared), sizes),
        num_shared=int(is_shared.sum()),
        num_saved=int((holders[is_shared] - 1).sum()),
    )


def _digits(counts: np.ndarray, sizes: np.ndarray) -> str:
    """Shares as digits; what is there is never 0."""
    return (np.ceil(counts * DIGITS / sizes).astype(np.uint8) + ord("0")).tobytes().decode("ascii")
