"""Prompts and answers at the limits: of the context, of the page pool, of nothing at all; and pages after every kind of end."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.errors import ContextLengthError, InvalidRequestError, PoolTooSmallError
from jaxpaged.request import FinishReason, RequestOutputKind, SamplingParams
from jaxpaged.sampling import NO_ID
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, FailingRunner, History, ScriptRunner, free_talk
from tests.text.vocabularies import id_of

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("in_flight")]

VOCAB = 259
EOS = 2
TALK = free_talk(VOCAB, avoid=(0, 1, EOS))


def bench(tokenizer: Tokenizer, next_id: Callable[[History], int] = TALK, *, enable_prefix_caching: bool = True, **options: Any) -> Bench:
    """SCRIPT over the bytes of the tokenizer, with end token 2."""
    runner = ScriptRunner(next_id, vocab=tokenizer.vocab_size, **options)
    return Bench(runner, tokenizer, eos_token_ids=(EOS,), enable_prefix_caching=enable_prefix_caching)


def prompt_of(length: int, *, key: int = 0) -> list[int]:
    """A prompt that begins like no other with another key."""
    return [3 + key % 250, *(3 + (key * 31 + index * 7) % 250 for index in range(length - 1))]


CONTEXT = 40


@pytest.mark.parametrize("max_tokens", [None, 1, 2, CONTEXT, 2**31 - 1])
@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT - 1])
def test_o21_an_answer_ends_at_the_context(script_tokenizer: Tokenizer, length: int, max_tokens: int | None) -> None:
    """The rule: an answer that would run over the context is cut there, with `length`."""
    one = bench(script_tokenizer, max_model_len=CONTEXT)
    answer = one.ask(prompt_of(length), max_tokens=max_tokens).outputs[0]
    room = CONTEXT - length
    assert (len(answer.token_ids), answer.finish_reason) == (min(room, max_tokens or room), FinishReason.LENGTH)
    assert one.events.of(events.RequestQueued)[-1].max_tokens == len(answer.token_ids)
    one.after_check()


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 4 * CONTEXT])
def test_o21_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(script_tokenizer: Tokenizer, length: int) -> None:
    one = bench(script_tokenizer, max_model_len=CONTEXT)
    with pytest.raises(ContextLengthError, match=rf"{length} tokens.*context {CONTEXT}.*at most {CONTEXT - 1} "):
        one.add(prompt_of(length))
    assert one.events.of(events.RequestRejected)[-1].code == "context_length_exceeded"
    one.after_check()


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31, 1.5, "8", True, float("nan")])
def test_o21_max_tokens_that_is_no_count_is_refused(max_tokens: object) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens must be") as caught:
        SamplingParams(max_tokens=max_tokens)  # type: ignore[arg-type]
    assert caught.value.param == "max_tokens"


def test_o27_empty_prompts_are_refused_and_harm_nobody(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer)
    request_id = one.add("hello", max_tokens=20)
    for empty in ("", [], {"prompt": ""}, {"prompt_token_ids": []}):
        with pytest.raises(InvalidRequestError, match="prompt is empty") as caught:
            one.add(empty)
        assert caught.value.param == "prompt"
        one.step()
    for odd in (" ", "\u0000"):
        assert len(one.ask(odd, max_tokens=3).outputs[0].token_ids) == 3
    assert len(one.ids(request_id)) == 20
    one.after_check()


@pytest.mark.parametrize(
    "prompt",
    [
        [-1],
        [3, VOCAB + 10**6],
        [2**63],
        [True],
        [1.0],
        ["a"],
        [[3]],
        [None],
        None,
        7,
        b"bytes",
        {},
        {"prompt": 3},
        {"prompt": 3, "prompt_token_ids": [3]},
        {"prompt": "a", "prompt_token_ids": "abc"},
        {"prompt_token_ids": "abc"},
        {"text": "a"},
        "\ud83d",
        "a\udc00b",
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_o27_malformed_prompts_are_refused(script_tokenizer: Tokenizer, prompt: Any) -> None:
    one = bench(script_tokenizer)
    with pytest.raises(InvalidRequestError, match=r"prompt|Unicode") as caught:
        one.add(prompt)
    assert caught.value.param == "prompt"
    one.after_check()


@pytest.mark.parametrize("length", [318, 319, 320, 321])
def test_o36_prompts_at_the_size_of_the_pool(script_tokenizer: Tokenizer, length: int) -> None:
    """20 pages of 16 tokens: a prompt needs a place for the first token of its answer as well."""
    one = bench(script_tokenizer, num_pages=21, max_model_len=1000)
    if length < 320:
        first = one.add(prompt_of(length), max_tokens=400)
    else:
        with pytest.raises(PoolTooSmallError, match=rf"{length} tokens.*20 pages of 16 tokens.*at most 319 tokens") as caught:
            one.add(prompt_of(length), max_tokens=400)
        assert caught.value.code == "kv_pool_exceeded"
    second = one.add(prompt_of(5, key=1), max_tokens=4)
    one.run()
    assert len(one.ids(second)) == 4
    if length < 320:
        # The last token of an answer takes no place in the pool.
        assert (len(one.ids(first)), one.last[first].outputs[0].finish_reason) == (321 - length, FinishReason.LENGTH)
    one.after_check()


def test_o36_an_answer_that_outgrows_the_pool_ends_with_length(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, num_pages=21, max_model_len=1000)
    long = one.add(prompt_of(10), max_tokens=400)
    small = one.add(prompt_of(5, key=1), max_tokens=4)
    num_steps = 0
    while small not in one.last:
        one.step()
        num_steps += 1
    assert num_steps <= 6
    one.run()
    assert (len(one.ids(long)), one.last[long].outputs[0].finish_reason) == (311, FinishReason.LENGTH)
    assert one.last[long].metrics.num_preemptions == 0
    one.after_check()


def test_o36_two_that_fit_alone_and_not_together_both_finish(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, num_pages=21, max_model_len=1000, enable_prefix_caching=False)
    ids = [one.add(prompt_of(150, key=key), max_tokens=100) for key in range(3)]
    one.run()
    expected = [alone(script_tokenizer, prompt_of(150, key=key), 100) for key in range(3)]
    assert [one.ids(request_id) for request_id in ids] == expected
    one.after_check()


def alone(tokenizer: Tokenizer, prompt: list[int], max_tokens: int) -> list[int]:
    """The answer from an engine with room to spare."""
    return bench(tokenizer, num_pages=200, max_model_len=2000).ask(prompt, max_tokens=max_tokens).outputs[0].token_ids


SMALL = {"num_pages": 33, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
"""32 pages of 4 tokens: a prompt of 40 tokens goes in three chunks."""


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("kind", ["eos", "stop_string", "stop_id", "length", "context", "no_id", "text_fault"])
def test_o40_pages_after_every_end(
    script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str, enable_prefix_caching: bool
) -> None:
    """`Bench.step` checks free + cached + in use after each step."""
    prompt = prompt_of(40)
    end_id = {"eos": EOS, "no_id": NO_ID, "text_fault": 200}.get(kind, id_of(script_tokenizer, "q"))

    def next_id(history: History) -> int:
        return end_id if len(history) == 46 and history[:40] == tuple(prompt) else TALK(history) if TALK(history) != end_id else 5

    one = bench(script_tokenizer, next_id, enable_prefix_caching=enable_prefix_caching, **SMALL, max_model_len=60)
    fields: dict[str, Any] = {"stop_string": {"stop": "q"}, "stop_id": {"stop_token_ids": [end_id]}, "length": {"max_tokens": 7}}.get(
        kind, {}
    )
    if kind == "text_fault":
        break_text_at(monkeypatch, 200)
    target = one.add(prompt, **{"max_tokens": None, **fields})
    neighbour = one.add(prompt_of(30, key=3), max_tokens=20)
    one.run()
    reason = {
        "length": FinishReason.LENGTH,
        "context": FinishReason.LENGTH,
        "no_id": FinishReason.ERROR,
        "text_fault": FinishReason.ERROR,
    }.get(kind, FinishReason.STOP)
    assert one.last[target].outputs[0].finish_reason is reason
    assert len(one.ids(target)) == {"context": 20, "no_id": 6}.get(kind, 7)
    assert (one.last[target].error is not None) == (reason is FinishReason.ERROR)
    assert len(one.ids(neighbour)) == 20
    assert one.last[neighbour].error is None
    one.after_check()


def break_text_at(monkeypatch: pytest.MonkeyPatch, token_id: int) -> None:
    """Makes the text of one token id raise."""
    from jaxpaged.token_bytes import TokenBytes

    read = TokenBytes.__getitem__

    def read_or_raise(self: TokenBytes, index: int) -> bytes:
        if index == token_id:
            raise RuntimeError("no text for this one")
        return read(self, index)

    monkeypatch.setattr(TokenBytes, "__getitem__", read_or_raise)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize(
    "phase", ["new", "waiting", "prefilling", "first_token", "decoding", "one_before_the_end", "preempted", "finished"]
)
def test_o40_abort_in_every_phase(script_tokenizer: Tokenizer, phase: str, enable_prefix_caching: bool) -> None:
    one = bench(script_tokenizer, **{**SMALL, "num_pages": 28}, max_model_len=100, enable_prefix_caching=enable_prefix_caching)
    before = len(one.events.of(events.RequestFinished))
    if phase == "waiting":
        others = [one.add(prompt_of(30, key=key), max_tokens=40) for key in range(1, 5)]
        one.step()
    else:
        others = [one.add(prompt_of(20, key=1), max_tokens=60)]
        one.step()
    target = one.add(prompt_of(40), max_tokens=30, output_kind=RequestOutputKind.DELTA)
    sequence = one.engine.scheduler.sequences[-1]
    until: dict[str, Callable[[], bool]] = {
        "new": lambda: True,
        "waiting": lambda: True,
        "prefilling": lambda: 0 < sequence.num_computed_tokens < 40,
        "first_token": lambda: sequence.num_output_tokens == 1,
        "decoding": lambda: sequence.num_output_tokens == 7,
        "one_before_the_end": lambda: sequence.num_output_tokens == 29,
        "preempted": lambda: sequence.num_preemptions == 1,
        "finished": lambda: sequence.is_finished,
    }
    for _ in range(500):
        if until[phase]():
            break
        one.step()
    assert until[phase]()
    in_use = one.pages.num_in_use
    owned = sum(one.pages.ref_count(page) == 1 for page in sequence.pages)
    output = one.abort(target)
    assert one.pages.num_in_use == in_use - owned
    if phase == "finished":
        assert output is None
    else:
        assert output is not None
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        assert one.abort(target) is None
        assert target not in {sequence.request_id for sequence in one.engine.scheduler.sequences}
    assert one.abort("nobody") is None
    one.run()
    for key, request_id in enumerate(others, start=1):
        length, max_tokens = (30, 40) if phase == "waiting" else (20, 60)
        assert one.ids(request_id) == alone(script_tokenizer, prompt_of(length, key=key), max_tokens)
    assert len(one.events.of(events.RequestFinished)) - before == len(others) + 1
    one.after_check()


@pytest.mark.parametrize("num_requests", [400, pytest.param(10_000, marks=pytest.mark.tier("long", area="pages"))])
def test_o40_mixed_requests_leave_nothing(script_tokenizer: Tokenizer, num_requests: int) -> None:
    """Ends of every kind at random, in a pool that is too small for those that run, and the books checked after each step."""
    rng = random.Random(1)

    def next_id(history: History) -> int:
        token_id = TALK(history)
        return EOS if token_id < 8 else NO_ID if token_id > 256 and len(history) > 20 else token_id

    one = bench(script_tokenizer, next_id, num_pages=41, page_size=4, max_num_seqs=6, max_num_batched_tokens=24, max_model_len=90)
    num_added = 0
    while num_added < num_requests or one.engine.has_work:
        for _ in range(rng.randrange(4) if num_added < num_requests else 0):
            num_added += 1
            length = rng.choice((1, 3, 4, 5, 8, 17, 40, 89, 95))
            try:
                one.add(
                    prompt_of(length, key=rng.randrange(12)),
                    max_tokens=rng.choice((1, 2, 9, 30, None)),
                    stop=rng.choice((None, "z", ["ab", "q"])),
                    ignore_eos=rng.random() < 0.3,
                    output_kind=rng.choice(tuple(RequestOutputKind)),
                )
            except ContextLengthError:
                assert length >= 90
        sequences = one.engine.scheduler.sequences
        if sequences and rng.random() < 0.1:
            one.abort(rng.choice(sequences).request_id)
        if rng.random() < 0.01:
            one.engine.reset_prefix_cache()
        one.step()
        if one.engine.scheduler.num_waiting > 40:
            for _ in range(30):
                one.step()
    reasons = {event.reason for event in one.events.of(events.RequestFinished)}
    assert reasons == {"stop", "length", "abort", "error"}
    # Admission learns how long answers are here, so few lose their pages; enough still do.
    assert sum(event.num_preempted for event in one.events.of(events.StepFinished)) > num_requests / 40
    one.after_check()


def test_a_request_id_in_use_is_refused_and_free_again_afterwards(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer)
    one.add(prompt_of(5), max_tokens=5, request_id="mine")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="'mine' is already in use"):
            one.add(prompt_of(6), request_id="mine")
        one.step()
    one.run()
    assert len(one.ids("mine")) == 5
    one.last.clear()
    one.events.clear()
    one.add(prompt_of(6), max_tokens=3, request_id="mine")
    one.run()
    assert len(one.ids("mine")) == 3
    one.after_check()


def test_slow_steps_are_measured_where_they_happen(script_tokenizer: Tokenizer) -> None:
    runner = FailingRunner(ScriptRunner(TALK, vocab=VOCAB), before=lambda step: time.sleep(0.05 if step == 20 else 0))
    one = Bench(runner, script_tokenizer)
    one.ask(prompt_of(5), max_tokens=10)
    steps = one.events.of(events.StepFinished)
    assert 0.05 <= steps[19].device_s < 1
    assert all(step.device_s < 0.05 for step in steps[:19])
