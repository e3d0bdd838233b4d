"""Beam search over HTTP: what the engine's own search finds, in the bodies of both endpoints."""

import asyncio
import time
from typing import Any

import pytest

from jaxpaged.beam_search import BeamSearchOutput, BeamSearchParams
from jaxpaged.config import Config, LogConfig, SchedulerConfig
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import FailingRunner
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker

pytestmark = pytest.mark.jax

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "hello"} if path == TEXT else {"messages": [{"role": "user", "content": "hello"}]}
    return {**prompt, "max_tokens": 6, "use_beam_search": True, "temperature": 0, **fields}


def found_by_the_engine(server: LiveServer, ids: list[int], **params: Any) -> BeamSearchOutput:
    return asyncio.run(server.engine.beam_search({"prompt_token_ids": ids}, BeamSearchParams(**params)))


@pytest.fixture(scope="module")
def searching_module_server(chat_tokenizer: Tokenizer) -> Any:
    # The engine's own searches are asked without HTTP, and count as answers that nobody asked for.
    with live_server(chat_tokenizer, eos_token_ids=(2, 3 + ord("e"))) as server:
        server.num_unsure = 1000
        yield server


@pytest.fixture
def searching(searching_module_server: LiveServer) -> Any:
    yield searching_module_server
    searching_module_server.after_check()


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 4, "length_penalty": 0.0}, {"n": 2, "ignore_eos": True}, {}])
def test_answers_are_those_of_the_engine(searching: LiveServer, path: str, fields: dict[str, Any]) -> None:
    answer = searching.post(path, body_of(path, return_token_ids=True, **fields)).json
    choices = answer["choices"]
    ids = answer["prompt_token_ids"] if path == CHAT else choices[0]["prompt_token_ids"]
    rest = {name: value for name, value in fields.items() if name != "n"}
    found = found_by_the_engine(searching, ids, beam_width=fields.get("n", 1), max_tokens=6, **rest).sequences
    assert [choice["index"] for choice in choices] == list(range(fields.get("n", 1)))
    assert [choice["token_ids"] for choice in choices] == [sequence.output_token_ids for sequence in found]
    assert [choice["text"] if path == TEXT else choice["message"]["content"] for choice in choices] == [
        sequence.output_text for sequence in found
    ]
    assert [choice["finish_reason"] for choice in choices] == [str(sequence.finish_reason) for sequence in found]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), sum(len(one.output_token_ids) for one in found))


def test_the_likeliest_answer_of_one_beam_is_the_greedy_one(searching: LiveServer) -> None:
    assert searching.complete("hello", use_beam_search=True).text == searching.complete("hello").text


def test_several_prompts_and_log_probabilities(searching: LiveServer) -> None:
    prompts = ["hello", "two words", "x"]
    answer = searching.post(TEXT, body_of(TEXT, prompt=prompts, n=2, logprobs=3)).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [searching.post(TEXT, body_of(TEXT, prompt=prompt, n=2, logprobs=3)).json["choices"] for prompt in prompts]
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choices in alone for choice in choices]
    for choice in answer["choices"]:
        told = choice["logprobs"]
        assert [len(top) >= 3 for top in told["top_logprobs"]] == [True] * len(told["tokens"])
        assert all(token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))
    scores = [sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert all(first >= second for first, second in zip(scores[::2], scores[1::2], strict=True)), "not the likeliest first"
    chat = searching.post(CHAT, body_of(CHAT, n=2, logprobs=True, top_logprobs=4)).json["choices"][1]
    assert all(len(entry["top_logprobs"]) == 4 for entry in chat["logprobs"]["content"])


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 11}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [70]}, "allowed_token_ids"),
        ({"bad_words": ["z"]}, "bad_words"),
        ({"stop": "z"}, "stop"),
        ({"stop_token_ids": [70]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"timings": True}, "timings"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": None, "length_penalty": 2}, "length_penalty"),
        ({"best_of": 4}, "best_of"),
    ],
)
def test_what_a_search_does_not_do(searching: LiveServer, path: str, fields: dict[str, Any], param: str) -> None:
    reply = searching.post(path, body_of(path, **fields))
    assert (reply.status, reply.error["param"]) == (400, param)


def test_what_asks_for_nothing_is_taken(searching: LiveServer) -> None:
    neutral = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "stop": [],
        "seed": 7,
        "temperature": 1,
    }
    assert searching.post(TEXT, body_of(TEXT, **neutral)).json["choices"] == searching.post(TEXT, body_of(TEXT)).json["choices"]
    for fields, param in (({"echo": True}, "echo"), ({"logprobs": 5, "n": 2}, "logprobs")):
        reply = searching.post(TEXT, body_of(TEXT, **fields))
        assert (reply.status, reply.error["param"]) == (400, param)
    reply = searching.post(CHAT, body_of(CHAT, logprobs=True, top_logprobs=3))
    assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


def test_a_client_that_leaves_ends_its_search(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer), 0.005)) as server:
        client = server.open(TEXT, body_of(TEXT, n=4, max_tokens=400))
        wait_until(lambda: server.engine._engine.has_work)
        client.close()
        server.left()
        wait_until(lambda: server.service.ledger.num_open == 0)
        assert server.complete("after").status == 200


@pytest.mark.parametrize("how", ["failure", "timeout"])
def test_a_search_that_is_ended_is_an_error(chat_tokenizer: Tokenizer, how: str) -> None:
    config = Config(log=LogConfig(level="error"), scheduler=SchedulerConfig(request_timeout_s=0.05 if how == "timeout" else None))

    def before(step: int) -> None:
        if how == "timeout":
            time.sleep(0.2)
        elif step > 5:
            raise RuntimeError("the device is lost")

    with live_server(chat_tokenizer, FailingRunner(talker(chat_tokenizer), before=before), config) as server:
        reply = server.post(TEXT, body_of(TEXT, n=4, max_tokens=400))
        expected = (503, "engine_dead") if how == "failure" else (504, "request_timeout")
        assert (reply.status, reply.error["code"]) == expected
        server.tracebacks.clear()
