"""`LLM` as a user meets it: what goes in, what comes out, what is refused, and what happens when it is left early."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged import events
from jaxpaged.config import Config
from jaxpaged.errors import ChatTemplateError, ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, PoolTooSmallError
from jaxpaged.llm import LLM
from jaxpaged.request import FinishReason, RequestOutput, RequestOutputKind, SamplingParams
from tests.event_log import EventLog
from tests.tiny_engine import tiny_config
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def log() -> EventLog:
    return EventLog()


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, programs: Path, log: EventLog) -> Iterator[LLM]:
    with LLM(config=tiny_config(tiny_folder, programs=programs), sinks=[log]) as llm:
        yield llm


@pytest.fixture
def calm(llm: LLM, log: EventLog) -> Iterator[LLM]:
    """The engine with nothing of earlier tests; afterwards nothing may be left, and every request has had its end."""
    log.clear()
    yield llm
    engine = llm.engine
    assert engine.num_unfinished == 0
    engine.scheduler.check()
    assert engine.pages.num_in_use == 0
    assert llm._turns.mail == {}
    finished = [event.request_id for event in log.of(events.RequestFinished)]
    assert sorted(finished) == sorted(event.request_id for event in log.of(events.RequestQueued))


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_order_is_kept_whatever_ends_first(calm: LLM) -> None:
    prompts = [f"prompt number {index}" for index in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + (index * 7) % 11, ignore_eos=True) for index in range(12)]
    outputs = calm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [own.max_tokens for own in params]
    assert [calm.generate(prompt, own)[0].outputs[0].token_ids for prompt, own in zip(prompts, params, strict=True)] == [
        output.outputs[0].token_ids for output in outputs
    ]


def test_every_shape_of_prompts(calm: LLM) -> None:
    ids = calm.get_tokenizer().encode("hello there")
    one = texts(calm.generate("hello there", GREEDY))
    for single in (
        ids,
        tuple(ids),
        {"prompt": "hello there"},
        {"prompt_token_ids": ids},
        ["hello there"],
        [ids],
        [{"prompt_token_ids": ids}],
    ):
        assert texts(calm.generate(single, GREEDY)) == one
    assert texts(calm.generate(["hello there", ids, {"prompt": "hello there"}, [5]], GREEDY))[:3] == one * 3
    assert calm.generate([], GREEDY) == []
    output = calm.generate(ids, GREEDY)[0]
    assert (output.prompt, output.prompt_token_ids, output.finished, output.error) == (None, ids, True, None)


def test_parameters_are_one_for_all_or_one_each_or_the_models(calm: LLM) -> None:
    assert [
        len(output.outputs[0].token_ids) for output in calm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=3, ignore_eos=True)])
    ][1] == 3
    assert len(calm.generate(["a", "b", "c"], GREEDY)) == 3
    (output,) = calm.generate("a")
    assert len(output.outputs[0].token_ids) <= 16
    assert calm.get_default_sampling_params().temperature == 1.0
    with pytest.raises(InvalidRequestError, match="1 sampling_params for 2 prompts"):
        calm.generate(["a", "b"], [GREEDY])


BAD_PROMPTS = [
    ("", InvalidRequestError),
    ([3, 10**6], InvalidRequestError),
    ([5] * 512, ContextLengthError),
    ("\ud800", InvalidRequestError),
]


@pytest.mark.parametrize(("bad", "error"), BAD_PROMPTS)
def test_a_bad_prompt_refuses_the_call_before_any_work(calm: LLM, log: EventLog, bad: Any, error: type[ValueError]) -> None:
    with pytest.raises(ValueError, match=r"^prompt 2: ") as caught:
        calm.generate(["a", "b", bad, "c"], GREEDY)
    assert type(caught.value) is error
    # The refusal is noted; the others were not even received.
    assert [type(event) for event in log] == [events.RequestReceived, events.RequestRejected]
    with pytest.raises(error) as alone:
        calm.generate([bad], GREEDY)
    assert not str(alone.value).startswith("prompt 0")


def test_a_bad_prompt_can_be_returned_as_an_error(calm: LLM) -> None:
    prompts = ["a", "", "b", [5] * 600, {"prompt": "a"}]
    outputs = calm.generate(prompts, GREEDY, on_error="return")
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons[1] is reasons[3] is FinishReason.ERROR
    assert FinishReason.ERROR not in (reasons[0], reasons[2], reasons[4])
    assert texts(outputs)[0] == texts(outputs)[4] == texts(calm.generate("a", GREEDY))[0] != ""
    assert "empty" in (outputs[1].error or "")
    assert "600 tokens" in (outputs[3].error or "")
    assert len({output.request_id for output in outputs}) == 5


def test_on_error_is_one_of_two_words(calm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="on_error is 'raise' or 'return', got 'ignore'"):
        calm.generate("a", GREEDY, on_error="ignore")  # type: ignore[arg-type]


def test_a_prompt_larger_than_the_pool_is_named(tiny_folder: Path, programs: Path) -> None:
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    config = tiny_config(tiny_folder, programs=programs, memory=11 * page_bytes, token_buckets=(16,), max_num_batched_tokens=16)
    with LLM(config=config, sinks=[]) as llm, pytest.raises(PoolTooSmallError, match="prompt 1: The prompt has 200 tokens"):
        llm.generate(["a", [5] * 200], GREEDY)


def test_chat(calm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = calm.chat(conversation, GREEDY)
    assert one.prompt_token_ids == calm.get_tokenizer().apply_chat_template(conversation)
    several = calm.chat([conversation, [{"role": "user", "content": "And of Japan?"}]], GREEDY)
    assert texts(several)[0] == one.outputs[0].text
    # Without parameters an answer may go on to the end of the context.
    (long,) = calm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(long.outputs[0].token_ids) + len(long.prompt_token_ids) == 512
    for broken in ([{"role": "user"}], [{"content": 3, "role": "user"}], [3]):
        with pytest.raises(ChatTemplateError):
            calm.chat(broken, GREEDY)  # type: ignore[arg-type]


def test_a_bad_conversation_among_many(calm: LLM, log: EventLog) -> None:
    good, bad = [{"role": "user", "content": "hi"}], [{"role": "user"}]
    with pytest.raises(ChatTemplateError, match=r"^conversation 1: messages\[0\] \(role 'user'\) has no content"):
        calm.chat([good, bad], GREEDY)
    assert [type(event) for event in log] == [events.RequestReceived, events.RequestRejected]
    first, refused = calm.chat([good, bad], GREEDY, on_error="return")
    assert texts([first]) == texts(calm.chat(good, GREEDY))
    assert (refused.outputs[0].finish_reason, refused.error_code, refused.prompt_token_ids) == (FinishReason.ERROR, "invalid_messages", [])
    (long,) = calm.chat([[{"role": "user", "content": "x" * 10**6}]], GREEDY, on_error="return")
    assert "1000" in (long.error or "")
    with pytest.raises(ChatTemplateError, match="tokenize cannot be set"):
        calm.chat(good, GREEDY, chat_template_kwargs={"tokenize": False})
    text = calm.get_tokenizer().apply_chat_template(good, tokenize=False)
    assert "hi" in text
    assert calm.get_tokenizer().encode(text, add_special_tokens=False) == calm.get_tokenizer().apply_chat_template(good)


def test_a_prompt_object_may_hold_text_and_ids(calm: LLM) -> None:
    (alone,) = calm.generate([5, 6, 7], GREEDY)
    (both,) = calm.generate({"prompt": "said", "prompt_token_ids": np.array([5, 6, 7]), "multi_modal_data": None}, GREEDY)
    assert (both.prompt, both.prompt_token_ids, texts([both])) == ("said", [5, 6, 7], texts([alone]))
    for wrong in ({"prompt": None}, {"prompt": 3, "prompt_token_ids": [5]}, {"prompt_token_ids": "5"}, {"prompt": "a", "images": []}, {}):
        with pytest.raises(InvalidRequestError, match="A prompt object holds"):
            calm.generate(wrong, GREEDY)


def test_a_stream_gives_what_generate_gives(calm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = list(calm.stream("hello", params))
    assert "".join(texts(outputs)) == texts(calm.generate("hello", params))[0]
    assert len(outputs) == 40
    assert [output.finished for output in outputs] == [False] * 39 + [True]
    with pytest.raises(InvalidRequestError, match="empty"):
        next(calm.stream("", params))


def test_a_stream_that_is_left_early_aborts(calm: LLM, log: EventLog) -> None:
    stream = calm.stream("hello", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert [event.reason for event in log.of(events.RequestFinished)] == ["abort"]
    for output in calm.stream("hello", SamplingParams(max_tokens=400, ignore_eos=True)):
        assert not output.finished
        break
    del output


def test_streams_and_calls_that_overlap_lose_nothing(calm: LLM) -> None:
    """Every step serves every open request: what it gives to others must reach them later."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = {prompt: texts(calm.generate(prompt, params))[0] for prompt in ("one", "two", "three")}
    first, second = calm.stream("one", params), calm.stream("two", params)
    got = {"one": texts([next(first)]), "two": texts([next(second)])}
    assert texts(calm.generate(["three"], params)) == [expected["three"]]
    got["two"] += texts(list(second))
    got["one"] += texts(list(first))
    assert {prompt: "".join(pieces) for prompt, pieces in got.items()} == {prompt: expected[prompt] for prompt in got}


def test_threads_take_turns(calm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompts = [f"thread {index}" for index in range(8)]
    expected = texts(calm.generate(prompts, params))
    got: dict[int, str] = {}

    def work(index: int) -> None:
        if index % 2:
            got[index] = "".join(texts(list(calm.stream(prompts[index], params))))
        else:
            got[index] = texts(calm.generate(prompts[index], params))[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[index] for index in range(8)] == expected


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_leaves_the_engine_whole(calm: LLM, log: EventLog) -> None:
    """Ctrl-C wherever it falls: what was asked is aborted, and the next call answers as always."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    expected = texts(calm.generate("hello", params))
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    for delay_ms in range(1, 40, 3):
        log.clear()
        timer = threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                calm.generate(["one", "two", "three"], long)
        timer.join()
        assert calm.engine.num_unfinished == 0
        calm.engine.scheduler.check()
        assert texts(calm.generate("hello", params)) == expected


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_ends_a_stream(calm: LLM, log: EventLog) -> None:
    for delay_ms in range(1, 12, 2):
        log.clear()
        timer = threading.Timer(delay_ms / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            stream = None
            timer.start()
            while True:
                stream = calm.stream("one", SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
                list(stream)
        timer.join()
        del stream
        assert calm.engine.num_unfinished == 0
    assert texts(list(calm.stream("hello", GREEDY))) != []


def test_another_meaning_of_ctrl_c_is_kept(calm: LLM) -> None:
    """A program that notes the signal itself goes on to do so."""
    noted = []
    before = signal.signal(signal.SIGINT, lambda *_: noted.append(1))
    try:
        stream = calm.stream("hello", GREEDY)
        next(stream)
        os.kill(os.getpid(), signal.SIGINT)
        assert len(list(stream)) == 5
        assert noted == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_metrics_add_up(calm: LLM) -> None:
    def counters() -> dict[tuple[str, str], float]:
        return {(metric.name, metric.labels.get("reason", "")): metric.value for metric in calm.get_metrics() if metric.kind == "counter"}

    before = counters()
    outputs = calm.generate(["a b c", "d e f"], SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True))
    next(calm.stream("a", GREEDY))
    growth = {key: value - before.get(key, 0) for key, value in counters().items() if value != before.get(key, 0)}
    assert growth["jaxpaged_requests_received_total", ""] == growth["jaxpaged_requests_queued_total", ""] == 3
    assert growth["jaxpaged_requests_finished_total", "length"] == 2
    assert growth["jaxpaged_requests_finished_total", "abort"] == 1
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs) + len(calm.get_tokenizer().encode("a"))
    assert growth["jaxpaged_prompt_tokens_total", ""] == num_prompt
    assert growth["jaxpaged_generation_tokens_total", ""] == 14 + 1
    assert growth["jaxpaged_prefix_cache_queries_total", ""] == num_prompt
    assert not {name for name, _ in growth} & {"jaxpaged_preemptions_total", "jaxpaged_prefill_recompute_tokens_total"}
    gauges = {metric.name: metric.value for metric in calm.get_metrics() if metric.kind == "gauge"}
    assert {"jaxpaged_num_requests_running", "jaxpaged_num_requests_waiting", "jaxpaged_kv_cache_usage_ratio"} <= set(gauges)


def test_times_and_counts_of_a_request(calm: LLM) -> None:
    calm.reset_prefix_cache()
    prompt = list(range(5, 45))
    first, second = (calm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    calm.reset_prefix_cache()
    assert calm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    metrics = first.metrics
    times = [
        metrics.arrival_s,
        metrics.queued_s,
        metrics.first_scheduled_s,
        metrics.first_token_s,
        metrics.last_token_s,
        metrics.finished_s,
    ]
    assert times == sorted(time for time in times if time is not None)
    assert metrics.num_output_tokens == len(first.outputs[0].token_ids)
    several = calm.generate(prompt, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True))[0]
    assert several.metrics.num_output_tokens == 12


def test_a_closed_one_says_so(tiny_folder: Path, programs: Path) -> None:
    llm = LLM(config=tiny_config(tiny_folder, programs=programs), sinks=[])
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.pause("keep")
    for _ in range(sum(map(len, llm._turns.mail.values()))):
        next(stream)
    closer = threading.Timer(0.05, llm.close)
    closer.start()
    with pytest.raises(EngineDeadError, match="closed"):
        next(stream)  # waits for somebody to resume
    closer.join()
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: next(llm.stream("a"))):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_options_are_a_tree_or_arguments(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        LLM(str(tiny_folder), config=Config())
    with pytest.raises(ConfigError, match="max_model_length.*max_model_len"):
        LLM(str(tiny_folder), max_model_length=5)


def test_keyword_arguments_carry_vllms_names(tmp_path: Path, programs: Path) -> None:
    """And the model's generation config gives the sampling values that are not set."""
    write_tiny_llama(tmp_path, generation_config={"temperature": 0.6, "top_p": 0.9, "top_k": 20})
    log = EventLog()
    with LLM(
        str(tmp_path),
        sinks=[log],
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
        block_size=8,
        kv_cache_memory_bytes=2**20,
        seed=7,
        compilation={"token_buckets": (16,), "cache_dir": str(programs)},
    ) as llm:
        (ready,) = log.of(events.EngineStarted)
        assert (ready.max_model_len, ready.max_num_seqs, ready.page_size) == (64, 4, 8)
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.6, 0.9, 20, 0.0)
        for _ in range(2):
            assert llm.generate([5] * 30, GREEDY)[0].num_cached_tokens == 0


def test_generate_ignores_the_kind_of_output_asked_for(calm: LLM) -> None:
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0.0, max_tokens=6, output_kind=kind)
        assert texts(calm.generate("hello", params)) == texts(calm.generate("hello", GREEDY))
