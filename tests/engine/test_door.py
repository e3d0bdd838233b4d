"""The door: requests that are refused, aborted or left before the engine has them, and ids that belong to others."""

import asyncio
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.async_llm import AsyncLLM
from jaxpaged.errors import ContextLengthError, InvalidRequestError, QueueFullError
from jaxpaged.intake import Intake
from jaxpaged.llm import LLM
from jaxpaged.request import FinishReason, SamplingParams
from jaxpaged.start import Started
from jaxpaged.tokenizer import RenderedChat, Tokenizer
from tests.engine.async_bench import TIMEOUT_S, is_idle, params, run, slow_down, wait_until
from tests.event_log import EventLog
from tests.text.vocabularies import byte_level

pytestmark = pytest.mark.jax

LONG = params(400)


class SlowTokenizing:
    """`Tokenizer.encode` of one text waits to be let go."""

    def __init__(self, patch: pytest.MonkeyPatch, text: str) -> None:
        self.begun, self.may_go = threading.Event(), threading.Event()
        encode = Tokenizer.encode

        def slow(tokenizer: Tokenizer, given: str, *args: Any) -> list[int]:
            if given == text:
                self.begun.set()
                assert self.may_go.wait(TIMEOUT_S)
            return encode(tokenizer, given, *args)

        patch.setattr(Tokenizer, "encode", slow)


def test_an_abort_reaches_a_request_that_is_being_tokenized(
    async_llm: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTokenizing(monkeypatch, "slow")

    async def work() -> None:
        task = asyncio.ensure_future(async_llm.generate("slow", LONG, "mine")._last())
        other = asyncio.ensure_future(async_llm.generate("hello", params(3), "other")._last())
        await wait_until(slow.begun.is_set)
        async_llm.abort("mine")
        async_llm.abort("mine")
        async_llm.abort("nobody")
        slow.may_go.set()
        output = await task
        assert (output.outputs[0].finish_reason, output.finished) == (FinishReason.ABORT, True)
        assert (await other).outputs[0].finish_reason is FinishReason.LENGTH
        # The id is free again, and the abort is used up.
        assert len((await async_llm.generate("slow", params(3), "mine")).outputs[0].token_ids) == 3
        assert async_llm._thread._arrivals == []

    run(work)
    reasons = {event.reason: event.request_id for event in async_log.of(events.RequestFinished)}
    assert reasons["abort"] == "mine"


def test_who_leaves_while_tokenizing_leaves_nothing(async_llm: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowTokenizing(monkeypatch, "slow")

    async def work() -> None:
        task = asyncio.ensure_future(async_llm.generate("slow", LONG, "mine")._last())
        await wait_until(slow.begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.may_go.set()
        assert async_llm._thread._arrivals == []
        await async_llm.generate("hello", params(2))

    run(work)
    assert len(async_log.of(events.RequestReceived)) == 1


def test_a_loop_that_closes_without_a_word_leaves_nothing_running(
    async_llm: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task is ended and no iteration is closed: the engine sees that nobody can read any more."""
    slow_down(async_llm, monkeypatch, 0.05)
    loop = asyncio.new_event_loop()
    stream = async_llm.stream("hello", LONG)
    loop.run_until_complete(anext(stream))  # type: ignore[arg-type]
    loop.close()
    deadline = time.monotonic() + TIMEOUT_S
    while not is_idle(async_llm):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (finished,) = async_log.of(events.RequestFinished)
    assert finished.reason == "abort"
    assert finished.num_output_tokens < 400
    del stream
    gc.collect()


@pytest.fixture
def llm(one_row_llm: LLM) -> LLM:
    return one_row_llm


@pytest.fixture
def log(one_row_log: EventLog) -> EventLog:
    return one_row_log


def refusals(log: EventLog) -> list[tuple[str, str]]:
    """(received, rejected) ids and codes; each refusal is a pair of events."""
    pairs = list(zip(log, log[1:], strict=False))
    rejected = log.of(events.RequestRejected)
    for event in rejected:
        assert any(isinstance(a, events.RequestReceived) and a.request_id == event.request_id and b is event for a, b in pairs)
    return [(event.request_id, event.code) for event in rejected]


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "invalid_value"),
    ([10**6], {}, "invalid_value"),
    ([5] * 70, {}, "context_length_exceeded"),
    ("x" * 10_000, {}, "context_length_exceeded"),
    ("a", {"stop_token_ids": [10**6]}, "invalid_value"),
    ({"prompt": "a", "cache_salt": ""}, {}, "invalid_value"),
]


@pytest.mark.parametrize(("prompt", "fields", "code"), BAD)
def test_every_refusal_is_an_event(llm: LLM, log: EventLog, prompt: Any, fields: dict[str, Any], code: str) -> None:
    bad = SamplingParams(max_tokens=3, **fields)
    log.clear()
    with pytest.raises(InvalidRequestError):
        llm.generate(["a", prompt, "b"], bad if not fields else [SamplingParams(), bad, SamplingParams()])
    assert [pair[1] for pair in refusals(log)] == [code]
    (output,) = llm.generate([prompt], bad, on_error="return")
    assert refusals(log)[1:] == [(output.request_id, code)]
    with pytest.raises(InvalidRequestError):
        next(llm.stream(prompt, bad))
    assert [pair[1] for pair in refusals(log)] == [code] * 3
    assert len({pair[0] for pair in refusals(log)}) == 3
    received, queued = log.of(events.RequestReceived), log.of(events.RequestQueued)
    assert len(received) == 3 + len(queued)


def test_a_full_queue_is_an_event_as_well(llm: LLM, log: EventLog) -> None:
    log.clear()
    with pytest.raises(QueueFullError):
        llm.generate(["a"] * 9, SamplingParams(max_tokens=2))
    assert [code for _, code in refusals(log)] == ["queue_full"]


def test_refusals_of_the_async_api_are_events(async_llm: AsyncLLM, async_log: EventLog) -> None:
    async def work() -> None:
        for prompt, request_id in (("", "mine"), ([10**6], None), ("a", "x" * 2000)):
            with pytest.raises(InvalidRequestError):
                await async_llm.generate(prompt, params(), request_id)
        await async_llm.generate("a", params(2))

    run(work)
    assert [code for _, code in refusals(async_log)] == ["invalid_value"] * 3
    ids = [request_id for request_id, _ in refusals(async_log)]
    assert ids[0] == "mine"
    assert all(request_id.startswith("req-") and len(request_id) < 20 for request_id in ids[1:])


def test_automatic_ids_are_nobody_elses(tiny: Started) -> None:
    intake = tiny.intake

    def request(request_id: str | None) -> str:
        return intake.request("a", None, arrival_s=0.0, request_id=request_id).request_id

    given = request(None)
    for taken in ("req-0", "req-2", "req-", "req", given.replace("req", "Req")):
        assert request(taken) == taken
    for reserved in (given, given.rsplit("-", 1)[0] + "-", given + "9"):
        with pytest.raises(InvalidRequestError, match="is given by this engine alone: choose another"):
            request(reserved)
    assert len({request(None) for _ in range(100)} | {given}) == 101
    assert intake.usable_id("mine") == "mine"
    for unusable in (None, "", 5, "x" * 2000):
        assert intake.usable_id(unusable).startswith(given.rsplit("-", 1)[0])


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized(
    tiny: Started, monkeypatch: pytest.MonkeyPatch, script_tokenizer: Tokenizer
) -> None:
    """No token of this vocabulary is longer than 13 bytes."""
    intake = Intake(script_tokenizer, generation_config={}, eos_token_ids=frozenset(), vocab=300, seed=0, max_model_len=100)
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(tokenizer: Tokenizer, text: str, *args: Any) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, *args)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    assert script_tokenizer.max_bytes_per_token == 13
    for text in ("x" * (99 * 13 + 1), "é" * 650, "x" * 50_000_000):
        with pytest.raises(ContextLengthError, match=rf"has {len(text.encode())} bytes, .* longer than 13 bytes, and the context has 100"):
            intake.request(text, None, arrival_s=0.0)
    assert encoded == []
    # What may fit is tokenized, and judged by its tokens.
    text = "<|endoftext|>" * 99
    assert len(intake.request(text, None, arrival_s=0.0).prompt_token_ids) == 99
    assert encoded == [len(text)]
    with pytest.raises(InvalidRequestError, match="surrogate"):
        intake.request("x" * 2000 + "\ud800", None, arrival_s=0.0)


def test_a_conversation_that_is_too_long_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level("{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}")
    intake = Intake(tokenizer, generation_config={}, eos_token_ids=frozenset(), vocab=300, seed=0, max_model_len=100)
    longest = tokenizer.max_bytes_per_token
    assert longest is not None
    encoded = 0
    encode = Tokenizer.encode_chat

    def counting(tokenizer: Tokenizer, rendered: RenderedChat) -> list[int]:
        nonlocal encoded
        encoded += 1
        return encode(tokenizer, rendered)

    monkeypatch.setattr(Tokenizer, "encode_chat", counting)
    text = "x" * 99 * longest
    for content in (
        text + "x",
        [{"type": "text", "text": text}, "x"],
        "x" * 15_000_000,
        "<|im_end|>" * 10 * longest + text,
        [text, "<|im_end|>"],
    ):
        with pytest.raises(ContextLengthError, match="at least [0-9]+ tokens since none is longer") as caught:
            intake.chat_prompt([{"role": "user", "content": content}])
        assert caught.value.param == "messages"
    assert encoded == 0
    with pytest.raises(InvalidRequestError, match="surrogate"):
        intake.chat_prompt([{"role": "user", "content": "\ud800"}])
    intake.chat_prompt([{"role": "user", "content": "x" * 40}, {"role": "user", "content": "<|im_end|>"}])
    assert encoded == 1


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("num_presses", [1, 2])
def test_ctrl_c_while_closing(mortal: AsyncLLM, async_log: EventLog, monkeypatch: pytest.MonkeyPatch, num_presses: int) -> None:
    """Once: it closes first. Twice: it goes at once, and a second call closes what is left."""
    release = threading.Event()
    close = mortal._engine.close

    is_begun = threading.Event()

    def slow_close() -> None:
        is_begun.set()
        assert release.wait(TIMEOUT_S)
        close()

    def press() -> None:
        assert is_begun.wait(TIMEOUT_S)
        for _ in range(num_presses):
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        if num_presses == 1:
            time.sleep(0.05)
            release.set()

    monkeypatch.setattr(mortal._engine, "close", slow_close)
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        mortal.close()
    presser.join()
    assert mortal._is_closed == (num_presses == 1)
    assert mortal._thread.is_alive == (num_presses == 2)
    release.set()
    mortal.close()
    assert mortal._is_closed
    assert not mortal._thread.is_alive
    assert isinstance(async_log[-1], events.EngineStopped)
