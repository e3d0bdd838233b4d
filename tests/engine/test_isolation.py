"""What one caller does wrong, or leaves behind, stays with that caller: odd arguments, dropped streams, NaN, no memory."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import build, events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.config import MIB
from jaxpaged.errors import EngineDeadError, InvalidRequestError, MemoryBudgetError, QueueFullError
from jaxpaged.kv_cache import CacheShape, make_cache
from jaxpaged.llm import LLM
from jaxpaged.request import FinishReason, SamplingParams
from pallas_kernels.kv_write import kv_write
from tests.engine.async_bench import params, run
from tests.event_log import EventLog
from tests.fakes import Bench, FailingRunner
from tests.tiny_engine import start_tiny, tiny_config
from tests.tiny_model import save_safetensors, tiny_weights, write_tiny_llama

pytestmark = pytest.mark.jax

BAD_ID = 300


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, programs: Path) -> Iterator[LLM]:
    with LLM(config=tiny_config(tiny_folder, programs=programs, max_num_queued_requests=3), sinks=[]) as llm:
        yield llm


@pytest.mark.parametrize(("value", "max_in_flight"), [(np.nan, 1), (np.inf, 2)])
def test_pages_that_a_nan_has_spoiled_are_never_found_by_others(tmp_path: Path, programs: Path, value: float, max_in_flight: int) -> None:
    """The NaN comes amid a chunk of a prompt, is seen with its last, and would reach earlier positions of its step."""
    tensors = write_tiny_llama(tmp_path)
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[BAD_ID] = value
    head = tiny_weights()["lm_head.weight"]
    save_safetensors(tmp_path / "model.safetensors", tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head})
    engine, intake = start_tiny(tmp_path, programs=programs, token_buckets=(16,), max_num_batched_tokens=16)
    bench = Bench(engine.runner, intake.tokenizer, max_in_flight=max_in_flight)
    system = [10 + index % 200 for index in range(40)]
    expected = bench.ask([*system, 7, 8, 9], max_tokens=4, ignore_eos=True).outputs[0].token_ids
    bench.engine.reset_prefix_cache()
    bad = bench.ask([*system, BAD_ID, *[20] * 60], max_tokens=4)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    good = bench.ask([*system, 7, 8, 9], max_tokens=4, ignore_eos=True)
    assert (good.error, good.outputs[0].token_ids) == (None, expected)
    bench.after_check()
    engine.close()


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = llm.stream("hello", params(100))
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    update = llm.engine.scheduler.update

    def collect(*args: Any) -> Any:
        finished = update(*args)
        gc.collect()
        return finished

    monkeypatch.setattr(llm.engine.scheduler, "update", collect)
    gc.disable()
    try:
        del stream, cycle
        assert len(llm.generate("other", params(5))[0].outputs[0].token_ids) == 5
    finally:
        gc.enable()
    assert llm.engine.num_unfinished == 0
    assert llm._turns.mail == {}


def test_a_queue_that_is_full_refuses_the_whole_call(llm: LLM) -> None:
    with pytest.raises(QueueFullError, match="max_num_queued_requests is 3"):
        llm.generate(["a"] * 10, params(3))
    assert llm.engine.num_unfinished == 0
    assert len(llm.generate(["a"] * 3, params(3))) == 3


def test_integers_of_numpy_are_one_prompt(llm: LLM) -> None:
    (one,) = llm.generate([np.int64(4), np.int32(5)], params(3))  # type: ignore[list-item]
    assert one.prompt_token_ids == [4, 5]
    with pytest.raises(InvalidRequestError, match="SamplingParams or a list, got int"):
        llm.generate("a", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"stream_interval": None}, {"n": None}, {"output_kind": "delta"}])
def test_fields_that_would_fail_on_the_engine_thread_are_refused_before(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        SamplingParams(**fields)


@pytest.mark.parametrize("request_id", [["a"], 5, "", "x" * 2000])
def test_a_request_id_that_is_no_short_text_is_refused(llm: LLM, request_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request_id must be a text"):
        llm._intake.request("a", None, arrival_s=0.0, request_id=request_id)


def test_who_waits_is_told_even_if_the_books_of_a_dead_engine_are_wrong(
    tiny_folder: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("wrong books")

    log = EventLog()
    with AsyncLLM(config=tiny_config(tiny_folder, programs=programs), sinks=[log]) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.scheduler, "finish", fail)
            patch.setattr(llm._engine, "runner", FailingRunner(llm._engine.runner, before=fail))

            async def work() -> None:
                results = await asyncio.gather(*(llm.generate("hello", params()) for _ in range(3)), return_exceptions=True)
                assert [type(result) for result in results] == [EngineDeadError] * 3

            run(work)
        assert llm._thread.is_alive
    assert len(log.of(events.EngineStopped)) == 1


@pytest.mark.parametrize(
    ("tells_memory", "sentence"),
    [
        (True, r"the page pool does not fit: .* with one of these it fits: --cache\.memory \d+MiB"),
        (False, r"not enough memory .* lower cache\.memory"),
    ],
    ids=["planned", "tried"],
)
def test_no_memory_on_the_device_is_a_sentence(
    tiny_folder: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, tells_memory: bool, sentence: str
) -> None:
    if not tells_memory:
        monkeypatch.setattr(build, "room_here", lambda: None)
    with pytest.raises(MemoryBudgetError, match=sentence):
        LLM(config=tiny_config(tiny_folder, programs=programs, memory=2**30 * MIB), sinks=[])


@pytest.mark.parametrize(("name", "limit"), [("float16", 65504.0), ("float8_e4m3fn", 448.0)])
def test_keys_too_large_for_the_pools_type_are_its_largest_number(name: str, limit: float) -> None:
    cache = make_cache(CacheShape(1, 1, 2, 4, jnp.dtype(name)), 2)
    new = jnp.asarray([[[1e6, -1e6]]], jnp.bfloat16)
    written = kv_write(new, new, new, *cache, jnp.asarray([1], jnp.int32), jnp.asarray([2], jnp.int32), layer=jnp.int32(0))
    assert np.asarray(written.k_pages[0, 1, 0, 2], np.float32).tolist() == [limit, -limit]
