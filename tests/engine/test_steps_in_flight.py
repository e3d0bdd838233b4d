"""A step is scheduled and started while the one before it runs: answers, ends and pages are those of an engine that waits."""

import random
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.request import FinishReason
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, FailingRunner, ScriptRunner, follow, free_talk
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax

EOS = 2


def bench(tokenizer: Tokenizer, *, max_in_flight: int, eos: tuple[int, ...] = (EOS,), **options: Any) -> Bench:
    runner = ScriptRunner(free_talk(60), vocab=tokenizer.vocab_size, page_size=4, **options)
    return Bench(runner, tokenizer, eos_token_ids=eos, max_in_flight=max_in_flight)


def answers(one: Bench, seed: int) -> dict[str, tuple[list[int], FinishReason | None]]:
    """What 40 requests get that arrive at random, end by themselves or at a limit, and share what they can."""
    rng = random.Random(seed)
    ids = []
    for index in range(40):
        prompt = [3 + index % 3] * rng.randint(1, 30) + [4 + index]
        ids.append(one.add(prompt, request_id=f"r{index}", max_tokens=rng.randint(1, 40), min_tokens=rng.choice((0, 0, 1))))
        for _ in range(rng.choice((0, 0, 1, 3))):
            one.step()
    one.run()
    one.after_check()
    return {request_id: (one.ids(request_id), one.last[request_id].outputs[0].finish_reason) for request_id in ids}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_pages", [500, 40])
def test_answers_are_those_of_an_engine_that_waits(script_tokenizer: Tokenizer, seed: int, num_pages: int) -> None:
    """With room for all, and with a pool in which requests are preempted while their last id is on its way."""
    waits = answers(bench(script_tokenizer, max_in_flight=1, num_pages=num_pages), seed)
    for max_in_flight in (2, 3):
        assert answers(bench(script_tokenizer, max_in_flight=max_in_flight, num_pages=num_pages), seed) == waits
    assert {reason for _, reason in waits.values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_token_after_the_end_is_computed_once_and_never_shown(script_tokenizer: Tokenizer) -> None:
    runner = ScriptRunner(follow({(9, 9): [10, 11, EOS, 12, 13]}), vocab=script_tokenizer.vocab_size, page_size=4)
    one = Bench(runner, script_tokenizer, eos_token_ids=(EOS,), max_in_flight=2, canary_prompt=(9, 9), canary_tokens=5)
    runner.histories.clear()
    answer = one.ask([9, 9], max_tokens=50).outputs[0]
    one.run()
    assert (answer.token_ids, answer.finish_reason) == ([10, 11, EOS], FinishReason.STOP)
    assert [history for step in runner.histories for history in step][-1] == (9, 9, 10, 11, EOS)
    assert len(runner.histories) == 4


def test_a_length_limit_is_known_ahead(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, max_in_flight=2, eos=())
    one.events.clear()
    assert len(one.ask([7, 8], max_tokens=6).outputs[0].token_ids) == 6
    one.run()
    assert len(one.events.of(events.StepFinished)) == 6


def test_an_abort_while_a_step_runs(script_tokenizer: Tokenizer) -> None:
    one = bench(script_tokenizer, max_in_flight=2, eos=())
    first = one.add([7, 8, 9], max_tokens=30)
    for _ in range(4):
        one.step()
    second = one.add([10, 11], max_tokens=5)
    one.step()
    output = one.abort(first)
    assert output is not None
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    one.run()
    assert len(one.ids(second)) == 5
    one.after_check()


def test_a_row_without_an_id_fails_alone_although_its_next_step_runs(script_tokenizer: Tokenizer) -> None:
    inner = ScriptRunner(free_talk(60), vocab=script_tokenizer.vocab_size, page_size=4)
    calm = Bench(inner, script_tokenizer)
    expected = [calm.ask(prompt, max_tokens=8, ignore_eos=True).outputs[0].token_ids for prompt in ([5, 5], [6, 6], [7, 7])]
    spoiled: list[int] = []
    script = ScriptRunner(free_talk(60), vocab=script_tokenizer.vocab_size, page_size=4)
    one = Bench(FailingRunner(script, without_id=lambda step, row: row == 1 and step in spoiled), script_tokenizer, max_in_flight=2)
    ids = [one.add(prompt, max_tokens=8, ignore_eos=True) for prompt in ([5, 5], [6, 6], [7, 7])]
    spoiled.append(one.runner.num_steps + 4)  # type: ignore[attr-defined]
    one.run()
    reasons = [one.last[request_id].outputs[0].finish_reason for request_id in ids]
    assert sorted(reason.value for reason in reasons if reason) == ["error", "length", "length"]
    for request_id, answer, reason in zip(ids, expected, reasons, strict=True):
        assert one.ids(request_id) == (answer if reason is FinishReason.LENGTH else answer[: len(one.ids(request_id))])


def test_ids_pass_through_the_slots_of_a_real_model(tiny_folder: Path, programs: Path) -> None:
    started = start_tiny(tiny_folder, programs=programs)
    prompts = [[3 + index] * (1 + 7 * index) for index in range(9)]
    got = []
    for max_in_flight in (1, 2):
        one = Bench(started.engine.runner, started.intake.tokenizer, max_in_flight=max_in_flight)
        ids = [
            one.add(prompt, max_tokens=20 + index, ignore_eos=True, temperature=0.8 * (index % 2), seed=index)
            for index, prompt in enumerate(prompts)
        ]
        one.run()
        one.after_check()
        got.append([one.ids(request_id) for request_id in ids])
    assert got[0] == got[1]
    started.engine.close()
