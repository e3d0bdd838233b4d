"""A body of many prompts on a server whose queue is short: what fits the limits of a request is served, others are not harmed."""

import asyncio
import threading
from typing import Any

import pytest

from jaxpaged import events
from jaxpaged.config import Config, LogConfig, SchedulerConfig
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import FailingRunner
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker

pytestmark = pytest.mark.jax


def short_queue(**policy: Any) -> Config:
    return Config(log=LogConfig(level="error"), scheduler=SchedulerConfig(**policy))


MANY = [f"prompt {index}" for index in range(40)]


@pytest.mark.parametrize("policy", [{"max_num_queued_requests": 1}, {"max_num_queued_requests": 3}, {"max_num_queued_tokens": 20}])
def test_a_body_of_many_prompts_is_served(chat_tokenizer: Tokenizer, policy: dict[str, int]) -> None:
    with live_server(chat_tokenizer, config=short_queue(**policy)) as server:
        alone = [server.complete(prompt).text for prompt in MANY]
        assert server.complete(MANY).texts == alone
        assert server.complete(MANY, stream=True).texts == alone
        assert len(server.post("/v1/embeddings", {"input": MANY}).json["data"]) == len(MANY)
        scored = server.post("/v1/score", {"prompt": "x", "continuation": MANY}).json["data"]
        assert [item["index"] for item in scored] == list(range(len(MANY)))
        assert [event.num_waiting for event in server.log.of(events.RequestQueued) if event.num_waiting > 7] == []
        assert server.log.of(events.RequestRejected) == []


def begin(server: LiveServer, prompts: list[str], max_tokens: int) -> Any:
    """A stream of many prompts whose first token is there."""
    body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    return server.stream_until("/v1/completions", body, lambda seen: b"data: " in seen)


def test_a_client_that_leaves_takes_those_that_wait_before_the_queue(chat_tokenizer: Tokenizer) -> None:
    runner = slowed(talker(chat_tokenizer), 0.002)
    with live_server(chat_tokenizer, runner, short_queue(max_num_queued_requests=1)) as server:
        client = begin(server, MANY, 200)
        held = server.engine._thread.held
        wait_until(lambda: len(held) > 20)
        client.close()
        server.left()
        wait_until(lambda: not len(held) and not server.engine._engine.has_work)
        assert server.complete("after").status == 200


def test_who_comes_later_is_told_to_come_again(chat_tokenizer: Tokenizer) -> None:
    """Nothing is let in before those that came earlier; nor is a body whose first prompt finds no room."""
    runner = slowed(talker(chat_tokenizer), 0.002)
    with live_server(chat_tokenizer, runner, short_queue(max_num_queued_requests=2)) as server:
        client = begin(server, MANY, 200)
        wait_until(lambda: len(server.engine._thread.held) > 20)
        num_rejected = len(server.log.of(events.RequestRejected))
        assert server.complete("single").status == 429
        assert server.complete(MANY).status == 429
        assert server.post("/v1/embeddings", {"input": MANY}).status == 429
        # One of a body is refused in the engine's books, and the others never get there.
        assert len(server.log.of(events.RequestRejected)) == num_rejected + 3
        client.close()
        server.left()


@pytest.mark.parametrize("how", ["pause", "failure"])
def test_those_that_wait_are_told(chat_tokenizer: Tokenizer, how: str) -> None:
    """An operator's pause ends the body, and an engine that fails tells all of it."""
    gate = threading.Event()

    def before(step: int) -> None:
        if how == "failure" and step > 20:
            gate.wait(20)
            raise RuntimeError("the device is lost")

    runner = FailingRunner(talker(chat_tokenizer), before=before) if how == "failure" else slowed(talker(chat_tokenizer), 0.002)
    with live_server(chat_tokenizer, runner, short_queue(max_num_queued_requests=1)) as server:
        replies = []
        asking = threading.Thread(target=lambda: replies.append(server.complete(MANY, max_tokens=200, ignore_eos=True)))
        asking.start()
        wait_until(lambda: len(server.engine._thread.held) > 20)
        if how == "pause":
            asyncio.run(server.engine.pause("abort"))
            asyncio.run(server.engine.resume())
        gate.set()
        asking.join(20)
        assert (replies[0].status, replies[0].error["code"]) == (503, "request_aborted" if how == "pause" else "engine_dead")
        wait_until(lambda: not len(server.engine._thread.held))
        server.tracebacks.clear()
