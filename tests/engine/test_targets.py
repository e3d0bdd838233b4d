"""Targets for times: the engine measures its steps and tells the scheduler, which makes them smaller."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.batch import BatchLayout
from jaxpaged.clocks import Clocks
from jaxpaged.config import SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.intake import Intake
from jaxpaged.logprobs import StepResult
from jaxpaged.request import SamplingParams
from jaxpaged.tokenizer import Tokenizer
from tests.event_log import EventLog
from tests.fakes import ScriptRunner, free_talk

pytestmark = pytest.mark.jax

VOCAB = 259


class Timed(NamedTuple):
    """Ids that the device is done with at `done_s`."""

    ids: np.ndarray
    runner: "TimedRunner"
    done_s: float

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Waits for them."""
        self.runner.now_s = max(self.runner.now_s, self.done_s)
        return self.ids


class TimedRunner(ScriptRunner):
    """Each step takes 10 ms and some for each token, padding included, on a clock of its own; one step after another."""

    now_s = done_s = 0.0
    per_token_s = 0.001

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`."""
        result = super().run(layout, blob)
        self.done_s = max(self.now_s, self.done_s) + 0.01 + self.per_token_s * layout.num_tokens
        return result._replace(ids=Timed(result.ids, self, self.done_s))  # type: ignore[arg-type]  # they are still to come


def make_engine(tokenizer: Tokenizer, *, target_itl_s: float | None, max_in_flight: int) -> tuple[Engine, TimedRunner, EventLog]:
    runner = TimedRunner(free_talk(VOCAB, avoid=(2,)), vocab=VOCAB, num_pages=400, max_num_seqs=64, max_num_batched_tokens=256)
    log = EventLog()
    clocks = Clocks(monotonic=lambda: runner.now_s, wall=lambda: runner.now_s)
    policy = SchedulerConfig(target_itl_s=target_itl_s)
    return Engine(runner, tokenizer, policy=policy, sink=log, clocks=clocks, max_in_flight=max_in_flight), runner, log


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(("target_itl_s", "most_tokens"), [(None, 256), (0.1, 64), (0.05, 32)])
def test_steps_become_as_short_as_the_target(
    target_itl_s: float | None, most_tokens: int, max_in_flight: int, script_tokenizer: Tokenizer
) -> None:
    """Prompts beside a running answer fill steps of 256 tokens, and with a target the largest bucket that keeps it."""
    engine, runner, log = make_engine(script_tokenizer, target_itl_s=target_itl_s, max_in_flight=max_in_flight)
    intake = Intake(script_tokenizer, generation_config={}, eos_token_ids=frozenset((2,)), vocab=VOCAB, seed=0)

    def add(token_id: int, length: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(intake.request([token_id] * length, params, arrival_s=runner.now_s))

    add(10, 5, 200)
    for number in range(1, 5):
        add(10 + number, 20 * number, 1)
        for _ in range(6):
            engine.step()
    num_learnt = len(log.of(events.StepFinished))
    for number in range(4):
        add(20 + number, 450, 1)
    while engine.has_work:
        engine.step()
    assert max(step.bucket_tokens for step in log.of(events.StepFinished)[num_learnt:]) == most_tokens


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_prompts_of_one_token_find_out_how_many_fit(max_in_flight: int, script_tokenizer: Tokenizer) -> None:
    """One row takes 11 ms: at the average cost of its tokens no second one would keep 25 ms, and eight do."""
    engine, runner, log = make_engine(script_tokenizer, target_itl_s=0.025, max_in_flight=max_in_flight)
    intake = Intake(script_tokenizer, generation_config={}, eos_token_ids=frozenset((2,)), vocab=VOCAB, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for number in range(40):
        engine.add(intake.request([10 + number], params, arrival_s=runner.now_s))
        if number == 0:
            for _ in range(5):
                engine.step()
    while engine.has_work:
        engine.step()
    finished = log.of(events.StepFinished)
    assert max(event.num_seqs for event in finished) >= 6
    assert max(event.bucket_tokens for event in finished) == 8
