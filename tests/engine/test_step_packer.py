"""Packed steps against plain packing, over random scheduler runs: slots change hands, pages come and go, windows slide."""

import random

import msgspec
import numpy as np
import pytest

from jaxpaged.batch import MAX_BANNED_IDS, BatchLayout
from jaxpaged.request import MAX_BAD_WORDS, Request, SamplingParams
from jaxpaged.scheduler import ScheduledStep
from jaxpaged.slot_rows import needs_slot_row
from jaxpaged.step_packer import StepPacker, pack_alone
from tests.engine.plain_packing import plain_arrays
from tests.fakes import read_blob
from tests.scheduler.table_model import VOCAB
from tests.scheduler.worlds import World

pytestmark = pytest.mark.jax


def assert_equal(blob: np.ndarray, expected: dict[str, np.ndarray], layout: BatchLayout) -> None:
    got = read_blob(blob, layout)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(got[name], array.view(np.int32)), f"{name}: {got[name]} instead of {array.view(np.int32)}"


class PackedWorld(World):
    """A random world whose requests are sampled in every way, and whose steps are packed twice."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        scheduler, pages = self.simulation.scheduler, self.simulation.pages
        num_tokens = max(2, scheduler.max_num_batched_tokens)
        self.layouts = [
            BatchLayout(
                bucket,
                max(2, min(bucket, scheduler.max_num_seqs)),
                pages.pages_for(scheduler.max_model_len),
                pages.page_size,
                pages.num_pages,
                scheduler.max_num_seqs,
                len(pages.groups),
            )
            for bucket in (num_tokens, num_tokens + 3)
        ]
        self.packer = StepPacker(self.layouts[0], VOCAB)
        self.num_packed = self.num_given_back = self.num_banned = self.num_bad_words = self.num_newcomers = 0
        self.num_scored = self.num_pooled = 0
        self._epochs: set[int] = set()
        self._dispatch = self.simulation.runner.dispatch
        self.simulation.runner.dispatch = self.dispatch  # type: ignore[method-assign]

    def add(self, request: Request) -> None:
        rng = self.rng
        sampled = {"temperature": rng.choice((0.3, 1.5)), "top_k": rng.choice((-1, 0, 1, 5)), "top_p": rng.choice((0.5, 1.0)), "min_p": 0.1}
        shaped = rng.choice(
            (
                {"frequency_penalty": 0.5, "logprobs": 3},
                {"logprobs": 0},
                {"repetition_penalty": 1.5, "presence_penalty": -1.0},
                {"logit_bias": {1: 2.0}},
            )
        )
        params = msgspec.structs.replace(
            request.params, **(sampled if rng.random() < 0.5 else {}), **(shaped if rng.random() < 0.3 else {})
        )
        if rng.random() < 0.2:
            params = msgspec.structs.replace(params, prompt_logprobs=rng.choice((0, 5, 20)))
        words = rng.choice((((3,),), ((1, 2), (2, 1, 2)), ((0, 0), (4,)))) if rng.random() < 0.2 else ()
        pooling = rng.choice(("mean", "last")) if rng.random() < 0.2 and params.prompt_logprobs is None else None
        if pooling is not None:
            params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0)
        request = msgspec.structs.replace(request, params=params, seed=rng.randrange(2**63), bad_words_ids=words, pooling=pooling)
        super().add(msgspec.structs.replace(request, score_from=rng.choice((1, 1, 3))))

    def dispatch(self, step: ScheduledStep) -> None:
        layout = self.rng.choice(self.layouts)
        expected = plain_arrays(step.rows, layout, VOCAB)
        newcomers = [row for row in step.rows if row.epoch not in self._epochs and needs_slot_row(row.sequence.request)]
        self._epochs |= {row.epoch for row in step.rows}
        assert_equal(self.packer.pack(step.rows, layout), expected, layout)
        assert self.packer.newcomers == newcomers
        self.check_spans(step, expected)
        self.num_packed += 1
        self.num_given_back += any(0 in table for row in step.rows for table in row.sequence.tables)
        first = MAX_BANNED_IDS - MAX_BAD_WORDS
        self.num_banned += int((expected["banned_ids"][:, :first] < VOCAB).any())
        self.num_bad_words += int((expected["banned_ids"][:, first:] < VOCAB).any())
        self.num_newcomers += len(newcomers)
        self.num_pooled += int((expected["pool_starts"] < layout.num_tokens).any())
        self._dispatch(step)

    def check_spans(self, step: ScheduledStep, expected: dict[str, np.ndarray]) -> None:
        """The spans name what the arrays hold, and their numbers may come in, some late, as far as a sequence is still there."""
        count = int((expected["scored_num_top"] >= 0).sum())
        assert sum(len(span.positions) for span in self.packer.scored) == count
        for span in self.packer.scored:
            row = step.rows[span.row_index]
            assert row is span.row
            places = slice(span.first, span.first + len(span.positions))
            assert expected["scored_next_ids"][places].tolist() == [row.sequence.token_ids[position] for position in span.positions]
            if self.rng.random() < 0.5:
                row.sequence.first_unscored = span.positions.stop
        self.num_scored += count


LEAST_PER_WORLD = {
    "num_packed": 250,
    "num_scored": 50,
    "num_given_back": 50,
    "num_banned": 30,
    "num_bad_words": 3,
    "num_newcomers": 5,
    "num_pooled": 10,
    "num_preemptions": 1,
    "num_hit_tokens": 15,
    "num_late_rows": 5,
}
"""So that slots change hands, windows slide and steps run ahead of their results often enough."""


def pack_worlds(seeds: range) -> None:
    counts = dict.fromkeys(LEAST_PER_WORLD, 0)
    for seed in seeds:
        world = PackedWorld(seed)
        seen = vars(world.live()) | vars(world)
        for name in counts:
            counts[name] += seen[name]
    for name, least in LEAST_PER_WORLD.items():
        assert counts[name] > least * len(seeds), f"too few: {name}"


def test_packed_steps_equal_plain_packing() -> None:
    pack_worlds(range(20))


@pytest.mark.tier("long", area="pages")
@pytest.mark.timeout(1800)
def test_many_packed_steps_equal_plain_packing() -> None:
    pack_worlds(range(20, 520))


def test_a_step_without_rows_is_all_padding() -> None:
    layout = BatchLayout(4, 3, 5, 16, 9, 3, 2)
    assert_equal(pack_alone((), layout, 7), plain_arrays((), layout, 7), layout)


def test_a_blob_is_fresh_and_lies_where_the_cpu_backend_uses_it_in_place() -> None:
    """Writing to one that a running step reads would change the step."""
    layout = BatchLayout(4, 3, 5, 16, 9, 3)
    packer = StepPacker(layout, 7)
    blobs = [packer.pack((), layout) for _ in range(20)]
    assert len({blob.ctypes.data for blob in blobs}) == len(blobs)
    assert all(blob.ctypes.data % 64 == 0 for blob in blobs)
    assert not any(np.shares_memory(one, other) for one in blobs for other in blobs if one is not other)


def test_seeds_use_all_their_bits() -> None:
    seed = random.Random(0).randrange(2**62, 2**63)
    layout = BatchLayout(2, 2, 5, 16, 9, 3)
    world = PackedWorld(1)
    request = Request(
        request_id="r",
        prompt_token_ids=[1, 2],
        params=SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        seed=seed,
        arrival_s=0,
    )
    sequence = world.simulation.add(request)
    step = world.simulation.scheduler.schedule()
    assert step is not None
    assert [row.sequence for row in step.rows] == [sequence]
    words = read_blob(pack_alone(step.rows, layout, 9), layout)["seed"].view(np.uint32)[0]
    assert int(words[0]) + (int(words[1]) << 32) == seed
