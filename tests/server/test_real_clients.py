"""Clients that people use, each in an environment of its own, against a live server.

Environments are made from `tests/clients/` and kept in pytest's cache folder.
"""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from jaxpaged import events
from jaxpaged.config import Config, LogConfig, SchedulerConfig, ServerConfig
from jaxpaged.llm import LLM
from jaxpaged.tokenizer import Tokenizer
from server.ledger import End
from tests.fakes import FailingRunner
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker
from tests.server.real_client import node_of, run_node, run_python

pytestmark = [pytest.mark.jax, pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MODEL = "llama-3-8b"


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> Path:
    """Where environments are kept."""
    folder = request.config.cache
    assert folder is not None
    return Path(folder.mkdir("clients"))


@pytest.fixture(scope="session")
def base_url(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`python -m server` over SmolLM2, as its README says to start it; it ends with 0."""
    log = tmp_path_factory.mktemp("server") / "out.txt"
    command = [sys.executable, "-m", "server", "--model", "smollm2-135m", "--port", "0", "--enable-prefix-caching"]
    command += ["--served-model-name", MODEL, "--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        found = None
        deadline_s = time.monotonic() + 600
        while found is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        yield f"{found[0]}/v1"
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.tier("system")
def test_openai_current(cache: Path, base_url: str) -> None:
    assert run_python(cache, "openai", "openai_current", base_url, MODEL) == "passed"


@pytest.mark.tier("system")
def test_openai_before_one(cache: Path, base_url: str) -> None:
    assert run_python(cache, "openai_0_28", "openai_0_28", base_url, MODEL) == "passed"


@pytest.mark.tier("system")
def test_openai_on_node(cache: Path, base_url: str) -> None:
    assert subprocess.run([node_of(cache) / "bin" / "node", "--version"], capture_output=True, text=True, check=True).stdout[:4] == "v20."
    assert run_node(cache, "openai_node", base_url, MODEL) == "passed"


@pytest.mark.tier("system")
def test_litellm(cache: Path, base_url: str) -> None:
    assert run_python(cache, "litellm", "litellm_client", base_url, MODEL).splitlines()[-1] == "passed"


@pytest.mark.tier("system")
def test_openai_over_tls_with_a_key(cache: Path, chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    for file, blobs in (("ca.pem", [authority.cert_pem]), ("cert.pem", made.cert_chain_pems), ("key.pem", [made.private_key_pem])):
        (tmp_path / file).write_bytes(b"".join(blob.bytes() for blob in blobs))
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    config = Config(log=LogConfig(level="error"), server=ServerConfig(**files, api_key=("first", "second")))
    with live_server(chat_tokenizer, config=config) as server:
        where = {"OPENAI_BASE_URL": f"https://localhost:{server.port}/v1", "OPENAI_API_KEY": "second"}
        assert run_python(cache, "openai", "openai_tls", "smollm2-135m", str(tmp_path / "ca.pem"), **where) == "passed"
        server.counts[End.LENGTH] += 2
        server.num_prompts += 2


def num_requests(server: LiveServer) -> int:
    return len([event for event in server.log.of(events.HttpAnswered) if event.end])


@pytest.mark.tier("system")
def test_openai_asks_again_only_where_that_helps(cache: Path, chat_tokenizer: Tokenizer) -> None:
    """400: once; 504: once; 429: three times."""
    policy = SchedulerConfig(max_num_queued_requests=1, request_timeout_s=2.0)
    runner = slowed(talker(chat_tokenizer, max_num_seqs=1), 0.02)
    with live_server(chat_tokenizer, runner, Config(log=LogConfig(level="error"), scheduler=policy)) as server:
        arguments = (f"http://127.0.0.1:{server.port}/v1", "smollm2-135m")
        for max_tokens, status, end in ((9999, 400, End.REJECTED), (400, 504, End.FAILED)):
            before = num_requests(server)
            assert run_python(cache, "openai", "openai_retries", *arguments, str(max_tokens)) == str(status)
            assert num_requests(server) - before == 1
            server.counts[end] += 1
            server.num_unsure += 1
    policy = SchedulerConfig(max_num_queued_requests=1)
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer, max_num_seqs=1), 0.05), Config(scheduler=policy)) as server:
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        busy = [server.open("/v1/completions", body)]
        wait_until(lambda: server.engine._engine.scheduler.num_running == 1)
        busy.append(server.open("/v1/completions", body))
        wait_until(lambda: server.engine._engine.scheduler.num_waiting == 1)
        assert run_python(cache, "openai", "openai_retries", f"http://127.0.0.1:{server.port}/v1", "smollm2-135m", "4") == "429"
        assert num_requests(server) == 3
        server.counts[End.REFUSED] += 3
        for connection in busy:
            connection.close()
        server.left(2)


@pytest.mark.tier("system")
def test_openai_raises_when_a_stream_fails(cache: Path, chat_tokenizer: Tokenizer) -> None:
    runner = FailingRunner(talker(chat_tokenizer), without_id=lambda step, row: step > 20 and row == 0)
    with live_server(chat_tokenizer, slowed(runner, 0.005)) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        assert run_python(cache, "openai", "openai_stream_errors", url, "smollm2-135m") == "request_failed"
        server.counts[End.FAILED] += 1
        server.num_unsure += 1


@pytest.mark.tier("long", area="server")
def test_langchain(cache: Path, base_url: str) -> None:
    assert run_python(cache, "langchain_openai", "langchain_client", base_url, MODEL) == "passed"


@pytest.mark.tier("long", area="server")
def test_llm_command(cache: Path, base_url: str) -> None:
    assert run_python(cache, "llm", "llm_client", base_url, MODEL) == "passed"


@pytest.mark.tier("long", area="server")
def test_ai_sdk(cache: Path, base_url: str) -> None:
    assert run_node(cache, "ai_sdk", base_url, MODEL) == "passed"


@pytest.mark.tier("long", area="server")
def test_lm_eval_finds_the_scores_of_the_library(cache: Path, base_url: str) -> None:
    lines = run_python(cache, "lm_eval", "lm_eval_client", base_url, MODEL).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(rows) == 12
    with LLM("smollm2-135m", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        scores = llm.score([row[0] for row in rows], [row[1] for row in rows])
    for (_, _, logprob, is_greedy), score in zip(rows, scores, strict=True):
        assert math.isclose(logprob, score.logprob, rel_tol=0, abs_tol=1e-4)
        assert is_greedy == score.is_greedy


@pytest.fixture(scope="module")
def tokenizer_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as transformers reads it: load generators count tokens on their side."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.from_gguf(smollm2_path, folder)
    made = folder / "made"
    made.mkdir()
    tokenizer._backend.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}))
    return made


@pytest.mark.tier("long", area="server")
@pytest.mark.parametrize("name", ["aiperf", "inference_perf"])
def test_load_generators(cache: Path, base_url: str, tokenizer_folder: Path, name: str) -> None:
    """They prepare their load from the tokenizer, and see no failed request."""
    assert run_python(cache, name, f"{name}_client", base_url, MODEL, str(tokenizer_folder)) == "passed"
