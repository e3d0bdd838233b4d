"""Clients that people use, each in an environment of its own, against a live server.

Environments are made from `tests/clients/*.lock` and kept in pytest's cache folder.
"""

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged import events
from jaxpaged.config import Config, LogConfig, SchedulerConfig
from jaxpaged.tokenizer import Tokenizer
from server.ledger import End
from tests.fakes import FailingRunner
from tests.server.door_server import wait_until
from tests.server.live import LiveServer, live_server, slowed, talker

pytestmark = [pytest.mark.jax, pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
MODEL = "llama-3-8b"


def environment(cache: Path, name: str) -> Path:
    """The Python of a client's environment."""
    lock = CLIENTS / f"{name}.lock"
    folder = cache / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        uv = Path(sys.prefix) / "bin" / "uv"
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True, timeout=120)
        install = [uv, "pip", "install", "--quiet", "--require-hashes", "--python", python, "-r", lock]
        subprocess.run(install, check=True, timeout=300)
        (folder / "complete").touch()
    return python


def run_client(python: Path, script: str, *arguments: str) -> str:
    """What a client's program says. Fails with its errors when it fails."""
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy") and not name.startswith("OPENAI_")}
    done = subprocess.run(
        [python, CLIENTS / script, *arguments], capture_output=True, text=True, timeout=120, env={**plain, "NO_PROXY": "*"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


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
    assert run_client(environment(cache, "openai"), "openai_current.py", base_url, MODEL) == "passed"


@pytest.mark.tier("system")
def test_openai_before_one(cache: Path, base_url: str) -> None:
    assert run_client(environment(cache, "openai_0_28"), "openai_0_28.py", base_url, MODEL) == "passed"


def num_requests(server: LiveServer) -> int:
    return len([event for event in server.log.of(events.HttpAnswered) if event.end])


@pytest.mark.tier("system")
def test_openai_asks_again_only_where_that_helps(cache: Path, chat_tokenizer: Tokenizer) -> None:
    """400: once; 504: once; 429: three times."""
    python = environment(cache, "openai")
    policy = SchedulerConfig(max_num_queued_requests=1, request_timeout_s=2.0)
    runner = slowed(talker(chat_tokenizer, max_num_seqs=1), 0.02)
    with live_server(chat_tokenizer, runner, Config(log=LogConfig(level="error"), scheduler=policy)) as server:
        arguments = (f"http://127.0.0.1:{server.port}/v1", "smollm2-135m")
        for max_tokens, status, end in ((9999, 400, End.REJECTED), (400, 504, End.FAILED)):
            before = num_requests(server)
            assert run_client(python, "openai_retries.py", *arguments, str(max_tokens)) == str(status)
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
        assert run_client(python, "openai_retries.py", f"http://127.0.0.1:{server.port}/v1", "smollm2-135m", "4") == "429"
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
        assert run_client(environment(cache, "openai"), "openai_stream_errors.py", url, "smollm2-135m") == "request_failed"
        server.counts[End.FAILED] += 1
        server.num_unsure += 1
