"""The live page in Debian's Chromium, headless, over a scripted engine under load and with a key set."""

import asyncio
import shutil
import threading
import time
from pathlib import Path

import pytest

from jaxpaged.config import Config, LogConfig, ServerConfig
from jaxpaged.request import SamplingParams
from jaxpaged.tokenizer import Tokenizer
from server.ledger import End
from server.phase import Phase
from tests.server.live import LiveServer, live_server, slowed, talker
from tests.server.real_client import BROWSER, run_node

pytestmark = [pytest.mark.jax, pytest.mark.tier("system")]

APT = "apt-get install -y --no-install-recommends chromium"
KEY = "sk-of-the-page"
HOSTILE = "<img src=x onerror=document.title=1>"
ARTEFACTS = Path(__file__).parents[2] / "build" / "artefacts"
"""Where screenshots are kept."""


def chromium() -> str:
    """Its path. A machine without it fails the test, and is told how to get it."""
    path = shutil.which("chromium")
    assert path is not None, f"chromium is not installed: {APT}"
    return path


class Load:
    """Clients of whom one asks the engine directly, under a hostile name, until the page has seen all it wants."""

    def __init__(self, server: LiveServer) -> None:
        self._server, self._is_over = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask if number else self._name, args=(number,)) for number in range(5)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Returns when all are done."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        while not self._is_over.is_set():
            messages = [{"role": "system", "content": "We all begin alike. " * 3}, {"role": "user", "content": f"number {number}"}]
            body = {"messages": messages, "max_tokens": 40}
            headers = {"authorization": f"Bearer {KEY}", "x-request-id": f"client-{number}"}
            assert self._server.post("/v1/chat/completions", body, **headers).status in (200, 503)

    def _name(self, _: int) -> None:
        async def generate() -> None:
            await self._server.engine.generate("hello", SamplingParams(temperature=0, max_tokens=40), HOSTILE)

        while not self._is_over.is_set():
            asyncio.run(generate())
            self._server.num_unsure += 1


def stop_when_asked(server: LiveServer, sign: Path, is_over: threading.Event) -> None:
    """The server begins to stop as soon as the page says that it has seen the rest."""
    while not (sign.exists() or is_over.is_set()):
        time.sleep(0.05)
    server.service.drain()


def test_the_page_in_a_browser(request: pytest.FixtureRequest, chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert request.config.cache is not None
    cache, browser = Path(request.config.cache.mkdir("clients")), chromium()
    config = Config(log=LogConfig(level="error"), server=ServerConfig(api_key=(KEY,)))
    with live_server(chat_tokenizer, slowed(talker(chat_tokenizer, num_pages=300), 0.02), config) as server:
        load, is_over = Load(server), threading.Event()
        stopping = threading.Thread(target=stop_when_asked, args=(server, tmp_path / "stop", is_over))
        stopping.start()
        try:
            url = f"http://127.0.0.1:{server.port}"
            assert run_node(cache, "dashboard", url, KEY, browser, str(tmp_path), clients=BROWSER) == "passed"
        finally:
            is_over.set()
            load.end()
            stopping.join()
            server.service.phase = Phase.READY
            ARTEFACTS.mkdir(parents=True, exist_ok=True)
            for picture in tmp_path.glob("*.png"):
                shutil.copy(picture, ARTEFACTS)
        server.counts[End.LENGTH] += 1  # the page's own question
        server.num_prompts += 1
    assert {path.name for path in tmp_path.glob("*.png")} == {f"dashboard-{name}.png" for name in ("phone", "tablet", "desk", "desk-dark")}
