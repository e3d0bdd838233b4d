"""Faults inside the engine: what ends one request, what ends them all, and that each is told exactly once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.batch import BatchLayout
from jaxpaged.detokenizer import Detokenizer
from jaxpaged.errors import EngineDeadError
from jaxpaged.model_runner import Runner
from jaxpaged.request import FinishReason, RequestOutputKind
from jaxpaged.sampling import NO_ID
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, FailingRunner, History, ScriptRunner, free_talk
from tests.text.vocabularies import id_of
from tests.tiny_engine import start_tiny
from tests.tiny_model import save_safetensors, write_tiny_llama

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("in_flight")]

VOCAB = 259
TALK = free_talk(VOCAB, avoid=(0, 1, 2))


class DeviceError(Exception):
    """What the device raises here."""


def script(**options: Any) -> ScriptRunner:
    return ScriptRunner(TALK, vocab=VOCAB, **options)


def bench(runner: Runner, tokenizer: Tokenizer) -> Bench:
    return Bench(runner, tokenizer, eos_token_ids=(2,))


class LateFailure:
    """Ids that never come: a device that runs behind the host reports an error only to who waits for its result."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise DeviceError("the device is gone")


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_fatal_error_ends_every_request_once(script_tokenizer: Tokenizer, step: int, is_late: bool) -> None:
    runner = FailingRunner(script(max_num_seqs=2, max_num_batched_tokens=16))
    one = bench(runner, script_tokenizer)
    num_before, run_inner = runner.num_steps, runner.run

    def run(layout: BatchLayout, blob: np.ndarray) -> Any:
        if runner.num_steps == num_before + step - 1:
            if not is_late:
                raise DeviceError("the device is gone")
            return LateFailure()
        return run_inner(layout, blob)

    runner.run = run  # type: ignore[method-assign]
    ids = [one.add([10 + key] * 30, max_tokens=20, output_kind=RequestOutputKind.DELTA) for key in range(4)]
    with pytest.raises(EngineDeadError, match="^the engine stopped: the device is gone$"):
        for _ in range(step + 1):
            one.step()
    assert one.engine.is_dead
    for request_id in ids:
        last = one.last[request_id]
        assert last.outputs[0].finish_reason is FinishReason.ERROR
        assert last.error is not None
        assert "the device is gone" in last.error
    assert one.engine.drain_failed() == []
    one.after_check()
    health = one.events.of(events.HealthChanged)
    assert [(event.state, event.message) for event in health] == [("dead", "DeviceError: the device is gone")]
    # Nothing more is taken, and every refusal is counted.
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the device is gone"):
            one.step()
        with pytest.raises(EngineDeadError, match="the device is gone"):
            one.add([5, 6])
    assert [event.code for event in one.events.of(events.RequestRejected)] == ["engine_dead"] * 2
    one.check_conservation()
    assert one.engine.abort(ids[0]) is None
    one.engine.close()
    one.engine.close()
    assert runner.inner.num_closed == 1
    assert [event.message for event in one.events.of(events.EngineStopped)] == ["the device is gone"]


def test_close_aborts_what_is_open(script_tokenizer: Tokenizer) -> None:
    runner = script(max_num_seqs=2)
    one = bench(runner, script_tokenizer)
    for key in range(3):
        one.add([10 + key] * 5, max_tokens=20)
    one.step()
    one.engine.close()
    one.engine.close()
    assert runner.num_closed == 1
    assert [event.reason for event in one.events.of(events.RequestFinished)[-3:]] == ["abort"] * 3
    assert [event.message for event in one.events.of(events.EngineStopped)] == [""]
    for call in (one.step, lambda: one.add([5])):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("at_token", [0, 3])
def test_a_row_without_an_id_ends_its_request_alone(script_tokenizer: Tokenizer, position: int, at_token: int) -> None:
    prompts = [[10 + key] * 9 for key in range(3)]

    def next_id(history: History) -> int:
        return NO_ID if history[0] == 10 + position and len(history) == 9 + at_token else TALK(history)

    one = bench(ScriptRunner(next_id, vocab=VOCAB), script_tokenizer)
    clean = bench(script(), script_tokenizer)
    ids = [one.add(prompt, max_tokens=8) for prompt in prompts]
    one.run()
    for key, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        last = one.last[request_id]
        expected = clean.ask(prompt, max_tokens=8).outputs[0].token_ids
        if key == position:
            assert (last.outputs[0].finish_reason, len(one.ids(request_id))) == (FinishReason.ERROR, at_token)
            assert one.ids(request_id) == expected[:at_token]
            assert last.error is not None
            assert "NaN" in last.error
            assert (last.metrics.first_token_s is None) == (at_token == 0)
        else:
            assert (one.ids(request_id), last.error) == (expected, None)
    one.after_check()


def test_a_failed_row_leaves_nothing_in_the_prefix_cache(script_tokenizer: Tokenizer) -> None:
    prompt = [10] * 33
    one = bench(ScriptRunner(lambda history: NO_ID if len(history) == 33 else TALK(history), vocab=VOCAB), script_tokenizer)
    for _ in range(2):
        last = one.ask(prompt)
        assert last.outputs[0].finish_reason is FinishReason.ERROR
        assert last.num_cached_tokens == 0
    one.after_check()


@pytest.mark.parametrize("at_token", [0, 3, 7])
def test_a_fault_in_the_text_ends_its_request_alone(script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, at_token: int) -> None:
    """Also in the token that would have ended it anyway (7)."""
    append = Detokenizer.append

    def append_or_raise(self: Detokenizer, token_ids: Any) -> str:
        if self.num_tokens == at_token and self._min_tokens == 1:
            raise RuntimeError("no text for this")
        return append(self, token_ids)

    monkeypatch.setattr(Detokenizer, "append", append_or_raise)
    one = bench(script(), script_tokenizer)
    faulty = one.add([10] * 9, max_tokens=8, min_tokens=1)  # min_tokens marks it for the fault
    other = one.add([11] * 9, max_tokens=8)
    one.run()
    last = one.last[faulty]
    assert last.outputs[0].finish_reason is FinishReason.ERROR
    assert last.error == "the answer's text could not be made: no text for this"
    assert (len(one.ids(other)), one.last[other].error) == (8, None)
    one.after_check()


@pytest.mark.parametrize("how", ["length", "eos", "abort"])
def test_a_fault_in_the_rest_of_the_text_ends_its_request_alone(
    script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    finish = Detokenizer.finish

    def finish_or_raise(self: Detokenizer) -> str:
        if self._min_tokens == 1:
            raise RuntimeError("no end to this")
        return finish(self)

    monkeypatch.setattr(Detokenizer, "finish", finish_or_raise)
    word = id_of(script_tokenizer, "q")
    runner = ScriptRunner(lambda history: 2 if how == "eos" and history[0] == 10 and len(history) == 12 else word, vocab=VOCAB)
    one = bench(runner, script_tokenizer)
    faulty = one.add([10] * 9, max_tokens=8, min_tokens=1)
    other = one.add([11] * 9, max_tokens=12)
    one.step()
    if how == "abort":
        output = one.abort(faulty)
        assert output is not None
        assert output.finished
    one.run()
    last = one.last[faulty]
    assert last.outputs[0].finish_reason is (FinishReason.ABORT if how == "abort" else FinishReason.ERROR)
    assert last.error == "the answer's text could not be made: no end to this"
    assert (one.text(other), one.last[other].error) == ("q" * 12, None)
    one.after_check()


def test_nan_inside_the_real_model_stays_in_its_row(tmp_path: Path, programs: Path) -> None:
    """An embedding of NaN makes keys, values and logits of its request NaN; neighbours, and later owners of its pages, never see it."""
    weights = write_tiny_llama(tmp_path, tie=False)
    poisoned = 300
    started = start_tiny(tmp_path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    clean = Bench(started.engine.runner, started.intake.tokenizer)
    prompts = [[20 + key, 30, 40, 50, 60, 70, 80][: 3 + key] for key in range(4)]
    expected = [clean.ask(prompt, max_tokens=12).outputs[0].token_ids for prompt in prompts]
    started.engine.close()
    assert not any(poisoned in answer for answer in expected)

    weights["model.embed_tokens.weight"][poisoned] = np.nan
    save_safetensors(tmp_path / "model.safetensors", weights)
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, 2 layers, 2 KV heads, 16 tokens of 16 numbers in float32
    started = start_tiny(tmp_path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16, memory=128 * page_bytes)
    one = Bench(started.engine.runner, started.intake.tokenizer)
    for round_index in range(12):  # pages of the poisoned are used again by the others
        bad = [one.add([poisoned, 30 + round_index] * 20, max_tokens=8), one.add([25 + round_index, 31, poisoned], max_tokens=8)]
        ids = [one.add(prompt, max_tokens=12) for prompt in prompts]
        one.run()
        assert [one.last[request_id].outputs[0].finish_reason for request_id in bad] == [FinishReason.ERROR] * 2
        assert [one.ids(request_id) for request_id in ids] == expected
    one.after_check()
    started.engine.close()


def test_an_unexpected_error_of_the_scheduler_ends_nothing_in_silence(script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug outside of the device kills the engine too: nobody may wait for ever."""
    one = bench(script(), script_tokenizer)
    ids = [one.add([10 + key] * 9, max_tokens=8) for key in range(2)]
    one.step()

    def update(*_: Any) -> None:
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(one.engine.scheduler, "update", update)
    with pytest.raises(EngineDeadError, match="the books do not balance"):
        one.step()
    assert one.engine.is_dead
    assert [one.last[request_id].outputs[0].finish_reason for request_id in ids] == [FinishReason.ERROR] * 2
    one.check_conservation()


def test_what_a_failing_step_had_ready_is_delivered(script_tokenizer: Tokenizer) -> None:
    """One request ends in the very step that kills the engine: it keeps its end, the other gets the error."""
    one = bench(script(), script_tokenizer)
    ends = one.add([10] * 9, max_tokens=2)
    goes_on = one.add([11] * 9, max_tokens=8)
    while not all(sequence.num_output_tokens for sequence in one.engine.scheduler.sequences):
        one.step()

    class Broken(list[events.Event]):
        def __call__(self, event: events.Event, /) -> None:
            if isinstance(event, events.StepFinished):
                raise OSError("the sink broke its promise")
            one.events(event)

        def close(self) -> None:
            pass

    one.engine._emit.sink = Broken()
    with pytest.raises(EngineDeadError, match="the sink broke its promise"):
        one.step()
    assert one.last[ends].outputs[0].finish_reason is FinishReason.LENGTH
    assert one.last[goes_on].outputs[0].finish_reason is FinishReason.ERROR
    one.check_conservation()
