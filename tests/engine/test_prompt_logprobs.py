"""Log-probabilities of prompts, against logits that were computed apart: in chunks, in company, from the cache, after preemptions."""

import functools
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.batch import BatchLayout
from jaxpaged.errors import InvalidRequestError
from jaxpaged.intake import Intake
from jaxpaged.logprobs import StepResult
from jaxpaged.mailbox import merge_deltas
from jaxpaged.request import LOWEST_LOGPROB, FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from jaxpaged.start import Started
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.told_logprobs import TokenLogprobs, ToldRows, told
from tests.engine.conftest import tiny_bench
from tests.equality import Oracle
from tests.fakes import Bench, NarrowRunner, read_blob

pytestmark = pytest.mark.jax

PROMPT = [7 + (11 * index) % 240 for index in range(53)]
OTHER = [9 + (17 * index) % 200 for index in range(38)]
SHORT = [40, 41, 42]


class Reference:
    """What the model says to each token of a prompt, by an oracle that is asked position by position, each once."""

    def __init__(self, tiny: Started) -> None:
        self._oracle = Oracle(tiny.engine.runner, max_tokens=64)  # type: ignore[arg-type]
        self._num_ids = min(tiny.intake.tokenizer.vocab_size, tiny.engine.runner.vocab)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs(self, history: list[int]) -> np.ndarray:
        """Float64 [ids] of what follows."""
        key = tuple(history)
        if key not in self._known:
            logits = self._oracle.logits(history).astype(np.float64)[: self._num_ids]
            self._known[key] = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        return self._known[key]

    def check(self, output: RequestOutput, num_top: int, *, first: int = 1) -> None:
        """Raises AssertionError if what is told of the prompt is not what the oracle says."""
        ids, all_told = output.prompt_token_ids, output.prompt_logprobs
        assert all_told is not None
        assert len(all_told) == len(ids)
        assert all_told[:first] == [None] * first
        for position in range(first, len(ids)):
            entries, expected = all_told[position], self.logprobs(ids[:position])
            assert entries is not None
            assert next(iter(entries)) == ids[position]
            assert set(entries) == {ids[position], *np.argsort(-expected, kind="stable")[:num_top].tolist()}
            for token_id, entry in entries.items():
                assert abs(entry.logprob - expected[token_id]) < 1e-4
                assert (
                    abs(entry.rank - 1 - (expected > expected[token_id]).sum()) <= (np.abs(expected - expected[token_id]) < 1e-5).sum() - 1
                )


@pytest.fixture(scope="module")
def reference(tiny: Started) -> Reference:
    return Reference(tiny)


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_they_are_the_models_own_in_any_chunks_and_company(tiny: Started, reference: Reference, chunk: int) -> None:
    """Prompts that are scored lie beside prompts and answers that are not; a preemption in the middle costs nothing told."""
    bench = tiny_bench(tiny, max_num_batched_tokens=chunk)
    plain = bench.add(OTHER[:20], max_tokens=12, ignore_eos=True)
    bench.step()
    wanted = {"many": (PROMPT, 5), "own": (OTHER, 0), "all": (PROMPT[:30] + SHORT, 20), "short": (SHORT, 2), "one": ([5], 2)}
    ids = {
        name: bench.add(prompt, max_tokens=2, prompt_logprobs=num_top, temperature=1.5, seed=3, logit_bias={7: 5.0})
        for name, (prompt, num_top) in wanted.items()
    }
    sequences = bench.engine.scheduler.sequences
    for _ in range(4):
        bench.step()
        bench.evict()
    bench.run()
    for name, (_, num_top) in wanted.items():
        reference.check(bench.last[ids[name]], num_top)
        assert bench.last[ids[name]].num_cached_tokens == 0
    assert sum(sequence.num_preemptions for sequence in sequences) >= 1
    assert bench.last[plain].prompt_logprobs is None
    assert bench.engine.runner.inner.num_compiled_while_running == 0  # type: ignore[attr-defined]


def test_a_cached_prompt_is_computed_again_and_its_pages_are_found_by_others(tiny: Started, reference: Reference) -> None:
    bench = tiny_bench(tiny)
    bench.ask(PROMPT, max_tokens=1)
    scored = bench.ask(PROMPT, max_tokens=1, prompt_logprobs=1)
    reference.check(scored, 1)
    assert scored.num_cached_tokens == 0
    bench.engine.reset_prefix_cache()
    bench.ask(PROMPT, max_tokens=1, prompt_logprobs=1)
    assert bench.ask(PROMPT, max_tokens=1).num_cached_tokens == 48


@pytest.mark.parametrize(("first", "num_cached"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (52, 48), (53, 48)])
def test_what_lies_before_the_first_scored_token_comes_from_the_cache(
    tiny: Started, reference: Reference, first: int, num_cached: int
) -> None:
    """A token is told by the one before it, which must be computed."""
    bench = tiny_bench(tiny)
    bench.ask(PROMPT, max_tokens=1)
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=3)
    request = bench.intake.request(PROMPT, params, arrival_s=0.0)
    bench.engine.add(msgspec.structs.replace(request, score_from=first))
    bench.run()
    output = bench.last[request.request_id]
    assert output.num_cached_tokens == num_cached
    reference.check(output, 3, first=first)


@pytest.mark.usefixtures("in_flight")
def test_after_a_preemption_what_was_told_is_found_again(tiny: Started, reference: Reference) -> None:
    bench = tiny_bench(tiny, max_num_batched_tokens=16)
    request_id = bench.add(PROMPT, max_tokens=2, prompt_logprobs=2)
    bench.step()
    bench.step()
    bench.step()
    (sequence,) = bench.engine.scheduler.sequences
    known = sequence.first_unscored
    assert known > 16
    bench.evict()
    bench.step()
    assert (sequence.num_preemptions, sequence.num_hit_pages) == (1, (known - 1) // 16)
    bench.run()
    reference.check(bench.last[request_id], 2)


@pytest.mark.parametrize("has_cache", [True, False])
def test_one_of_several_samples_tells_of_the_prompt(tiny: Started, reference: Reference, has_cache: bool) -> None:
    bench = tiny_bench(tiny, enable_prefix_caching=has_cache)
    request_id = bench.add(PROMPT, n=3, max_tokens=4, temperature=1.0, seed=1, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    with_scores = [sequence for sequence in bench.engine.scheduler.sequences if sequence.request.params.prompt_logprobs is not None]
    assert [sequence.request_id for sequence in with_scores] == [f"{request_id}#0"]
    bench.run()
    told_once = [output for output in bench.outputs[request_id] if output.prompt_logprobs is not None]
    assert len(told_once) == 1
    reference.check(told_once[0], 1)
    plain = bench.ask(PROMPT, n=3, max_tokens=4, temperature=1.0, seed=1)
    joined = functools.reduce(merge_deltas, bench.outputs[request_id])
    assert [answer.token_ids for answer in joined.outputs] == [answer.token_ids for answer in plain.outputs]
    assert joined.prompt_logprobs == told_once[0].prompt_logprobs


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_when_they_are_told(tiny: Started, kind: RequestOutputKind) -> None:
    bench = tiny_bench(tiny, max_num_batched_tokens=16)
    request_id = bench.add(PROMPT, max_tokens=4, ignore_eos=True, prompt_logprobs=1, output_kind=kind)
    bench.run()
    has_any = [output.prompt_logprobs is not None for output in bench.outputs[request_id]]
    expected = {RequestOutputKind.CUMULATIVE: [True] * 4, RequestOutputKind.DELTA: [True, False, False, False]}
    assert has_any == expected.get(kind, [True])


@pytest.mark.usefixtures("in_flight")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"allowed_token_ids": [2]},
        {"logprobs": 2},
        {"detokenize": False},
        {"n": 2, "temperature": 1.0, "output_kind": RequestOutputKind.FINAL_ONLY},
    ],
)
def test_no_tokens_are_made_when_none_are_wanted(tiny: Started, reference: Reference, fields: dict[str, Any]) -> None:
    """What the last token of the prompt leads to is not told, and counts for nothing, be it an end token."""
    bench = tiny_bench(tiny)
    before = len(bench.events)
    output = bench.ask(PROMPT, max_tokens=0, prompt_logprobs=2, **fields)
    reference.check(output, 2)
    for answer in output.outputs:
        assert (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) == ([], "", FinishReason.LENGTH, None)
        assert answer.logprobs == ([] if "logprobs" in fields else None)
    new = bench.events[before:]
    assert [event.num_output_tokens for event in new if isinstance(event, events.RequestFinished)] == [0]
    assert not [event for event in new if isinstance(event, events.RequestFirstToken)]
    assert output.metrics.first_token_s is None
    lengths = bench.engine.scheduler._admission.lengths
    assert list(lengths._recent) == [16], "an answer that was not wanted says something about the length of others"
    bench.after_check()


class SpoilingRunner(NarrowRunner):
    """Gives NaN for the prompt's token that is `spoiled`, in every step that scores it."""

    spoiled = -1

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`."""
        result: Any = super().run(layout, blob)
        step = read_blob(blob, layout)
        places = np.flatnonzero((step["scored_num_top"] >= 0) & (step["scored_next_ids"] == self.spoiled))
        columns = np.array(result.prompt)
        ToldRows.of(columns).chosen[places] = np.nan
        return result._replace(prompt=columns)


@pytest.mark.usefixtures("in_flight", "unchecked_types")
@pytest.mark.parametrize("spoiled", [3, 30, 52])
def test_a_prompt_without_a_usable_number_fails_alone(tiny: Started, reference: Reference, spoiled: int) -> None:
    runner = SpoilingRunner(tiny.engine.runner, max_num_batched_tokens=16)
    bench = Bench(runner, tiny.intake.tokenizer, eos_token_ids=tiny.intake.eos_token_ids)
    runner.spoiled = PROMPT[spoiled]
    other = [token_id for token_id in OTHER if token_id != runner.spoiled]
    bad, good = bench.add(PROMPT, max_tokens=3, prompt_logprobs=1), bench.add(other, max_tokens=3, prompt_logprobs=1)
    bench.run()
    assert bench.last[bad].outputs[0].finish_reason is FinishReason.ERROR
    assert bench.last[bad].prompt_logprobs is None
    reference.check(bench.last[good], 1)
    runner.spoiled = -1
    assert bench.ask(PROMPT, max_tokens=1).num_cached_tokens <= spoiled, "pages of a spoiled step were found"
    bench.after_check()


@pytest.mark.usefixtures("in_flight")
def test_random_orders_of_everything_tell_the_same(tiny: Started, reference: Reference) -> None:
    """Chunks, cache, arrivals, evictions and aborts at random; prompts that begin alike."""
    num_told = num_preemptions = num_cached = 0
    for seed in range(12):
        rng = random.Random(seed)
        bench = tiny_bench(tiny, enable_prefix_caching=rng.random() < 0.8, max_num_batched_tokens=rng.choice((3, 7, 16, 40, 64)))
        wanted: dict[str, tuple[int, int]] = {}
        sequences = []
        for _ in range(12):
            prompt = rng.choice((PROMPT, OTHER))[: rng.choice((1, 2, 16, 17, 33, 38))] + rng.choice(([], [40, 41]))
            num_top, first = rng.choice((0, 1, 4)), rng.choice((1, 1, 5, 17, 60))
            params = SamplingParams(
                temperature=1.0, seed=1, n=rng.choice((1, 1, 3)), max_tokens=rng.choice((0, 1, 3)), ignore_eos=True, prompt_logprobs=num_top
            )
            request = msgspec.structs.replace(bench.intake.request(prompt, params, arrival_s=0.0), score_from=first)
            bench.engine.add(request)
            wanted[request.request_id] = (num_top, min(first, len(prompt)))
            sequences += bench.engine.scheduler.sequences
            for _ in range(rng.randrange(4)):
                bench.step()
                if rng.random() < 0.3:
                    bench.evict()
            if rng.random() < 0.1:
                bench.abort(request.request_id)
        bench.run()
        for request_id, (num_top, first) in wanted.items():
            output = bench.last[request_id]
            if output.outputs[0].finish_reason is FinishReason.LENGTH:
                reference.check(output, num_top, first=first)
                num_told += len(output.prompt_token_ids) - first
                num_cached += output.num_cached_tokens
        num_preemptions += sum(sequence.num_preemptions for sequence in set(sequences))
        bench.after_check()
    assert num_told > 1_000
    assert num_preemptions > 20
    assert num_cached > 100


def test_no_program_holds_the_logits_of_all_tokens(tiny: Started) -> None:
    """Blocks of 32 rows, however many tokens a step has: here 64."""
    runner: Any = tiny.engine.runner
    text = runner.programs[runner.layout_for(64)].as_text()
    assert f"f32[32,{runner.vocab}]" in text
    assert f"f32[64,{runner.vocab}]" not in text


def test_an_aborted_request_tells_nothing(tiny: Started) -> None:
    bench = tiny_bench(tiny, max_num_batched_tokens=16)
    request_id = bench.add(PROMPT, max_tokens=2, prompt_logprobs=2)
    bench.step()
    output = bench.abort(request_id)
    assert output is not None
    assert output.prompt_logprobs is None
    bench.after_check()


def test_impossible_and_unknown_ids_are_told_as_what_json_can_write(script_tokenizer: Tokenizer) -> None:
    beyond = script_tokenizer.vocab_size + 3
    entries = told(beyond, TokenLogprobs(-math.inf, 301, [7, 9], [-0.5, -math.inf]), 2, script_tokenizer)
    assert {token_id: (entry.logprob, entry.rank) for token_id, entry in entries.items()} == {
        beyond: (LOWEST_LOGPROB, 301),
        7: (-0.5, 1),
        9: (LOWEST_LOGPROB, 2),
    }
    assert (entries[beyond].decoded_token, entries[beyond].token_bytes) == ("", b"")
    assert (entries[7].decoded_token, entries[7].token_bytes) == (script_tokenizer.token_text(7), script_tokenizer.token_bytes[7])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be between 0 and 20, got 21"),
        ({"prompt_logprobs": -1}, "between 0 and 20"),
        ({"prompt_logprobs": True}, "an integer"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and"),
        ({"max_tokens": -1, "prompt_logprobs": 1}, "max_tokens must be between 0 and"),
    ],
)
def test_numbers_that_cannot_be(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        SamplingParams(**fields)


def test_the_engines_own_limit(tiny: Started) -> None:
    vocab = tiny.engine.runner.vocab
    intake = Intake(tiny.intake.tokenizer, generation_config={}, eos_token_ids=frozenset(), vocab=vocab, seed=0, max_logprobs=3)
    assert intake.request("a", SamplingParams(prompt_logprobs=3), arrival_s=0.0).params.prompt_logprobs == 3
    with pytest.raises(InvalidRequestError, match="prompt_logprobs 4 is over the limit of this engine, 3"):
        intake.request("a", SamplingParams(prompt_logprobs=4), arrival_s=0.0)
