"""`jaxpaged run-batch`: a file of requests in, a file of answers out."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxpaged import cli
from jaxpaged.commands import run_batch
from jaxpaged.config import Config
from jaxpaged.engine_client import EngineClient
from jaxpaged.errors import ModelNotFoundError
from jaxpaged.events import Sink
from jaxpaged.tokenizer import Tokenizer
from server import batch, batch_command
from tests.openai.validate import errors
from tests.scripted_client import scripted_async_llm
from tests.server.live import talker

pytestmark = pytest.mark.jax


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"temperature": 0, "max_tokens": 4, **body}}


def answered(
    folder: Path, lines: Sequence[Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> tuple[int, list[Any]]:
    """The status and the answers of a batch."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    raw = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines]
    source.write_bytes(b"\n".join(raw) + b"\n")

    with contextlib.ExitStack() as stack:

        def make_engine(config: Config, sinks: Sequence[Sink]) -> EngineClient:
            return stack.enter_context(scripted_async_llm(talker(tokenizer), tokenizer, config=config, sinks=sinks))

        monkeypatch.setattr(run_batch, "run", lambda args: batch_command.run(args, make_engine))
        status = cli.main(["run-batch", str(source), str(target), "--log.level", "error", *flags])
    return status, [json.loads(one) for one in target.read_bytes().splitlines()]


@pytest.mark.parametrize("concurrency", ["1", "3", "256"])
def test_every_line_is_answered_in_order(
    tmp_path: Path, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, concurrency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(f"c{index}", prompt=f"number {index}", max_tokens=1 + index % 7) for index in range(20)]
    chat = line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    response = {"custom_id": "response", "url": "/v1/responses", "body": {"input": "x", "max_output_tokens": 3}}
    status, answers = answered(tmp_path, [*lines, b"", chat, response], chat_tokenizer, monkeypatch, "--concurrency", concurrency)
    assert status == 0
    assert capsys.readouterr().err == "22 answered, 0 failed or refused\n"
    assert [answer["custom_id"] for answer in answers] == [*(f"c{index}" for index in range(20)), "chat", "response"]
    assert len({answer["id"] for answer in answers}) == 22
    for answer in answers:
        assert answer["error"] is None
        assert (answer["response"]["status_code"], bool(answer["response"]["request_id"])) == (200, True)
    assert all(errors("CreateCompletionResponse", answer["response"]["body"]) == [] for answer in answers[:20])
    assert errors("CreateChatCompletionResponse", answers[20]["response"]["body"]) == []
    assert [answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers[:20]] == [1 + index % 7 for index in range(20)]


def test_bad_lines_fail_alone(
    tmp_path: Path, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line("good", prompt="x"),
        b"{",
        b'{"custom_id": 7}',
        b"\xff\xfe",
        b"[" * 100_000,
        line("wrong value", prompt="x", n=0),
        line("wrong model", prompt="x", model="nobody"),
        line("stream", prompt="x", stream=True),
        line("path", "/metrics"),
        {**line("method", prompt="x"), "method": "GET"},
        line("l" * 513, prompt="x"),
        line("also good", prompt="x"),
    ]
    status, answers = answered(tmp_path, lines, chat_tokenizer, monkeypatch)
    assert status == 1
    assert capsys.readouterr().err == "2 answered, 10 failed or refused\n"
    codes = [answer["response"]["status_code"] if answer["response"] else answer["error"]["code"] for answer in answers]
    bad, request = "invalid_line", "invalid_request"
    assert codes == [200, bad, bad, bad, bad, 400, 404, request, request, request, request, 200]
    assert answers[5]["response"]["body"]["error"]["param"] == "n"


@pytest.mark.parametrize(("source", "target"), [("none.jsonl", "out.jsonl"), ("in.jsonl", "none/out.jsonl"), ("in.jsonl", "in.jsonl")])
def test_files_that_cannot_be_used(tmp_path: Path, source: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert cli.main(["run-batch", str(tmp_path / source), str(tmp_path / target)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "in.jsonl").read_text() == "{}\n"


LAPTOP = Path(__file__).parents[2] / "configs" / "serving" / "laptop-cpu.yaml"


def test_more_than_the_queue_takes(tmp_path: Path, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limits of a request let through is answered, however short the queue is: 64 places with this file."""
    many = [line(f"short {index}", prompt="x" * (index + 1), max_tokens=1) for index in range(100)]
    many.append(line("prompts", prompt=[f"x{index}" for index in range(256)], max_tokens=1))
    many.append({**line("vectors", "/v1/embeddings"), "body": {"input": [f"y{index}" for index in range(300)]}})
    status, answers = answered(tmp_path, many, chat_tokenizer, monkeypatch, "--config", str(LAPTOP))
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert status == 0
    assert [len(answer["response"]["body"].get("choices") or answer["response"]["body"]["data"]) for answer in answers[100:]] == [256, 300]


@pytest.mark.parametrize("fault", ["no model", "no end"])
def test_answers_that_are_there_stay_until_there_are_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n")
    target.write_text("yesterday\n")

    def make_engine(config: Config, sinks: Sequence[Sink]) -> EngineClient:
        assert fault == "no model", "the model is loaded before the file was read"
        raise ModelNotFoundError("there is no such model")

    if fault == "no end":
        source = tmp_path  # a folder opens and cannot be read
    monkeypatch.setattr(run_batch, "run", lambda args: batch_command.run(args, make_engine))
    assert cli.main(["run-batch", str(source), str(target), "--log.level", "error"]) != 0
    assert target.read_text() == "yesterday\n"


def test_a_request_is_asked_again_until_there_is_room() -> None:
    """429 is for the batch to wait out; after so many tries with nothing else open it is the answer."""
    told = {b"full": 3, b"for ever": 10**6}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])["prompt"].encode()
        told[body] = told.get(body, 0) - 1
        status = 429 if told[body] >= 0 else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"0")]})
        await send({"type": "http.response.body", "body": b"{}"})

    written: list[bytes] = []
    lines = [json.dumps(line(prompt, prompt=prompt)).encode() for prompt in ("full", "good", "for ever")]
    counts = asyncio.run(batch.run_batch(app, lines, written.append, concurrency=8))  # type: ignore[arg-type]
    assert counts == (2, 1)
    assert [json.loads(one)["response"]["status_code"] for one in written] == [200, 200, 429]
    assert batch.MAX_TRIES_ALONE <= 10**6 - told[b"for ever"] <= batch.MAX_TRIES_ALONE + 10
