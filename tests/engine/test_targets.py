"""Targets for times: the engine measures its steps and tells the scheduler, which makes them smaller."""

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
from tests.fakes import EventLog, ScriptRunner, free_talk

pytestmark = pytest.mark.jax

VOCAB = 259


class TimedRunner(ScriptRunner):
    """Each step takes 10 ms and 1 ms for each token, padding included, on a clock of its own."""

    now_s = 0.0

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`."""
        self.now_s += 0.01 + 0.001 * layout.num_tokens
        return super().run(layout, blob)


@pytest.mark.parametrize(("target_itl_s", "most_tokens"), [(None, 256), (0.1, 64), (0.05, 32)])
def test_steps_become_as_short_as_the_target(target_itl_s: float | None, most_tokens: int, script_tokenizer: Tokenizer) -> None:
    """Prompts beside a running answer fill steps of 256 tokens, and with a target the largest bucket that keeps it."""
    runner = TimedRunner(free_talk(VOCAB, avoid=(2,)), vocab=VOCAB, num_pages=400, max_num_batched_tokens=256)
    log = EventLog()
    clocks = Clocks(monotonic=lambda: runner.now_s, wall=lambda: runner.now_s)
    policy = SchedulerConfig(target_itl_s=target_itl_s)
    engine = Engine(runner, script_tokenizer, policy=policy, sink=log, clocks=clocks)
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
