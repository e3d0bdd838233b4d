"""States of an engine that several calls pause, wake up and give up; and orders that are refused."""

from typing import Any

import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.engine_control import Pause
from jaxpaged.errors import EngineDeadError, InvalidRequestError
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, ScriptRunner, free_talk

pytestmark = [pytest.mark.jax, pytest.mark.usefixtures("in_flight")]

VOCAB = 259
PROMPTS = [[10 + key] * 21 for key in range(5)]
UNUSUAL: tuple[Any, ...] = (["abort"], {}, set(), 5, 1.0, True, b"abort", object(), np.arange(3))


@pytest.fixture
def bench(script_tokenizer: Tokenizer) -> Bench:
    """Three rows, pages of 4."""
    runner = ScriptRunner(free_talk(VOCAB, avoid=(0, 1, 2)), vocab=VOCAB, max_num_seqs=3, page_size=4)
    return Bench(runner, script_tokenizer, eos_token_ids=(2,))


def pause(bench: Bench, mode: Any, *, clear_cache: bool = True) -> None:
    bench._take(bench.engine.control.pause(mode, clear_cache=clear_cache))
    bench.engine.scheduler.check()


def test_pauses_that_are_given_up(bench: Bench) -> None:
    """Each leaves what the others ask for, in whatever order they go."""
    control, scheduler = bench.engine.control, bench.engine.scheduler

    def state() -> str:
        return "paused" if scheduler.is_paused else "draining" if scheduler.is_draining else "ready"

    def begin(mode: Any) -> Pause:
        pause = Pause(mode)
        bench._take(control.begin_pause(pause))
        return pause

    ids = [bench.add(prompt, max_tokens=12) for prompt in PROMPTS]
    bench.step()
    alone = begin("wait")
    assert state() == "draining"
    control.withdraw(alone)
    control.withdraw(alone)
    assert state() == "ready"
    for order in (1, -1):
        pair = [begin("wait"), begin("wait")][::order]
        control.withdraw(pair[0])
        assert state() == "draining"
        control.withdraw(pair[1])
        assert state() == "ready"
    waiting, keeping = begin("wait"), begin("keep")
    assert state() == "paused"
    control.withdraw(keeping)
    assert state() == "draining"
    control.withdraw(waiting)
    pause(bench, "keep", clear_cache=False)
    control.withdraw(begin("wait"))
    assert state() == "paused", "somebody else's pause holds"
    control.resume()
    # Resumed by another, it has nothing left to give up, nor to finish.
    overruled = begin("wait")
    control.resume()
    pause(bench, "keep", clear_cache=False)
    control.withdraw(overruled)
    control.finish_pause(overruled)
    assert (state(), control.is_settled(overruled)) == ("paused", True)
    control.resume()
    bench.run()
    assert [len(bench.ids(request_id)) for request_id in ids] == [12] * 5
    given_up = begin("keep")
    bench.engine.close()
    said = len(bench.events.of(events.HealthChanged))
    control.withdraw(given_up)
    assert len(bench.events.of(events.HealthChanged)) == said


def test_wake_up_ends_a_sleep_and_no_pause(bench: Bench) -> None:
    control = bench.engine.control
    pause(bench, "keep")
    for tags in (None, ["weights"], ["scheduling"], []):
        control.wake_up(tags)
        assert control.is_paused
    for _ in range(2):
        bench._take(control.sleep(0, "keep"))
        assert control.is_sleeping
        control.wake_up([])
        assert control.is_sleeping
        control.wake_up()
        assert (control.is_paused, control.is_sleeping) == (True, False)
    control.resume()
    assert not control.is_paused
    bench._take(control.sleep(0))
    # Paused while asleep is paused.
    pause(bench, "keep")
    control.wake_up(["scheduling"])
    assert (control.is_paused, control.is_sleeping) == (True, False)
    control.resume()
    bench._take(control.sleep(0))
    control.wake_up()
    assert not control.is_paused
    states = [event.state for event in bench.events.of(events.HealthChanged)]
    assert states == [
        "paused",
        *["sleeping", "paused"] * 2,
        "ready",
        *["paused", "sleeping"],
        *["paused", "ready"],
        *["paused", "sleeping", "ready"],
    ]


def test_a_closed_or_dead_engine_takes_no_orders(bench: Bench) -> None:
    bench.engine.control.pause("keep")
    bench.engine.close()
    control = bench.engine.control
    for call in (control.pause, control.resume, lambda: control.finish_pause(Pause()), control.wake_up, control.sleep):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_unknown_modes_levels_and_tags_change_nothing(bench: Bench) -> None:
    control: Any = bench.engine.control
    for mode in ("now", None, *UNUSUAL):
        for call in (control.pause, lambda mode: control.sleep(1, mode)):
            with pytest.raises(InvalidRequestError, match=r"mode is one of \['abort', 'wait', 'keep'\], got "):
                call(mode)
    for level in (3, -1, "1", None, *(value for value in UNUSUAL if not isinstance(value, int) or value is True), 5):
        with pytest.raises(InvalidRequestError, match=r"level is one of \[0, 1, 2\]"):
            control.sleep(level)
    for tags in (["weight"], "all", [5], [["weights"]], [None], 5, True, 1.0, b"weights", object(), np.arange(3), {"kv": 1}):
        with pytest.raises(InvalidRequestError, match="tags are among"):
            control.wake_up(tags)
    for flag in ("yes", None, 1, [], np.arange(3)):
        with pytest.raises(InvalidRequestError, match="clear_cache is True or False"):
            control.pause("keep", clear_cache=flag)
    assert not control.is_paused
    assert not control.is_sleeping
    assert bench.events.of(events.HealthChanged) == []
