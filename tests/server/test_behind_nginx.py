"""configs/serving/nginx.conf before two real servers: streams pass at once, and no client notices that a server goes. Needs nginx."""

import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.door_server import Answer, ClientCounts, Connection, request_bytes
from tests.server.served_process import ServedProcess, completion, served_process
from tests.server.test_processes import free_port

pytestmark = [pytest.mark.jax, pytest.mark.tier("long", area="server")]

CONFIG = Path(__file__).parents[2] / "configs" / "serving" / "nginx.conf"


class Proxied:
    """Two servers and the proxy."""

    def __init__(self, port: int, servers: list[ServedProcess]) -> None:
        self.port, self.servers = port, servers
        self.count = ClientCounts()

    def connect(self) -> Connection:
        """A connection to the proxy."""
        return Connection(self.port, count=self.count)

    def check_books(self) -> None:
        """What clients of the proxy saw is what both servers tell together; of one of them, any part of it."""
        for server in self.servers:
            server.count.num_begun += self.count.num_begun
        if not any(server.is_shut for server in self.servers):
            one, other = (server.ends() for server in self.servers)
            self.count.check({end: one[end] + other[end] for end in one})

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Through the proxy."""
        connection = self.connect()
        try:
            return connection.request(method, path, body, **headers)
        finally:
            connection.close()


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    """Steps of 20 ms."""
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(served_process(tmp_path / name, SCRIPTED_STEP_S="0.02")))
        for server in servers:
            server.wait_ready()
        port = free_port()
        text = CONFIG.read_text()
        for old, new in zip(re.findall(r"server 127\.0\.0\.1:(\d+)", text), servers, strict=True):
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new.port}")
        text = text.replace("listen 8000;", f"listen 127.0.0.1:{port};")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
        text = text.replace("http {", f"http {{\naccess_log off;\n{paths}", 1)
        (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/nginx.pid;\ndaemon off;\n{text}")
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        assert nginx is not None, "this test needs Debian's nginx"
        proxy = subprocess.Popen([nginx, "-e", "stderr", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path)])
        stack.callback(proxy.wait, 10)
        stack.callback(proxy.terminate)
        deadline_s = time.monotonic() + 10
        while True:
            try:
                Connection(port).close()
                break
            except OSError:
                assert proxy.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
        proxied = Proxied(port, servers)
        yield proxied
        proxied.check_books()


def test_streams_pass_as_they_come(proxied: Proxied) -> None:
    connection = proxied.connect()
    connection.send(request_bytes("POST", "/v1/completions", completion(50, stream=True), x_request_id="mine"))
    began_s = time.monotonic()
    connection.read_until(b"data: ")
    first_s = time.monotonic() - began_s
    answer = connection.read()
    whole_s = time.monotonic() - began_s
    connection.close()
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert first_s < whole_s / 2, "the first token did not wait for the last"


def test_what_is_refused_stays_refused(proxied: Proxied) -> None:
    assert proxied.ask("GET", "/health").status == 200
    assert proxied.ask("POST", "/v1/completions", b"{").status == 400
    assert proxied.ask("GET", "/v1/nothing").status == 404


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_goes_is_not_missed(proxied: Proxied, number: signal.Signals) -> None:
    """Requests that begin while, or after, one of the two ends are all answered; with a drain, so are those that ran."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            statuses.append(proxied.ask("POST", "/v1/completions", completion(5)).status)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    time.sleep(1)
    num_before = len(statuses)
    proxied.servers[0].signal(number)
    proxied.servers[0].status(20)
    time.sleep(1)
    is_over.set()
    for client in clients:
        client.join(20)
    assert set(statuses) == {200}
    assert len(statuses) > num_before > 4
