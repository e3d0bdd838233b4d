"""B3: a batch whose every row has its own random combination of all sampling parameters answers as each request does alone.

1 to 17 rows around every bucket edge, joining, leaving and preempted at each step, two steps in flight or one, prefix cache on; alone
means one row, no cache, one step after another. Text, ids, log-probabilities and ends are compared. 200 requests of a tiny model in
every run, 20,000 in the long one, there also of a model as wide as SmolLM2, whose sums differ between buckets in their last bits.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.request import CompletionOutput, FinishReason, Logprob, Request, samples_of
from jaxpaged.sampling import NO_ID
from jaxpaged.start import Started
from tests.engine.mixes import NUM_ROWS, MixedRun, alone, choose, random_requests
from tests.equality import TIE_MARGIN, Oracle, Tie
from tests.fakes import Bench, NarrowRunner
from tests.tiny_engine import start_tiny
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax

NUM_IDS, VOCAB = 384, 400
"""Ids of the tokenizer, and rows of the head."""
MAX_MODEL_LEN = 64
ROUND = 100
"""Requests of one run in company."""
NUM_PARTS = 10
"""Of the long run."""
EARLY = (FinishReason.ABORT, FinishReason.ERROR)


class Wide:
    """A tiny model with a head wider than the tokenizer, in steps of up to 17 rows and 48 tokens."""

    def __init__(self, folder: Path, programs: Path, *, hidden: int) -> None:
        write_tiny_llama(folder, vocab_size=VOCAB, tokenizer_vocab_size=NUM_IDS, hidden=hidden)
        self.started: Started = start_tiny(
            folder,
            programs=programs,
            token_buckets=(4, 16, 48),
            max_num_batched_tokens=48,
            max_num_seqs=17,
            max_model_len=MAX_MODEL_LEN,
        )
        self.oracle = Oracle(self.started.engine.runner, max_tokens=MAX_MODEL_LEN)  # type: ignore[arg-type]
        self.canary = self.bench().canary
        self.ties: list[Tie] = []
        self.places: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        """Prompts and what was answered so far, where log-probabilities tied."""
        self.num_compared = 0
        self.num_rows: set[int] = set()

    def bench(self, *, is_alone: bool = False, max_in_flight: int = 1, **narrow: int) -> Bench:
        """An engine of its own over the model's programs."""
        runner, intake = self.started.engine.runner, self.started.intake
        return Bench(
            NarrowRunner(runner, **(narrow | ({"max_num_seqs": 1} if is_alone else {}))),
            intake.tokenizer,
            eos_token_ids=intake.eos_token_ids,
            enable_prefix_caching=not is_alone,
            max_in_flight=max_in_flight,
            canary=None if not hasattr(self, "canary") else self.canary,
        )

    def check_round(self, seed: int) -> list[list[CompletionOutput]]:
        """Compares `ROUND` requests in company with themselves alone; returns what they answered alone."""
        rng = random.Random(seed)
        requests = random_requests(rng, self.started.intake, ROUND, vocab=VOCAB, max_prompt=MAX_MODEL_LEN - 12)
        company = self.bench(max_in_flight=1 + seed % 2, num_pages=(80, 40)[seed % 4 // 2])
        mixed = MixedRun(company, requests, rng)
        company.after_check()
        bench = self.bench(is_alone=True)
        answers = []
        for request in requests:
            expected = alone(bench, request)
            answers.append(expected)
            self._compare(f"seed {seed}", request, expected, mixed.answers[request.request_id])
        self.num_rows |= set(mixed.num_rows)
        assert self.started.engine.runner.num_compiled_while_running == 0  # type: ignore[attr-defined]
        return answers

    def _compare(self, what: str, request: Request, expected: list[CompletionOutput], got: list[CompletionOutput]) -> None:
        assert [answer.index for answer in got] == [answer.index for answer in expected] == list(range(request.params.n))
        # A sample without a choice ends its request, wherever the others are then.
        for reason in EARLY:
            is_early = any(answer.finish_reason is reason for answer in got)
            if is_early or any(answer.finish_reason is reason for answer in expected):
                assert reason is FinishReason.ABORT or is_early
                early = True
                break
        else:
            early = False
        for sample, one, other in zip(samples_of(request, request.params.n), expected, got, strict=True):
            self._compare_answer(f"{what}, {sample.request_id}: {request.params}", sample, one, other, early)

    def _compare_answer(self, what: str, request: Request, one: CompletionOutput, other: CompletionOutput, early: bool) -> None:
        for index, (expected, got) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
            self.num_compared += 1
            if expected != got:
                margin = self.choice(request, one.token_ids[:index]).margin
                assert margin < TIE_MARGIN, f"{what}: {got} instead of {expected} at {index}, margin {margin:.2g}"
                self.ties.append(Tie(what, request.request_id, index, margin))
                return
            if one.logprobs is not None and other.logprobs is not None:
                num_ties = len(self.ties)
                self._compare_logprobs(f"{what}, token {index}", request, one.logprobs[index], other.logprobs[index])
                # Two ids that changed places are one tie, and so they are in every greedy answer to the same prompt.
                place = (tuple(request.prompt_token_ids), tuple(one.token_ids[:index]))
                if len(self.ties) > num_ties:
                    del self.ties[num_ties + (place not in self.places) :]
                    self.places.add(place)
        assert (one.logprobs is None) == (other.logprobs is None) == (request.params.logprobs is None)
        if not early:
            assert other.token_ids == one.token_ids, what
            assert (other.text, other.finish_reason, other.stop_reason) == (one.text, one.finish_reason, one.stop_reason), what
            if one.cumulative_logprob is not None:
                assert other.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-4 * len(one.token_ids)), what

    def _compare_logprobs(self, what: str, request: Request, one: dict[int, Logprob], other: dict[int, Logprob]) -> None:
        assert next(iter(one)) == next(iter(other)), what
        for token_id in one.keys() | other.keys():
            if token_id not in one or token_id not in other:  # the last of the likeliest ids, which another ties with
                values = one if token_id in one else other
                assert values[token_id].logprob == pytest.approx(min(entry.logprob for entry in values.values()), abs=TIE_MARGIN), what
                self.ties.append(Tie(what, request.request_id, token_id, 0.0))
                continue
            left, right = one[token_id], other[token_id]
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4), what
            assert (left.decoded_token, left.token_bytes) == (right.decoded_token, right.token_bytes), what
            assert abs(left.rank - right.rank) <= 1, what
            if left.rank != right.rank:
                self.ties.append(Tie(what, request.request_id, token_id, 0.0))

    def choice(self, request: Request, answer: list[int]) -> tuple[int, float]:
        """What numpy says that the request should choose after `answer`, of logits that were computed apart."""
        history = [*request.prompt_token_ids, *answer]
        return choose(self.oracle.logits(history)[:NUM_IDS], request, history)

    def check_ties(self) -> None:
        """At most one in 10,000 tokens."""
        assert len(self.ties) <= max(1, self.num_compared // 10_000), self.ties


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Iterator[Wide]:
    wide = Wide(tmp_path_factory.mktemp("mixes"), programs, hidden=64)
    yield wide
    wide.started.engine.close()


def test_b3_200_requests_of_all_kinds_answer_as_alone(wide: Wide) -> None:
    """And every way to end, every kind of output and every field has been there."""
    answers = [answer for seed in (0, 1) for request in wide.check_round(seed) for answer in request]
    wide.check_ties()
    assert wide.num_rows >= set(NUM_ROWS)
    ends = [(answer.finish_reason, type(answer.stop_reason)) for answer in answers]
    for reason, kind, least in (
        (FinishReason.LENGTH, type(None), 60),
        (FinishReason.STOP, str, 3),
        (FinishReason.STOP, int, 3),
        (FinishReason.STOP, type(None), 3),
        (FinishReason.ERROR, type(None), 1),
    ):
        assert ends.count((reason, kind)) >= least, (reason, kind, ends.count((reason, kind)))


def test_b3_what_requests_choose_alone_is_what_numpy_chooses(wide: Wide) -> None:
    """The runs above could all be wrong alike: token by token, every combination is held against the rule in numpy."""
    rng = random.Random(5)
    bench = wide.bench(is_alone=True)
    num_tokens = num_sampled = 0
    for request in random_requests(rng, wide.started.intake, 40, vocab=VOCAB, max_prompt=20):
        answers = alone(bench, request)
        for sample, answer in zip(samples_of(request, request.params.n), answers, strict=True):
            ids = answer.token_ids if answer.finish_reason is not FinishReason.ERROR else [*answer.token_ids, NO_ID]
            if request.params.n > 1 and answer.finish_reason is FinishReason.ERROR:
                continue
            for index, token_id in enumerate(ids[:12]):
                choice = wide.choice(sample, ids[:index])
                assert token_id == choice.token_id or choice.margin < TIE_MARGIN, (request.params, index, token_id, choice)
                num_tokens += 1
                num_sampled += not request.params.is_greedy
    assert num_tokens > 150
    assert num_sampled > 80


@pytest.mark.tier("long", area="sampling")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("hidden", [64, 576])
def test_b3_10_000_requests_of_all_kinds_answer_as_alone(tmp_path: Path, programs: Path, hidden: int, part: int) -> None:
    """Twice 10,000: of the tiny model, and of one as wide as SmolLM2, whose sums differ in their last bits from bucket to bucket.

    In parts of 1,000, so that some can be run (`-k 576-3`) where time is short.
    """
    wide = Wide(tmp_path, programs, hidden=hidden)
    num_rounds = 10_000 // ROUND // NUM_PARTS
    for seed in range(100 + part * num_rounds, 100 + (part + 1) * num_rounds):
        wide.check_round(seed)
    wide.started.engine.close()
    print(f"hidden {hidden}, part {part}: {wide.num_compared} tokens compared, ties: {wide.ties}")
    wide.check_ties()
    assert wide.num_compared > 30_000 // NUM_PARTS
