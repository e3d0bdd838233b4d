"""Debian's Prometheus reads a live server: rules are right, and every panel has something to show."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxpaged.config import Config, SchedulerConfig
from server.app import create_app
from server.machine_metrics import MachineMetrics
from server.service import Service
from tests.observability.dashboards import CONFIGS, panel_queries, rules
from tests.observability.test_metrics import FakeGpus
from tests.server.door_server import DoorServer, door_server, wait_until
from tests.server.scripted_llm import scripted_llm, slow_runner

pytestmark = [pytest.mark.jax, pytest.mark.tier("system")]

APT = "apt-get install -y --no-install-recommends prometheus"
LOAD_S = 30.0


def program(name: str) -> str:
    """Its path. A machine without it fails the test, and is told how to get it."""
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed: {APT}"
    return path


def promtool(*words: str) -> str:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_are_right() -> None:
    folder = CONFIGS / "prometheus"
    promtool("check", "rules", str(folder / "recording.yaml"), str(folder / "alerts.yaml"))
    promtool("check", "config", str(folder / "prometheus.yaml"))


def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(Path(__file__).parent / "alerts_test.yaml"))


def ask(port: int, query: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        told = json.load(answer)
    assert told["status"] == "success"
    results: list[dict[str, Any]] = told["data"]["result"]
    return results


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[int]:
    """A Prometheus that reads the server on a port every second; its own port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("recording.yaml", "alerts.yaml"):
        shutil.copy(CONFIGS / "prometheus" / name, folder / name)
    text = (CONFIGS / "prometheus" / "prometheus.yaml").read_text().replace("8000", str(target)).replace("5s", "1s", 1).replace("15s", "1s")
    (folder / "prometheus.yaml").write_text(text)
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(20)


def load(server: DoorServer, until_s: float) -> None:
    """Requests one after another, some of which are no good ones. More come at a time than may run and wait, so that some are refused."""
    number = 0
    while time.monotonic() < until_s:
        number += 1
        prompt = "abc " * (5 + number % 20)
        server.ask("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 30}).encode())
        if number % 5 == 0:
            server.ask("POST", "/v1/completions", b'{"max_tokens": 0}')


def engine(service: Service) -> Any:
    return scripted_llm(service.config, [service.emit], slow_runner(0.01))


def test_every_panel_of_the_dashboard_has_something_to_show(tmp_path: Path) -> None:
    config = Config(scheduler=SchedulerConfig(max_num_queued_requests=3))
    with door_server(config, engine=engine, create_app=create_app) as server:  # type: ignore[arg-type]
        server.service.machine = MachineMetrics(FakeGpus())
        with prometheus(tmp_path, server.port) as port:
            until_s = time.monotonic() + LOAD_S
            threads = [threading.Thread(target=load, args=(server, until_s)) for _ in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_until(lambda: bool(ask(port, "up == 1")))
            empty = []
            for title, query in panel_queries("20s"):
                results = ask(port, query)
                if not results or any(result["value"][1] == "NaN" for result in results):
                    empty.append((title, query, results))
            assert empty == []
            for rule in rules("recording.yaml"):
                assert ask(port, rule["record"]), rule["record"]
            assert ask(port, "vllm:num_requests_running"), "vLLM's names are scraped, too"
            firing = {result["metric"]["alertname"] for result in ask(port, 'ALERTS{alertstate="firing"}')}
            assert firing <= {"JaxpagedErrors"}
