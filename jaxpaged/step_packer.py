"""Room 4: packing what the scheduler chose into the arrays of a bucket.

Most of what a row needs does not change from step to step: its page table but for the newest page, its sampling parameters. It is
kept in arrays with one place per slot and picked out by slot, so that packing a decode step costs a few copies, however long the
sequences are. A blob is a fresh array each step: an aligned numpy argument is used in place on CPU, so writing to it later would
change a running step.
"""

from collections.abc import Sequence as Seq

import numpy as np

from jaxpaged.batch import FLOAT_FIELDS, MAX_BANNED_IDS, UNSIGNED_FIELDS, BatchLayout
from jaxpaged.kv_groups import PageTables
from jaxpaged.request import MAX_BAD_WORDS
from jaxpaged.scheduled_step import ScheduledRow
from jaxpaged.sequence import NO_SLOT
from jaxpaged.slot_rows import ends_of_bad_words, has_bias, needs_slot_row
from jaxpaged.told_logprobs import ScoredSpan

_NO_EPOCH = -1
_ALIGNMENT = 64
"""Bytes; a numpy array that begins at a multiple of it is used by the CPU backend where it lies."""

_PER_SLOT = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "has_bias",
    "num_logprobs",
    "seed",
)


class _Template:
    """What the blobs of one bucket have in common: where each array lies, and everything that padding holds."""

    def __init__(self, layout: BatchLayout, no_token: int) -> None:
        self.places: list[tuple[str, int, int, tuple[int, ...], type]] = []
        start = 0
        for name, shape in layout.fields:
            end = start + int(np.prod(shape))
            kind = np.float32 if name in FLOAT_FIELDS else np.uint32 if name in UNSIGNED_FIELDS else np.int32
            self.places.append((name, start, end, shape, kind))
            start = end
        self.size = start
        view = self.views(np.zeros(self.size, np.int32))
        view["banned_ids"].fill(no_token)
        view["repetition_penalty"].fill(1)
        view["num_logprobs"].fill(-1)
        view["scored_num_top"].fill(-1)
        view["source_slots"].fill(NO_SLOT)
        view["target_slots"].fill(layout.num_slots)  # beyond the slots: dropped
        view["pool_slots"].fill(layout.num_slots)
        view["pool_starts"].fill(layout.num_tokens)
        # Padding tokens write to distinct pages beyond the pool, which the device drops.
        view["write_pages"][:] = np.arange(layout.num_pages, layout.num_pages + layout.num_tokens)
        # The page tables come last; they are zero, and can be too large to copy each time.
        name, start, *_ = self.places[-1]
        assert name == "page_tables"
        self.head = np.concatenate([view[name].view(np.int32).ravel() for name, *_ in self.places[:-1]])
        assert self.head.size == start

    def views(self, blob: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a blob by name."""
        return {name: blob[start:end].view(kind).reshape(shape) for name, start, end, shape, kind in self.places}

    def fresh(self) -> np.ndarray:
        """A blob without rows. Of its page tables the system gives memory only to what is written."""
        room = np.zeros(self.size + _ALIGNMENT // 4, np.int32)
        first = -room.ctypes.data % _ALIGNMENT // 4
        blob = room[first : first + self.size]
        blob[: self.head.size] = self.head
        return blob


class StepPacker:
    """Packs the steps of one scheduler, in their order.

    A sequence whose slot and epoch it has seen before has only had pages appended to its tables, or given back at their
    beginning.

    Args:
        layout: any bucket of the runner.
        no_token: an id beyond the vocabulary, which fills the unused banned ids.

    Attributes:
        newcomers: rows of the last step whose slots the device must be told of first (`slot_rows.slot_row`).
        scored: tokens of prompts of which the last step tells how likely they were.
    """

    def __init__(self, layout: BatchLayout, no_token: int) -> None:
        self._no_token = no_token
        self._page_size = layout.page_size
        self._templates: dict[BatchLayout, _Template] = {}
        num_slots = layout.num_slots
        self._epochs = [_NO_EPOCH] * num_slots
        self._lengths = [0] * num_slots
        # Entries of each group's table that are known to be given back.
        self._num_behind = [[0] * num_slots for _ in range(layout.num_groups)]
        self._tables = np.zeros((layout.num_groups, num_slots, layout.max_pages), np.int32)
        self._sampling = {
            "temperature": np.zeros(num_slots, np.float32),
            "top_k": np.zeros(num_slots, np.int32),
            "top_p": np.ones(num_slots, np.float32),
            "min_p": np.zeros(num_slots, np.float32),
            "presence_penalty": np.zeros(num_slots, np.float32),
            "frequency_penalty": np.zeros(num_slots, np.float32),
            "repetition_penalty": np.ones(num_slots, np.float32),
            "has_bias": np.zeros(num_slots, np.int32),
            "num_logprobs": np.full(num_slots, -1, np.int32),
            "seed": np.zeros((num_slots, 2), np.uint32),
        }
        self._banned_ids = np.full((num_slots, MAX_BANNED_IDS), no_token, np.int32)
        self._banned_until = np.zeros(num_slots, np.int32)
        """Ids are banned from the choice of tokens before this position."""
        self._has_long_bad_words = np.zeros(num_slots, bool)
        self._pools = np.zeros(num_slots, bool)
        """Whether hidden states are asked for."""
        self.newcomers: list[ScheduledRow] = []
        self.scored: list[ScoredSpan] = []

    def pack(self, rows: Seq[ScheduledRow], layout: BatchLayout) -> np.ndarray:
        """Returns the blob of a step: int32 [layout.blob_size].

        Args:
            rows: what the scheduler chose; their tokens together are at most `layout.num_tokens`.
            layout: the bucket.
        """
        template = self._templates.get(layout)
        if template is None:
            template = self._templates[layout] = _Template(layout, self._no_token)
        blob = template.fresh()
        self.newcomers, self.scored = [], []
        if not rows:
            return blob
        num_rows = len(rows)
        token_ids: list[int] = []
        slots, starts, counts = [], [], []
        epochs, lengths = self._epochs, self._lengths
        has_scored = False
        for row in rows:
            sequence, slot, start, count = row.sequence, row.slot, row.start, row.num_tokens
            slots.append(slot)
            starts.append(start)
            counts.append(count)
            if count == 1:
                token_ids.append(0 if row.takes_from_slot else sequence.token_ids[start])
            else:
                token_ids += sequence.token_ids[start : start + count]
            if start < sequence.num_prompt_tokens and sequence.first_unscored < sequence.num_prompt_tokens:
                has_scored = True
            tables = sequence.tables
            if epochs[slot] != row.epoch:
                self._move_in(row)
            else:
                length = len(tables[0])
                if length > lengths[slot]:
                    self._append(slot, tables)
                if len(tables) > 1 or not tables[0][0]:
                    self._give_back(slot, tables)
        view = template.views(blob)
        self._pack_tokens(view, token_ids, slots, starts, counts)
        at = np.array(slots)
        ends = np.array(starts) + counts
        view["kv_lens"][:num_rows] = view["position"][:num_rows] = ends
        samples = np.array([row.samples for row in rows])
        view["target_slots"][:num_rows][samples] = at[samples]
        for name in _PER_SLOT:
            view[name][:num_rows] = self._sampling[name][at]
        is_banned = samples & (ends < self._banned_until[at])
        if is_banned.any():
            view["banned_ids"][:num_rows][is_banned] = self._banned_ids[at[is_banned]]
        if self._has_long_bad_words[at].any():
            self._ban_bad_words(view["banned_ids"], rows)
        if self._pools[at].any():
            _pack_pooling(view, rows)
        if has_scored:
            self._pack_scored(view, rows)
        self._copy_tables(view["page_tables"], slots)
        takes = np.array([row.takes_from_slot for row in rows])
        view["source_slots"][view["sample_tokens"][:num_rows][takes]] = at[takes]
        return blob

    def _pack_scored(self, view: dict[str, np.ndarray], rows: Seq[ScheduledRow]) -> None:
        first_token = first = 0
        for index, row in enumerate(rows):
            if positions := row.scored_positions:
                end = first + len(positions)
                view["scored_at"][first:end] = np.array(positions) + (first_token - row.start - 1)
                view["scored_next_ids"][first:end] = row.sequence.token_ids[positions.start : positions.stop]
                view["scored_num_top"][first:end] = row.sequence.request.params.prompt_logprobs
                self.scored.append(ScoredSpan(row, index, positions, first))
                first = end
            first_token += row.num_tokens

    def _ban_bad_words(self, banned_ids: np.ndarray, rows: Seq[ScheduledRow]) -> None:
        """Such a sequence is scheduled only when all its ids are known."""
        first = MAX_BANNED_IDS - MAX_BAD_WORDS
        for index, row in enumerate(rows):
            if row.samples and self._has_long_bad_words[row.slot]:
                ends = ends_of_bad_words(row.sequence)
                banned_ids[index, first : first + len(ends)] = ends

    def _pack_tokens(
        self, view: dict[str, np.ndarray], token_ids: list[int], slots: list[int], starts: list[int], counts: list[int]
    ) -> None:
        num_rows, num_tokens = len(slots), len(token_ids)
        view["token_ids"][:num_tokens] = token_ids
        row_ends = view["cu_q_lens"]
        positions, token_slots = np.array(starts), np.array(slots)
        if num_tokens == num_rows:
            row_ends[1 : num_rows + 1] = np.arange(1, num_rows + 1)
        else:
            row_ends[1 : num_rows + 1] = np.cumsum(counts)
            row = np.repeat(np.arange(num_rows), counts)
            positions = positions[row] + np.arange(num_tokens) - row_ends[row]
            token_slots = token_slots[row]
        row_ends[num_rows + 1 :] = num_tokens
        view["sample_tokens"][:num_rows] = row_ends[1 : num_rows + 1] - 1
        pages, offsets = np.divmod(positions, self._page_size)
        view["positions"][:num_tokens] = positions
        view["write_offsets"][:num_tokens] = offsets
        view["write_pages"][:, :num_tokens] = self._tables[:, token_slots, pages]

    def _copy_tables(self, page_tables: np.ndarray, slots: list[int]) -> None:
        """Fills [groups, seqs, max_pages] as far as each row's table goes."""
        lengths = self._lengths
        for group, tables in enumerate(self._tables):
            for index, slot in enumerate(slots):
                length = lengths[slot]
                page_tables[group, index, :length] = tables[slot, :length]

    def _move_in(self, row: ScheduledRow) -> None:
        """A sequence that has just been given the slot."""
        slot, tables = row.slot, row.sequence.tables
        length = len(tables[0])
        self._epochs[slot], self._lengths[slot] = row.epoch, length
        for group, table in enumerate(tables):
            self._tables[group, slot, :length] = table
            self._num_behind[group][slot] = 0
        request = row.sequence.request
        params, sampling = request.params, self._sampling
        is_greedy = params.is_greedy
        sampling["temperature"][slot] = 0.0 if is_greedy or params.temperature is None else params.temperature
        sampling["top_k"][slot] = 0 if is_greedy else max(params.top_k or 0, 0)
        sampling["top_p"][slot] = 1.0 if is_greedy or params.top_p is None else params.top_p
        sampling["min_p"][slot] = 0.0 if is_greedy else params.min_p or 0.0
        sampling["seed"][slot] = (0, 0) if is_greedy else (request.seed & 0xFFFFFFFF, request.seed >> 32)
        sampling["presence_penalty"][slot] = params.presence_penalty
        sampling["frequency_penalty"][slot] = params.frequency_penalty
        sampling["repetition_penalty"][slot] = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        sampling["has_bias"][slot] = has_bias(request)
        sampling["num_logprobs"][slot] = -1 if params.logprobs is None else params.logprobs
        self._has_long_bad_words[slot] = any(len(word) > 1 for word in request.bad_words_ids)
        self._pools[slot] = request.pooling is not None
        if needs_slot_row(request):
            self.newcomers.append(row)
        self._banned_until[slot] = 0
        if params.min_tokens:
            banned = [*request.eos_token_ids, *(params.stop_token_ids or ())]
            self._banned_until[slot] = row.sequence.num_prompt_tokens + params.min_tokens
            self._banned_ids[slot].fill(self._no_token)
            self._banned_ids[slot, : len(banned)] = banned

    def _append(self, slot: int, tables: PageTables) -> None:
        known, length = self._lengths[slot], len(tables[0])
        for group, table in enumerate(tables):
            self._tables[group, slot, known:length] = table[known:]
        self._lengths[slot] = length

    def _give_back(self, slot: int, tables: PageTables) -> None:
        for group, table in enumerate(tables):
            known = end = self._num_behind[group][slot]
            while not table[end]:
                end += 1
            if end > known:
                self._tables[group, slot, known:end] = 0
                self._num_behind[group][slot] = end


def _pack_pooling(view: dict[str, np.ndarray], rows: Seq[ScheduledRow]) -> None:
    ends = view["cu_q_lens"]
    for index, row in enumerate(rows):
        match row.sequence.request.pooling:
            case "mean":
                view["pool_starts"][index], view["pool_slots"][index] = ends[index], row.slot
            case "last" if row.samples:
                view["pool_starts"][index] = ends[index + 1] - 1


def pack_alone(rows: Seq[ScheduledRow], layout: BatchLayout, no_token: int) -> np.ndarray:
    """The blob of a step that has nothing to do with any other."""
    return StepPacker(layout, no_token).pack(rows, layout)
