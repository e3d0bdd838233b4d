"""An encoder behind the whole server: vectors over HTTP, and sentences for whatever else is asked of it."""

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxpaged.async_llm import AsyncLLM
from server.service import Service
from tests.event_log import EventLog
from tests.models.encoder_cases import GOLDEN_HIDDEN, LENGTHS, VOCAB, prompt_of
from tests.server.live import LiveServer
from tests.tiny_engine import tiny_config
from tests.tiny_families import write_tiny_bert
from tests.tiny_model import write_tiny_tokenizer

pytestmark = pytest.mark.jax

LONGEST = 128


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("encoder")
    write_tiny_bert(folder, vocab_size=VOCAB)
    write_tiny_tokenizer(folder, vocab_size=300, chat_template=None)
    cache = request.config.cache
    assert cache is not None
    programs = Path(cache.mkdir("programs"))
    config = tiny_config(folder, programs=programs, max_num_batched_tokens=128, token_buckets=(32, 128), max_num_queued_requests=2)
    log = EventLog()
    service = Service(config, sinks=(log,))
    with AsyncLLM(config=config, sinks=(service.emit,)) as engine:
        service.attach(engine)
        server = LiveServer(engine, service, log, engine._engine.runner)
        try:
            yield server
            server.after_check()
        finally:
            server.close()


def test_vectors_are_those_of_transformers(encoder: LiveServer) -> None:
    """Many at once, more than the queue takes and a step holds; in both encodings."""
    lengths = [length for length in LENGTHS for _ in range(3)]
    for encoding in ("float", "base64"):
        body = {"input": [prompt_of(length) for length in lengths], "encoding_format": encoding}
        answer = encoder.post("/v1/embeddings", body).json
        assert answer["usage"]["prompt_tokens"] == sum(lengths)
        with np.load(GOLDEN_HIDDEN) as golden:
            for length, item in zip(lengths, answer["data"], strict=True):
                given = item["embedding"]
                vector = given if encoding == "float" else struct.unpack(f"<{len(base64.b64decode(given)) // 4}f", base64.b64decode(given))
                mean = golden[str(length)][-1]
                assert np.dot(vector, mean / np.linalg.norm(mean)) > 1 - 1e-6


def test_a_text_is_as_long_as_there_are_positions_at_most(encoder: LiveServer) -> None:
    assert len(encoder.post("/v1/embeddings", {"input": [5] * LONGEST}).json["data"][0]["embedding"]) == 84
    reply = encoder.post("/v1/embeddings", {"input": [5] * (LONGEST + 1)})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "input", "context_length_exceeded")
    for limit in (LONGEST, -1):
        cut = encoder.post("/v1/embeddings", {"input": [7, *[5] * LONGEST], "truncate_prompt_tokens": limit}).json
        assert cut["usage"]["prompt_tokens"] == LONGEST


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/completions", {"prompt": [5], "stream": True}),
        ("/v1/completions", {"prompt": [5], "use_beam_search": True, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/score", {"prompt": [5], "continuation": [6]}),
    ],
)
def test_what_asks_for_texts_is_told_that_there_are_none(encoder: LiveServer, path: str, fields: dict[str, Any]) -> None:
    reply = encoder.post(path, fields)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "encoder" in reply.error["message"]


def test_the_rest_is_as_ever(encoder: LiveServer) -> None:
    ids = encoder.post("/tokenize", {"prompt": "hello"}).json["tokens"]
    assert ids
    assert encoder.get("/health").status == 200
    assert encoder.get("/v1/models").json["data"][0]["max_model_len"] >= LONGEST
