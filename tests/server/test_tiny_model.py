"""The whole server over a real, tiny model: streams, company, cached pages and bad inputs."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.async_llm import AsyncLLM
from server.service import Service
from tests.event_log import EventLog
from tests.server.bad_inputs import rows
from tests.server.live import LiveServer
from tests.server.test_bad_inputs import check
from tests.tiny_engine import tiny_config
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.jax


@pytest.fixture(scope="module")
def tiny_module_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    cache = request.config.cache
    assert cache is not None
    config, log = tiny_config(folder, programs=Path(cache.mkdir("programs"))), EventLog()
    service = Service(config, sinks=(log,))
    with AsyncLLM(config=config, sinks=(service.emit,)) as engine:
        service.attach(engine)
        server = LiveServer(engine, service, log, engine._engine.runner)
        try:
            yield server
            server.after_check()
        finally:
            server.close()


@pytest.fixture
def tiny(tiny_module_server: LiveServer) -> Iterator[LiveServer]:
    yield tiny_module_server
    tiny_module_server.after_check()


def test_alone_and_in_company_streamed_and_whole(tiny: LiveServer) -> None:
    prompts = [f"What is number {index}?" for index in range(8)]
    alone = [tiny.chat(prompt, max_tokens=20).text for prompt in prompts]
    replies: dict[int, str] = {}

    def ask(index: int) -> None:
        replies[index] = tiny.chat(prompts[index % 8], max_tokens=20, stream=index >= 8).text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [replies[index] for index in range(16)] == alone * 2
    assert len(set(alone)) > 1


def test_scores_are_those_of_an_echo(tiny: LiveServer) -> None:
    text = "The capital of France is Paris."
    echoed = tiny.complete(text, echo=True, logprobs=2, max_tokens=1).json["choices"][0]["logprobs"]
    ids = tiny.post("/tokenize", {"prompt": text}).json["tokens"]
    for cut in (1, 5, len(ids) - 1):
        (scored,) = tiny.post("/v1/score", {"prompt": ids[:cut], "continuation": ids[cut:]}).json["data"]
        assert scored["token_logprobs"] == pytest.approx(echoed["token_logprobs"][cut : len(ids)], abs=1e-4)


def test_samples_with_a_seed_come_again(tiny: LiveServer) -> None:
    one, two = (tiny.chat("seed", n=4, seed=3, temperature=1.0, max_tokens=12, stream=is_streamed).texts for is_streamed in (False, True))
    assert one == two
    assert len(set(one)) > 1


def test_bad_inputs_beside_good_ones(tiny: LiveServer) -> None:
    """Forty rows of the table, of those that hang neither on the vocabulary nor on the context."""
    names = ("temperature", "top_p", "n[", "seed", "stop[", "logit_bias", "stream_options", "response_format", "echo", "messages")
    chosen = [row for row in rows() if row.status == 400 and row.name.startswith(names) and len(row.body) < 500 and b"303" not in row.body]
    chosen = chosen[::4][:40]
    assert len(chosen) == 40
    expected = tiny.chat("neighbour", max_tokens=60).text
    is_over = threading.Event()
    wrong: list[str] = []

    def ask() -> None:
        while not is_over.is_set():
            if (text := tiny.chat("neighbour", max_tokens=60).text) != expected:
                wrong.append(text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert [fault for row in chosen if (fault := check(tiny, row))] == []
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
