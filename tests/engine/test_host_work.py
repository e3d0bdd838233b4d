"""What the host does for a step, by counts: nothing for each token, one blob, and text while the next step runs."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest

import jaxpaged
from jaxpaged.batch import BatchLayout
from jaxpaged.logprobs import StepResult
from jaxpaged.open_requests import OpenRequests
from jaxpaged.step_program import DeviceState
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, ScriptRunner, free_talk
from tests.tiny_engine import start_tiny

pytestmark = pytest.mark.jax

PACKAGE = str(Path(jaxpaged.__file__).parent)
PAGE_SIZE = 64


class PlainRunner(ScriptRunner):
    """Takes any step at its word, and notes when it is handed over and when its ids are waited for."""

    def __init__(self, vocab: int) -> None:
        limits = {"max_model_len": 2048, "max_num_batched_tokens": 1024}
        super().__init__(free_talk(60), vocab=vocab, page_size=PAGE_SIZE, keeps_histories=False, **limits)
        self.order: list[tuple[str, int]] = []
        self.blobs: list[Any] = []

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        number = len(self.blobs)
        self.blobs.append(blob)
        self.order.append(("run", number))
        order, result = self.order, super().run(layout, blob)

        class Noted(StepResult):
            def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
                order.append(("wait", number))
                return super().__array__(dtype, copy)

        return Noted(*result)


def lines_of_a_step(tokenizer: Tokenizer, num_prompt: int) -> int:
    """Lines of our own Python that run for the whole of a step that computes a prompt at once: scheduled, packed, taken in, told."""
    one = Bench(PlainRunner(tokenizer.vocab_size), tokenizer, max_in_flight=1, enable_prefix_caching=False, canary_tokens=1)
    one.add([4 + index % 50 for index in range(num_prompt)], max_tokens=4, ignore_eos=True)
    num_lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        one.engine.step()
    finally:
        sys.settrace(before)
    return num_lines


def test_no_line_runs_for_each_token(script_tokenizer: Tokenizer) -> None:
    """Of 800 tokens more, only their pages are worth anything: a few lines for each of 13."""
    few, many = (lines_of_a_step(script_tokenizer, num_prompt) for num_prompt in (100, 900))
    assert few > 100
    assert many - few < 30 * 800 // PAGE_SIZE < 800


def test_text_is_made_while_the_next_step_runs(script_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PlainRunner(script_tokenizer.vocab_size)
    one = Bench(runner, script_tokenizer, max_in_flight=2, canary_tokens=1)
    runner.order.clear()
    first = len(runner.blobs)
    take_tokens = OpenRequests.take_tokens

    def noted(self: OpenRequests, rows: Any, logprobs: Any) -> None:
        runner.order.append(("text", sum(1 for what, _ in runner.order if what == "text") + first))
        take_tokens(self, rows, logprobs)

    monkeypatch.setattr(OpenRequests, "take_tokens", noted)
    one.add([5, 6, 7], max_tokens=4, ignore_eos=True)
    one.run()
    plain = [(what, number - first) for what, number in runner.order]
    ahead = [[("run", number + 1), ("wait", number), ("text", number)] for number in range(3)]
    assert plain == [("run", 0), *(entry for entries in ahead for entry in entries), ("wait", 3), ("text", 3)]


def test_a_program_is_handed_leaves_a_state_and_one_blob(tiny_folder: Path, programs: Path) -> None:
    """A flat tuple, whose structure takes JAX no time to walk; and of what changes, one array of integers."""
    started = start_tiny(tiny_folder, programs=programs, quantization="int8", token_buckets=(16,), max_num_batched_tokens=16)
    runner: Any = started.engine.runner
    seen = []

    def watched(program: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(args)
            return program(*args)

        return run

    runner.programs = {layout: watched(program) for layout, program in runner.programs.items()}
    try:
        started.engine.probe()
        ((params, state, blob),) = seen
        assert type(params) is tuple
        assert all(isinstance(leaf, jax.Array) for leaf in params)
        assert isinstance(state, DeviceState)
        assert (type(blob), blob.dtype, blob.ndim) == (np.ndarray, np.dtype(np.int32), 1)
    finally:
        started.engine.close()
