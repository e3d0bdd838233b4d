"""Sleep and waking up: the device's memory really comes back, and afterwards every answer is the same to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.errors import EngineDeadError, EnginePausedError, MemoryBudgetError
from jaxpaged.model_runner import ModelRunner
from jaxpaged.request import FinishReason
from jaxpaged.start import Started
from tests.engine.conftest import live_bytes
from tests.fakes import Bench
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax

PROMPTS = [[20 + key] * (17 + key) for key in range(4)]
WARM = {"temperature": 1.0, "seed": 3, "max_tokens": 14, "ignore_eos": True}


@pytest.fixture(scope="module")
def started(tiny_folder: Path, programs: Path) -> Iterator[Started]:
    """A runner of these tests' own, with one program."""
    started = start_tiny(tiny_folder, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    yield started
    started.engine.close()


@pytest.fixture
def bench(started: Started) -> Iterator[Bench]:
    """An engine over the runner, which is awake before and after."""
    yield Bench(started.engine.runner, started.intake.tokenizer, canary_tokens=4)
    assert runner_of(started).is_awake


def runner_of(bench: Bench | Started) -> ModelRunner:
    assert isinstance(bench.engine.runner, ModelRunner)
    return bench.engine.runner


def weight_bits(runner: ModelRunner) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in runner._model.params]


def sleep(bench: Bench, level: int, mode: Any = "abort") -> None:
    bench._take(bench.engine.control.sleep(level, mode))
    bench.engine.scheduler.check()


@pytest.mark.parametrize("level", [1, 2])
def test_memory_comes_back_and_answers_stay(bench: Bench, level: int) -> None:
    expected = [bench.ask(prompt, **WARM).outputs[0].token_ids for prompt in PROMPTS]
    runner = runner_of(bench)
    bits, before = weight_bits(runner), live_bytes()
    gone = runner.pool_bytes + runner.slot_bytes + runner._model.weight_bytes
    for _ in range(2):
        sleep(bench, level)
        assert (bench.engine.control.is_sleeping, runner.is_awake) == (True, False)
        assert live_bytes() == before - gone
        waiting = bench.add(PROMPTS[0], **WARM)
        assert bench.step() == []
        sleep(bench, level, "keep")
        bench.engine.control.wake_up()
        assert (bench.engine.control.is_sleeping, runner.is_awake) == (False, True)
        assert live_bytes() == before
        assert weight_bits(runner) == bits
        bench.run()
        assert bench.ids(waiting) == expected[0]
        assert bench.last[waiting].num_cached_tokens == 0, "what the pool held is lost"
        assert [bench.ask(prompt, **WARM).outputs[0].token_ids for prompt in PROMPTS] == expected
    assert runner.num_compiled_while_running == 0
    bench.after_check()


def test_kept_requests_are_computed_again(bench: Bench) -> None:
    expected = [bench.ask(prompt, **WARM).outputs[0].token_ids for prompt in PROMPTS]
    ids = [bench.add(prompt, **WARM) for prompt in PROMPTS]
    for _ in range(7):
        bench.step()
    assert any(sequence.num_output_tokens for sequence in bench.engine.scheduler.sequences)
    sleep(bench, 1, "keep")
    bench.engine.control.wake_up()
    bench.run()
    assert [bench.ids(request_id) for request_id in ids] == expected
    bench.after_check()


def test_level_0_keeps_everything(bench: Bench) -> None:
    before = live_bytes()
    request_id = bench.add(PROMPTS[0], **WARM)
    bench.step()
    in_use = bench.pages.num_in_use
    sleep(bench, 0, "keep")
    assert (live_bytes(), bench.pages.num_in_use) == (before, in_use)
    assert bench.engine.control.is_sleeping
    with pytest.raises(EnginePausedError, match="call wake_up"):
        bench.engine.control.resume()
    bench.engine.control.wake_up(["scheduling"])
    bench.run()
    assert len(bench.ids(request_id)) == 14
    bench.after_check()


def test_parts_wake_one_by_one(bench: Bench) -> None:
    control, runner = bench.engine.control, runner_of(bench)
    before = live_bytes()
    sleep(bench, 1)
    with pytest.raises(EnginePausedError, match="weights and kv_cache must be woken up before scheduling"):
        control.wake_up(["scheduling"])
    control.wake_up(["weights"])
    control.wake_up(["weights"])
    assert (control.is_sleeping, control.is_paused, runner.is_awake) == (True, True, False)
    assert before - live_bytes() >= runner.pool_bytes
    # Half awake, it can go to sleep again.
    sleep(bench, 1)
    control.wake_up(["kv_cache"])
    control.wake_up("weights")
    assert (control.is_sleeping, control.is_paused, live_bytes()) == (False, False, before)
    control.wake_up()
    control.resume()
    states = [event.state for event in bench.events.of(events.HealthChanged)]
    assert states == ["paused", "sleeping", "ready"]
    bench.after_check()


def test_deeper_and_shallower_sleep(bench: Bench) -> None:
    """From level 1 to 2 the copies on the host go as well; a lower level after that brings nothing back."""
    runner = runner_of(bench)
    sleep(bench, 0)
    sleep(bench, 1)
    assert runner._host_weights is not None
    sleep(bench, 2)
    assert runner._host_weights is None
    sleep(bench, 1)
    sleep(bench, 0)
    assert not runner.is_awake
    bench.engine.control.wake_up()
    bench.after_check()


@pytest.mark.parametrize("part", ["weights", "pool"])
def test_no_room_to_wake_up_leaves_it_asleep(bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    control, runner = bench.engine.control, runner_of(bench)
    before = live_bytes()
    sleep(bench, 1)
    asleep = live_bytes()
    num_puts = 0

    def full(*_: Any, **__: Any) -> Any:
        nonlocal num_puts
        num_puts += 1
        if part == "pool" or num_puts > 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return put(*_, **__)

    put = jax.device_put
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", full) if part == "weights" else patch.setattr(runner, "_new_state", full)
        for _ in range(2):
            num_puts = 0
            with pytest.raises(MemoryBudgetError, match="not enough memory"):
                control.wake_up()
            assert (control.is_sleeping, bench.engine.is_dead) == (True, False)
        if part == "weights":
            assert live_bytes() == asleep
    control.wake_up()
    assert live_bytes() == before
    bench.after_check()


def test_a_device_that_fails_on_the_way_is_dead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("the device is gone")

    request_id = bench.add(PROMPTS[0], **WARM)
    monkeypatch.setattr(bench.engine.runner, "sleep", fail)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        bench.engine.control.sleep(1, "keep")
    assert bench.engine.is_dead
    bench._take(bench.engine.drain_failed())
    assert bench.last[request_id].outputs[0].finish_reason is FinishReason.ERROR
