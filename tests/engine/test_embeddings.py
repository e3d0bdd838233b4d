"""Embeddings: what numpy says, in any company, in chunks, over preemptions and beside answers; and nothing is compiled for them."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.beam_search import BeamSearchParams
from jaxpaged.embeddings import EmbeddingRequestOutput, embedding_of
from jaxpaged.errors import ContextLengthError, EnginePausedError, InvalidRequestError, RequestFailedError
from jaxpaged.llm import LLM
from jaxpaged.programs import COMPILE_EVENT
from jaxpaged.request import FinishReason, Pooling, SamplingParams
from jaxpaged.start import Started
from tests.engine.async_bench import is_idle, params, run, wait_until
from tests.engine.conftest import tiny_bench
from tests.fakes import Bench
from tests.models import numpy_llama
from tests.tiny_engine import start_tiny, tiny_config
from tests.tiny_model import save_safetensors, tiny_weights, write_tiny_llama

pytestmark = pytest.mark.jax

TOLERANCE = 2e-5
"""Of sums in float32, in another order; the numbers are about 1."""


@cache
def hidden_states(token_ids: tuple[int, ...]) -> np.ndarray:
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "theta": 10_000.0}
    return numpy_llama.hidden_states(tiny_weights(has_head=False), token_ids, windows=(None, None), **shape)


def expected(token_ids: Sequence[int], pooling: Pooling) -> np.ndarray:
    hidden = hidden_states(tuple(token_ids))
    return np.asarray(hidden.mean(0) if pooling == "mean" else hidden[-1])


def prompt_of(index: int, length: int) -> list[int]:
    """Even ones begin alike."""
    return [3 + (position * 7 + (0 if index % 2 == 0 else index * 31)) % 380 for position in range(length - 1)] + [5 + index]


def add(bench: Bench, prompt: list[int], pooling: Pooling) -> str:
    request = bench.intake.embedding_request(prompt, pooling, arrival_s=bench.engine.clocks.monotonic())
    bench.engine.add(request)
    return request.request_id


def check(bench: Bench, request_id: str, prompt: list[int], pooling: Pooling) -> None:
    output = bench.last[request_id]
    assert output.pooled is not None
    np.testing.assert_allclose(output.pooled, expected(prompt, pooling), rtol=0, atol=TOLERANCE)
    if pooling == "mean":
        assert output.num_cached_tokens == 0


WORK: list[tuple[list[int], Pooling]] = [
    (prompt_of(index, length), "last" if index % 3 == 2 else "mean")
    for index, length in enumerate((1, 2, 3, 15, 16, 17, 31, 33, 40, 63, 64, 65, 70, 90, 100, 127, 130, 16, 48, 5))
]


@pytest.mark.parametrize("budget", [64, 16])
@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.usefixtures("in_flight")
def test_any_company_gives_what_numpy_says(tiny: Started, rows: int, budget: int) -> None:
    """Prompts of 1 to 130 tokens, whole and in chunks, beside answers that are what they are alone."""
    bench = tiny_bench(tiny, max_num_seqs=rows, max_num_batched_tokens=budget)
    rng = random.Random(rows + budget)
    alone = bench.ask(prompt_of(4, 50), max_tokens=12, ignore_eos=True).outputs[0].token_ids
    waiting = rng.sample(WORK, len(WORK))
    added: dict[str, tuple[list[int], Pooling]] = {}
    answers = []
    while waiting or bench.engine.has_work:
        for _ in range(min(rng.choice((0, 1, 8)), len(waiting))):
            prompt, pooling = waiting.pop()
            added[add(bench, prompt, pooling)] = prompt, pooling
            if len(added) % 5 == 0:
                answers.append(bench.add(prompt_of(4, 50), max_tokens=12, ignore_eos=True))
        bench.step()
    for request_id, (prompt, pooling) in added.items():
        check(bench, request_id, prompt, pooling)
    assert all(bench.ids(request_id) == alone for request_id in answers)
    assert max(event.num_seqs for event in bench.events.of(events.StepFinished)) >= min(rows, 2 + budget // 16)
    bench.after_check()
    assert tiny.engine.runner.num_compiled_while_running == 0  # type: ignore[attr-defined]


def test_preempted_prompts_are_added_up_from_their_beginnings(tiny: Started) -> None:
    """Pages are taken in the middle of prompts; what was computed of them is in the prefix cache, and is computed again."""
    bench = tiny_bench(tiny, max_num_batched_tokens=16)
    rng = random.Random(3)
    added = {add(bench, prompt, pooling): (prompt, pooling) for prompt, pooling in rng.sample(WORK, len(WORK))}
    lost = []
    while bench.engine.has_work:
        bench.step()
        scheduler = bench.engine.scheduler
        if rng.random() < 0.5 and scheduler.num_running:
            lost.append(scheduler.sequences[scheduler.num_running - 1].num_computed_tokens)
            bench.evict()
    assert sum(number >= 16 for number in lost) > 5
    for request_id, (prompt, pooling) in added.items():
        check(bench, request_id, prompt, pooling)
    bench.after_check()


def test_a_small_pool_preempts_by_itself(tiny: Started) -> None:
    bench = tiny_bench(tiny, num_pages=14, max_num_batched_tokens=64)
    answers = [bench.add(prompt_of(index, 20), max_tokens=60, ignore_eos=True) for index in range(4)]
    added = {add(bench, prompt, pooling): (prompt, pooling) for prompt, pooling in WORK}
    bench.run()
    for request_id, (prompt, pooling) in added.items():
        check(bench, request_id, prompt, pooling)
    assert all(len(bench.ids(request_id)) == 60 for request_id in answers)
    assert bench.events.of(events.RequestPreempted)
    bench.after_check()


def test_pages_are_found_where_only_the_last_token_counts(tiny: Started) -> None:
    """And a mean leaves its pages for others to find, but takes none."""
    bench = tiny_bench(tiny)
    prompt = prompt_of(1, 60)

    def ask(pooling: Pooling) -> int:
        request_id = add(bench, prompt, pooling)
        bench.run()
        check(bench, request_id, prompt, pooling)
        return bench.last[request_id].num_cached_tokens

    assert [ask("mean"), ask("last"), ask("mean"), ask("last")] == [0, 48, 0, 48]
    ends = bench.events.of(events.RequestFinished)[-4:]
    assert {(event.reason, event.num_prompt_tokens, event.num_output_tokens) for event in ends} == {("length", 60, 0)}
    assert bench.ask(prompt, max_tokens=1).num_cached_tokens == 48
    bench.after_check()


def test_an_abort_while_the_last_step_runs(tiny: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back belongs to nobody."""
    monkeypatch.setattr(Bench, "default_in_flight", 2)
    bench = tiny_bench(tiny)
    answer = bench.add(prompt_of(2, 20), max_tokens=10, ignore_eos=True)
    bench.step()
    request_id = add(bench, prompt_of(1, 20), "mean")
    bench.step()
    assert bench.engine.num_in_flight == 1
    assert bench.engine.scheduler.num_running == 2
    aborted = bench.abort(request_id)
    assert aborted is not None
    with pytest.raises(RequestFailedError, match="aborted"):
        embedding_of(aborted, normalize=True)
    bench.run()
    assert len(bench.ids(answer)) == 10
    bench.after_check()


def test_what_is_no_number_fails_alone(tmp_path: Path, programs: Path) -> None:
    """In the first chunk of a prompt or in its last; neighbours, and the next owner of the slot, never see it."""
    tensors = write_tiny_llama(tmp_path)
    bad_id = 301
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[bad_id] = np.nan
    head = tiny_weights()["lm_head.weight"]
    save_safetensors(tmp_path / "model.safetensors", tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head})
    engine, intake = start_tiny(tmp_path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    bench = Bench(engine.runner, intake.tokenizer, max_in_flight=2)
    good = prompt_of(1, 50)
    for pooling in ("mean", "last"):
        for bad in ([bad_id, *good], [*good, bad_id]):
            failing, fine = add(bench, bad, pooling), add(bench, good, pooling)  # type: ignore[arg-type]
            bench.run()
            assert bench.last[failing].outputs[0].finish_reason is FinishReason.ERROR
            with pytest.raises(RequestFailedError, match="NaN"):
                embedding_of(bench.last[failing], normalize=True)
            check(bench, fine, good, pooling)  # type: ignore[arg-type]
    bench.after_check()
    engine.close()


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, programs: Path) -> Iterator[LLM]:
    with LLM(config=tiny_config(tiny_folder, programs=programs), sinks=[]) as llm:
        yield llm


def test_llm_gives_vectors_in_order(llm: LLM) -> None:
    prompts = [prompt_of(index, length) for index, length in enumerate((70, 3, 130, 1))]
    for pooling in ("mean", "last"):
        outputs = llm.embed(prompts, pooling=pooling, normalize=False)  # type: ignore[arg-type]
        assert all(type(output) is EmbeddingRequestOutput and output.finished for output in outputs)
        assert [output.prompt_token_ids for output in outputs] == prompts
        for prompt, output in zip(prompts, outputs, strict=True):
            vector = expected(prompt, pooling)  # type: ignore[arg-type]
            np.testing.assert_allclose(output.outputs.embedding, vector, rtol=0, atol=TOLERANCE)
            (unit,) = llm.embed(prompt, pooling=pooling, use_tqdm=False)  # type: ignore[arg-type]
            assert np.linalg.norm(unit.outputs.embedding) == pytest.approx(1.0)
            np.testing.assert_allclose(unit.outputs.embedding, vector / np.linalg.norm(vector), rtol=0, atol=TOLERANCE)
            assert unit.outputs.hidden_size == 64
    (of_text,) = llm.embed("hello")
    assert of_text.prompt_token_ids == llm.get_tokenizer().encode("hello")


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_refused(llm: LLM) -> None:
    for arguments, param in (({"pooling": "max"}, "pooling"), ({"pooling": None}, "pooling"), ({"normalize": 1}, "normalize")):
        with pytest.raises(InvalidRequestError, match=param) as error:
            llm.embed("hello", **arguments)  # type: ignore[arg-type]
        assert error.value.param == param
    with pytest.raises(ContextLengthError, match="prompt 1: "):
        llm.embed(["hello", [5] * 512])
    assert llm.engine.num_unfinished == 0
    llm.pause()
    with pytest.raises(EnginePausedError):
        llm.embed("hello")
    llm.resume()
    assert len(llm.embed([5] * 511)) == 1


def test_async_embeddings(async_llm: AsyncLLM) -> None:
    """Side by side with an answer; a task that leaves takes its request along."""

    async def work() -> None:
        asked = [async_llm.embed(prompt, pooling=pooling, normalize=False) for prompt, pooling in WORK]
        answer, *outputs = await asyncio.gather(async_llm.generate("hello", params()), *asked)
        for (prompt, pooling), output in zip(WORK, outputs, strict=True):
            np.testing.assert_allclose(output.outputs.embedding, expected(prompt, pooling), rtol=0, atol=TOLERANCE)
        assert len(answer.outputs[0].token_ids) == 10
        with pytest.raises(ContextLengthError):
            await async_llm.embed([5] * 600)
        await async_llm.pause("keep")
        task = asyncio.ensure_future(async_llm.embed([7] * 300, request_id="left"))
        await wait_until(lambda: "left" in async_llm._engine.unfinished_ids)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stopped = asyncio.ensure_future(async_llm.embed([7] * 300, request_id="stopped"))
        await wait_until(lambda: "stopped" in async_llm._engine.unfinished_ids)
        async_llm.abort("stopped")
        with pytest.raises(RequestFailedError, match="aborted"):
            await stopped
        await async_llm.resume()
        await wait_until(lambda: is_idle(async_llm))

    run(work)


def test_nothing_is_compiled_for_any_of_them(llm: LLM) -> None:
    """One call of each kind, by the backend or eagerly, on whatever thread."""
    compiled: list[str] = []

    def on_duration(event: str, seconds: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        llm.embed([prompt_of(1, 100), prompt_of(2, 5)])
        llm.embed(prompt_of(3, 100), pooling="last", normalize=False)
        llm.beam_search(prompt_of(4, 20), BeamSearchParams(beam_width=10, max_tokens=4))
        llm.generate(prompt_of(5, 20), SamplingParams(temperature=1.0, logprobs=3, max_tokens=3))
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
    assert compiled == []
