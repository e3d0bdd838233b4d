"""A server process over a scripted device, for tests of how processes start and end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.server.door_server import Answer, ClientCounts, Connection, request_bytes

PROGRAM = Path(__file__).with_name("scripted_program.py")
COMMAND = (sys.executable, str(PROGRAM))
START_TIMEOUT_S = 60.0
MEMBERS_TIMEOUT_S = 10.0


def completion(max_tokens: int = 4, **fields: Any) -> bytes:
    """A body for /v1/completions."""
    return msgspec.json.encode({"prompt": "hello", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **fields})


@contextmanager
def hangups_end_children() -> Iterator[None]:
    """Tests that are run by nohup ignore SIGHUP, and processes that begin meanwhile would, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


class ServedProcess:
    """`jaxpaged serve` in a session of its own, its output in files.

    Args:
        folder: for its files.
        arguments: of the command line; `--port 0` unless there is a port among them.
        command: the program; the scripted one unless another is given.
        environment: beside what every test has; see `scripted_program`.
    """

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] = COMMAND, **environment: str) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        port = () if "--port" in arguments else ("--port", "0")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JAXPAGED_")}
        with self._out.open("w") as out, self._err.open("w") as err, hangups_end_children():
            self.process = subprocess.Popen(
                [*command, *port, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**kept, "JAXPAGED_HOME": str(folder), **environment},
                cwd=folder,
                start_new_session=True,
            )
        self.port = 0
        self.count = ClientCounts()
        self._is_signalled = False
        self._clients: list[Connection] = []

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it says where it serves."""
        self._wait_for(lambda: "serving " in self.out, timeout_s)
        found = re.search(r"serving \S+ at http://127\.0\.0\.1:(\d+)/v1", self.out)
        assert found is not None
        self.port = int(found[1])

    def wait_listening(self, port: int) -> None:
        """Until a port that was asked for takes connections."""
        self.port = port
        self._wait_for(self._is_listening)

    def connect(self) -> Connection:
        """A new connection."""
        self._clients.append(Connection(self.port, count=self.count))
        return self._clients[-1]

    def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """One request on a connection of its own."""
        connection = self.connect()
        try:
            return connection.request(method, path, body, connection="close")
        finally:
            connection.close()

    def stream(self, max_tokens: int) -> Connection:
        """Begins a stream, and returns when its first token is there."""
        connection = self.connect()
        body = completion(max_tokens, stream=True)
        connection.send(request_bytes("POST", "/v1/completions", body))
        connection.read_until(b"data: ")
        return connection

    def signal(self, number: int) -> float:
        """Sends a signal, and returns the time."""
        self._is_signalled = True
        self.process.send_signal(number)
        return time.monotonic()

    def status(self, timeout_s: float) -> int:
        """Its exit status; fails if it takes longer than that."""
        return self.process.wait(timeout_s)

    def members(self) -> list[str]:
        """What is alive of its session after 10 s, zombies apart; the process beside the server sees the server's end, and then ends."""
        deadline_s = time.monotonic() + MEMBERS_TIMEOUT_S
        while (rows := self._rows()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return rows

    def pids(self) -> list[int]:
        """Of its session: the server, and then what it has started."""
        pids = [int(row.split()[0]) for row in self._rows()]
        return sorted(pids, key=lambda pid: pid != self.process.pid)

    def _rows(self) -> list[str]:
        listed = subprocess.run(["ps", "-e", "-o", "pid=,sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
        rows = (line.split(None, 3) for line in listed.splitlines())
        return [" ".join(row) for row in rows if row[1] == str(self.process.pid) and not row[2].startswith("Z")]

    def sockets(self) -> tuple[set[int], set[str]]:
        """What it and its children may be reached by: ports of TCP that they listen on and of UDP, and names of unix sockets."""
        inodes = {os.readlink(file) for pid in self.pids() for file in Path(f"/proc/{pid}/fd").iterdir()}
        ports: set[int] = set()
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for row in Path(f"/proc/{self.process.pid}/net/{table}").read_text().splitlines()[1:]:
                words = row.split()
                if f"socket:[{words[9]}]" in inodes and (table.startswith("udp") or words[3] == "0A"):
                    ports.add(int(words[1].rpartition(":")[2], 16))
        names = set()
        for row in Path(f"/proc/{self.process.pid}/net/unix").read_text().splitlines()[1:]:
            words = row.split()
            if f"socket:[{words[6]}]" in inodes and len(words) > 7:
                names.add(words[7])
        return ports, names

    def check_books(self) -> None:
        """What clients saw is what /metrics tells, and nothing is left; unless it is gone, was told to go, or is shut to us."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self.is_shut or self.ask("GET", "/health").status != 200:
            return
        self.count.check(self.ends())

    @property
    def is_shut(self) -> bool:
        """Whether it is gone, was told to go, or nobody has asked where it is."""
        return self.process.poll() is not None or self._is_signalled or not self.port

    def ends(self) -> dict[str, float]:
        """How the requests that asked the model for something have ended, when all have."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while any(self._figures("jaxpaged_num_requests_").values()):
            assert time.monotonic() < deadline_s, "requests are left"
            time.sleep(0.6)  # figures are made at most twice a second
        return {name.partition('"')[2].rstrip('"}'): value for name, value in self._figures("jaxpaged_http_ends_total").items()}

    def _figures(self, prefix: str) -> dict[str, float]:
        lines = self.ask("GET", "/metrics").body.decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line.startswith(prefix))}

    def end(self) -> None:
        """Whatever happened before, it is gone."""
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def _is_listening(self) -> bool:
        try:
            Connection(self.port).close()
        except OSError:
            return False
        return True

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, f"it ended with {self.process.poll()}: {self.err}"
            assert time.monotonic() < deadline_s, self.err
            time.sleep(0.01)


@contextmanager
def served_process(folder: Path, *arguments: str, command: Sequence[str] = COMMAND, **environment: str) -> Iterator[ServedProcess]:
    """One that is gone at the end."""
    served = ServedProcess(folder, *arguments, command=command, **environment)
    try:
        yield served
        served.check_books()
    finally:
        served.end()
