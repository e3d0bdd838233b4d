"""GET /v1/models, /tokenize, /detokenize, /tokenizer_info: what clients ask beside the answers."""

import json
from typing import Any

import pytest
from tokenizers import processors

from jaxpaged.config import Config, LogConfig, ServerConfig
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.tokenizer_files import StoredTokenizer
from server.tokenizer_info import MAX_SIZE, tokenizer_info
from tests.server.live import LiveServer, live_server
from tests.text.vocabularies import byte_level, byte_level_backend
from tests.tiny_model import CHAT_TEMPLATE

pytestmark = pytest.mark.jax

MESSAGE = {"role": "assistant", "content": "x"}
ENDS = [("<|im_start|>", 1), ("<|im_end|>", 2)]


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
    assert answer["token_strs"] == ["hello", "\u0120two", "\u0120words"]
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
        ("/detokenize", {"tokens": [303]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/tokenize", {"messages": [MESSAGE], "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [MESSAGE], "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": [MESSAGE], "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": [MESSAGE], "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, "model"),
    ],
)
def test_what_is_no_text_and_no_tokens(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.error["param"]) == (404 if param == "model" else 400, param)
    # No sentence speaks of a field that this path does not have.
    assert path == "/tokenize" or "prompt" not in reply.error["message"]


def test_an_empty_text_has_no_tokens(server: LiveServer) -> None:
    assert server.post("/tokenize", {"prompt": ""}).json["tokens"] == []
    assert server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_conversations_are_tokenized_as_they_are_asked(server: LiveServer) -> None:
    """Every field of the body counts; what /tokenize gives is what /v1/chat/completions computes."""
    messages = [{"role": "user", "content": "hello"}, MESSAGE]
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template_kwargs": {"a": 1}}):
        ids = server.post("/tokenize", {"messages": messages, **fields}).json["tokens"]
        chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}).json
        assert chat["prompt_token_ids"] == ids


def test_the_tokenizers_own_tokens_are_added_when_asked_for() -> None:
    """To a text unless it says no, to a conversation only if it says so, as in vLLM; with a tokenizer that has a begin and an end."""
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=ENDS)
    stored = StoredTokenizer(backend, bos_token_id=1, eos_token_ids=(2,), chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer(stored)
    with live_server(tokenizer) as server:

        def ids(**body: Any) -> list[int]:
            return list(server.post("/tokenize", body).json["tokens"])

        text = ids(prompt="hello", add_special_tokens=False)
        assert ids(prompt="hello") == ids(prompt="hello", add_special_tokens=True) == [1, *text, 2]
        chat = ids(messages=[MESSAGE])
        assert chat == ids(messages=[MESSAGE], add_special_tokens=False)
        assert ids(messages=[MESSAGE], add_special_tokens=True) == [1, *chat, 2]


def test_tokens_are_spelled_as_in_the_vocabulary(server: LiveServer) -> None:
    """Also parts of characters, which have no text of their own."""
    answer = server.post("/tokenize", {"prompt": "two words \u00e9", "return_token_strs": True}).json
    vocabulary = byte_level(CHAT_TEMPLATE)._backend
    assert answer["token_strs"] == [vocabulary.id_to_token(index) for index in answer["tokens"]]
    assert len(set(answer["token_strs"][-2:])) == 2
    assert server.post("/tokenize", {"prompt": "x"}).json["token_strs"] is None


def test_the_tokenizer_tells_its_control_tokens(server: LiveServer) -> None:
    info = server.get("/tokenizer_info").json
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == ("<|im_start|>", "<|im_end|>", [2])
    assert info["chat_template"].startswith("{% for message in messages %}")
    assert info["added_tokens_decoder"]["2"] == "<|im_end|>"


CONFIG: dict[str, Any] = {
    "tokenizer_class": "GPT2Tokenizer",
    "unk_token": {"__type": "AddedToken", "content": "<unk>", "lstrip": False, "special": True},
    "additional_special_tokens": ["<a>", {"content": "<b>", "lstrip": False}],
    "model_max_length": 10**30,
    "clean_up_tokenization_spaces": False,
    "extra": {"content": "plain", "deep": [1, 2.5, None]},
    "vocab_file": "/home/somebody/vocab.json",
    "name_or_path": "/home/somebody/model",
    "chat_template": [{"name": "default", "template": "not the one in use"}],
    "long": "x" * MAX_SIZE,
    "last": "told, too",
}


def test_the_tokenizers_configuration_is_told_as_vllm_does() -> None:
    """Tokens as texts, numbers of any size; without places on a disk, and no more than `MAX_SIZE` of it."""
    stored = StoredTokenizer(byte_level_backend(), 1, (2,), CHAT_TEMPLATE, {**CONFIG, "huge": 10**40})
    info = json.loads(tokenizer_info(Tokenizer(stored), 512))
    decoder = info.pop("added_tokens_decoder")
    assert decoder["1"] == "<|im_start|>"
    assert info == {
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<a>", "<b>"],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "extra": {"content": "plain", "deep": [1, 2.5, None]},
        "last": "told, too",
        "huge": 10**40,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "eos_token_ids": [2],
        "vocab_size": Tokenizer(stored).vocab_size,
        "chat_template": CHAT_TEMPLATE,
    }
