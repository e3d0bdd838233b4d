"""POST /v1/embeddings and /v1/score."""

import base64
import math
import struct
from typing import Any

import pytest

from jaxpaged.tokenizer import Tokenizer
from tests.fakes import FailingRunner
from tests.server.live import LiveServer, live_server, talker

pytestmark = pytest.mark.jax


def vector_of(ids: list[int]) -> Any:
    """The mean of what SCRIPT has as hidden states, of length 1."""
    mean = [sum(ids) / len(ids), 1.0, 0.5]
    length = math.hypot(*mean)
    return pytest.approx([number / length for number in mean], rel=1e-5)


def test_texts_and_tokens_become_vectors(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"prompt": "hello two"}).json["tokens"]
    for given, expected in (("hello two", [ids]), (["hello two", "x"], [ids, [123]]), (ids, [ids]), ([[5], ids], [[5], ids])):
        body = server.post("/v1/embeddings", {"input": given}).json
        assert [item["index"] for item in body["data"]] == list(range(len(expected)))
        assert [item["embedding"] for item in body["data"]] == [vector_of(one) for one in expected]
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(map(len, expected))
        packed = server.post("/v1/embeddings", {"input": given, "encoding_format": "base64"}).json
        for item, one in zip(packed["data"], expected, strict=True):
            assert list(struct.unpack("<3f", base64.b64decode(item["embedding"]))) == vector_of(one)
    cut = server.post("/v1/embeddings", {"input": [5, 6, 7, 8], "truncate_prompt_tokens": 2}).json
    assert cut["data"][0]["embedding"] == vector_of([7, 8])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [5] * 512}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 3}, "dimensions"),
    ],
)
def test_what_is_no_input(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/embeddings", {"input": "x", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_one_failure_fails_the_request(chat_tokenizer: Tokenizer) -> None:
    with live_server(chat_tokenizer, FailingRunner(talker(chat_tokenizer), without_id=lambda step, row: row == 0)) as server:
        for path, body in (("/v1/embeddings", {"input": [[5], [13], [6]]}), ("/v1/score", {"prompt": "x", "continuation": "y"})):
            reply = server.post(path, body)
            assert (reply.status, reply.error["code"]) == (500, "request_failed")


def test_scores_are_those_of_the_engine(server: LiveServer) -> None:
    answer = server.complete("hello", max_tokens=3, return_token_ids=True).json["choices"][0]["token_ids"]
    ids = server.post("/tokenize", {"prompt": "hello"}).json["tokens"]
    for path in ("/v1/score", "/score"):
        body = server.post(path, {"prompt": ids, "continuation": [answer, [5], [5, 6]]}).json
        first, second, third = body["data"]
        assert [item["index"] for item in body["data"]] == [0, 1, 2]
        assert first["is_greedy"]
        assert not second["is_greedy"]
        assert first["token_ids"] == answer
        assert first["score"] == pytest.approx(sum(first["token_logprobs"]))
        assert second["score"] < first["token_logprobs"][0]
        assert third["token_ids"] == [5, 6]
        assert body["usage"]["prompt_tokens"] == 3 * len(ids) + 3 + 1 + 2
    texts = server.post("/v1/score", {"prompt": "hello", "continuation": [" two words", " world"]}).json["data"]
    assert [len(item["token_ids"]) for item in texts] == [2, 1]
    echoed = server.complete("hello two words", echo=True, logprobs=0, max_tokens=0).json["choices"][0]["logprobs"]["token_logprobs"]
    assert texts[0]["token_logprobs"] == pytest.approx(echoed[1:])


@pytest.mark.parametrize(
    "fields",
    [
        {"text_1": "a", "text_2": ["b", "c"]},
        {"queries": "a", "documents": ["b"]},
        {"queries": ["a"], "items": ["b"]},
        {"data_1": "a", "data_2": "b"},
        {"prompt": "a", "continuation": "b", "truncate_prompt_tokens": 5},
        {"prompt": "a", "continuation": "b", "use_activation": True},
    ],
)
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_fields_of_vllm_are_refused_by_name(server: LiveServer, path: str, fields: dict[str, Any]) -> None:
    reply = server.post(path, fields)
    assert reply.status == 400
    assert reply.error["param"] in fields
    assert reply.error["message"].startswith(f"{reply.error['param']} cannot be given: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continuation": []}, "continuation"),
        ({"continuation": ""}, "continuation"),
        ({"continuation": ["a", [5]]}, "continuation"),
        ({"continuation": ["x"] * 257}, "continuation"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [303]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_what_cannot_be_scored(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/score", {"prompt": "hello", "continuation": "x", **fields})
    assert reply.status == (404 if param == "model" else 400)
    assert reply.error["param"] == param
