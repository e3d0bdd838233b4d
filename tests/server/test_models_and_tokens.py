"""GET /v1/models, /tokenize, /detokenize, /tokenizer_info: what clients ask beside the answers."""

from typing import Any

import pytest

from jaxpaged.config import Config, LogConfig, ServerConfig
from jaxpaged.tokenizer import Tokenizer
from tests.server.live import LiveServer, live_server

pytestmark = pytest.mark.jax


def test_names_with_slashes(chat_tokenizer: Tokenizer) -> None:
    config = Config(log=LogConfig(level="error"), server=ServerConfig(served_model_name=("org/name", "plain", "a/b/c")))
    with live_server(chat_tokenizer, config=config) as server:
        cards = server.get("/v1/models").json["data"]
        assert [card["id"] for card in cards] == ["org/name", "plain", "a/b/c"]
        for name in ("org/name", "org%2Fname", "plain", "a/b/c"):
            card = server.get(f"/v1/models/{name}").json
            assert card["id"] == name.replace("%2F", "/")
            assert (card["root"], card["parent"], card["max_model_len"]) == ("smollm2-135m", None, 512)
        for name in ("org", "name", "org/name/x", "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "x" * 4000, "a%00b"):
            assert server.get(f"/v1/models/{name}").status == 404
        assert server.chat("x").json["model"] == "org/name"
        assert server.chat("x", model="plain").json["model"] == "plain"
        assert server.chat("x", model="org/name", stream=True).json[0]["model"] == "org/name"
        for name in ("smollm2-135m", "", "ORG/NAME", "../../etc/passwd", "x" * 4000):
            reply = server.chat("x", model=name)
            assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "model", "model_not_found")
            assert len(reply.error["message"]) < 300


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/smollm2-135m", "/tokenizer_info", "/openapi.json", "/docs", "/version"])
def test_head_where_there_is_get(server: LiveServer, path: str) -> None:
    head, got = server.request("HEAD", path), server.get(path)
    assert head.status == got.status == 200
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.content == b""


def test_text_to_tokens_and_back(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": "hello two words", "return_token_strs": True}).json
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 3
    assert answer["token_strs"] == ["hello", " two", " words"]
    assert answer["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": "hello two words"}
    assert server.post("/detokenize", {"tokens": [2]}).json == {"prompt": "<|im_end|>"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json["tokens"]
    assert server.chat("x").json["usage"]["prompt_tokens"] == len(chat)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [303]}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "prompt"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "prompt"),
    ],
)
def test_what_is_no_text_and_no_tokens(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_the_tokenizer_tells_its_control_tokens(server: LiveServer) -> None:
    info = server.get("/tokenizer_info").json
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == ("<|im_start|>", "<|im_end|>", [2])
    assert info["chat_template"].startswith("{% for message in messages %}")
