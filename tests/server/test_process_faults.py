"""L7 and F-a to F-d of the goals, and faults of what surrounds a process: each once or a few times here, many times in the long run.

Whatever happens, a client is told or sees its connection end, no process is left, and the exit status says why.
"""

import contextlib
import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.served_process import ServedProcess, served_process
from tests.server.test_processes import SLOW, check_clean, free_port

pytestmark = [pytest.mark.jax, pytest.mark.tier("system")]

WHOLE = SLOW


def sizes(gate: int, night: int) -> list[object]:
    """Parameters: a number for the gate and one for the long run."""
    return [gate, pytest.param(night, marks=[pytest.mark.tier("long", area="server"), pytest.mark.timeout(7200)])]


class Clients:
    """Clients that ask one after another until they are told to stop, each noting how every request of its ended."""

    def __init__(self, served: ServedProcess, number: int) -> None:
        self._served, self._is_over = served, threading.Event()
        self.ends: Counter[str] = Counter()
        self.ended_s: list[float] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(number)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when all have ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        rng = random.Random(index)
        while not self._is_over.is_set():
            end = self._ask({"prompt": "x", "max_tokens": rng.randint(1, 30), "stream": rng.random() < 0.6, "ignore_eos": True})
            with self._lock:
                self.ends[end] += 1
                self.ended_s.append(time.monotonic())
            if end == "closed":
                time.sleep(0.05)

    def _ask(self, body: dict[str, object]) -> str:
        """stop/length: answered to its end; failed: told in the stream; a status; closed: no connection, or it ended before its head."""
        content = b""
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
        try:
            with socket.create_connection(("127.0.0.1", self._served.port), 20) as connection:
                connection.sendall(head.encode() + b"connection: close\r\n\r\n" + raw)
                while piece := connection.recv(65536):
                    content += piece
        except OSError:
            if content:
                return "broken"
            return "closed"
        if not content:
            return "closed"
        if content.startswith(b"HTTP/1.1 200"):
            if b'"error":{' in content:
                return "failed"
            is_whole = b"data: [DONE]" in content if body["stream"] else b'"usage":{' in content
            return "answered" if is_whole else "broken"
        return content[9:12].decode()


@contextlib.contextmanager
def clients(served: ServedProcess, number: int) -> Iterator[Clients]:
    """Some that are gone at the end."""
    made = Clients(served, number)
    try:
        yield made
    finally:
        made.stop()
        served.count.num_begun += sum(made.ends.values())
        served.count.ends["length"] += made.ends["answered"]


@pytest.mark.parametrize("number", sizes(3, 50))
def test_told_to_stop_under_load(tmp_path: Path, number: int) -> None:
    """L7: what was accepted is answered or told, what comes later gets 503 or finds nobody, and nothing is left."""
    for round_ in range(number):
        rng = random.Random(round_)
        with served_process(tmp_path, "--server.drain-timeout-s", str(rng.choice((0, 0.3, 20))), **WHOLE) as served:
            served.wait_ready()
            with clients(served, 12) as load:
                time.sleep(rng.uniform(0.1, 1.0))
                served.signal(rng.choice((signal.SIGTERM, signal.SIGINT)))
                assert served.status(30) == 0
            assert sum(load.ends.values()) >= 12
            assert set(load.ends) <= {"answered", "503", "failed", "closed"}, load.ends
            check_clean(served)


@pytest.mark.parametrize("number", sizes(1, 20))
def test_a_crash_is_told_within_a_second(tmp_path: Path, number: int) -> None:
    """F-a."""
    for round_ in range(number):
        step = str(random.Random(round_).randint(5, 60))
        with served_process(tmp_path, SCRIPTED_FAULT="raise", SCRIPTED_FAULT_STEP=step, **WHOLE) as served:
            served.wait_ready()
            with clients(served, 8) as load:
                while served.process.poll() is None and "the device is on fire" not in served.err:
                    time.sleep(0.005)
                crashed_s = time.monotonic()
                with contextlib.suppress(OSError, AssertionError):
                    while served.ask("GET", "/health").status != 503:
                        assert time.monotonic() < crashed_s + 1, "healthy a second after the crash"
                assert served.status(10) == 70
            told = load.ends["failed"] + load.ends["503"]
            assert told >= 8, load.ends
            assert set(load.ends) <= {"answered", "503", "failed", "closed"}, load.ends
            assert served.members() == []


@pytest.mark.parametrize("number", sizes(1, 20))
def test_a_stuck_step_is_noticed(tmp_path: Path, number: int) -> None:
    """F-b, T = 3 s."""
    for round_ in range(number):
        step = str(random.Random(round_).randint(5, 40))
        arguments = ("--server.watchdog-s", "3")
        with served_process(tmp_path, *arguments, SCRIPTED_FAULT="hang", SCRIPTED_FAULT_STEP=step, **WHOLE) as served:
            served.wait_ready()
            with clients(served, 8) as load:
                while served.ask("GET", "/health").status == 200:
                    time.sleep(0.05)
                noticed_s = time.monotonic()
                assert served.status(10) == 70
            last_s = max(at_s for at_s in load.ended_s if at_s < noticed_s - 1)
            assert noticed_s - last_s < 3 + 1.5, "a second after its time, and half a second for the tick"
            assert set(load.ends) <= {"answered", "503", "failed", "closed"}, load.ends
            assert "scripted_program.py" in served.err, "the stack of the step that hangs"
            assert served.members() == []


PHASES = ("import", "load", "idle", "stream")


def night(*values: object) -> object:
    """Parameters of the long run."""
    return pytest.param(*values, marks=pytest.mark.tier("long", area="server"))


@pytest.mark.parametrize("number", sizes(4, 50))
def test_killed_anywhere_nothing_is_left(tmp_path: Path, number: int) -> None:
    """F-d, O-62: SIGKILL at the import, while it loads, idle and under load; no orphan, and its port can be had at once."""
    port = free_port()
    for round_ in range(number):
        rng, phase = random.Random(round_), PHASES[round_ % len(PHASES)]
        slow = {"SCRIPTED_LOAD_S": "30"} if phase == "load" else {}
        with served_process(tmp_path, "--port", str(port), **{**WHOLE, **slow}) as served:
            if phase == "import":
                time.sleep(rng.uniform(0.05, 0.5))
            elif phase == "load":
                served.wait_listening(port)
            else:
                served.wait_ready()
            with clients(served, 6 if phase == "stream" else 0) as load:
                time.sleep(rng.uniform(0.05, 0.5))
                served.signal(signal.SIGKILL)
                assert served.status(10) == -signal.SIGKILL
                assert served.members() == []
                time.sleep(0.2)
            assert not set(load.ends) & {"503", "failed"}
    with served_process(tmp_path, "--port", str(port), **WHOLE) as served:
        served.wait_ready()
        assert served.ask("GET", "/health").status == 200


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_THE_GATE = {("import", signal.SIGTERM), ("load", signal.SIGHUP), ("stream", signal.SIGINT)}


@pytest.mark.parametrize(
    ("phase", "number"),
    [pair if pair in AT_THE_GATE else night(*pair) for pair in ((phase, number) for phase in PHASES for number in SIGNALS)],
)
def test_signals_at_any_time_end_it(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """O-62; SIGHUP is the shell that was closed."""
    port = free_port()
    slow = {"SCRIPTED_LOAD_S": "30"} if phase == "load" else {}
    with served_process(tmp_path, "--port", str(port), "--server.drain-timeout-s", "1", **{**WHOLE, **slow}) as served:
        if phase == "import":
            time.sleep(0.15)
        elif phase == "load":
            served.wait_listening(port)
        else:
            served.wait_ready()
        with clients(served, 6 if phase == "stream" else 0):
            served.signal(number)
            status = served.status(10)
        if phase in ("idle", "stream") and number != signal.SIGHUP:
            assert status == 0
        assert served.members() == []
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_clock_that_leaps_and_a_stop_under_load(tmp_path: Path) -> None:
    """F23: stopped for longer than the watchdog's time, it goes on where it was."""
    with served_process(tmp_path, "--server.watchdog-s", "2", **WHOLE) as served:
        served.wait_ready()
        with clients(served, 8) as load:
            for _ in range(2):
                time.sleep(0.3)
                served.signal(signal.SIGSTOP)
                time.sleep(3)
                served.signal(signal.SIGCONT)
            time.sleep(0.5)
        assert set(load.ends) == {"answered"}
        served.signal(signal.SIGTERM)
        assert served.status(10) == 0


@pytest.mark.parametrize("phase", ["idle", "stream"])
def test_health_under_a_hundred_scrapes_a_second(tmp_path: Path, phase: str) -> None:
    """F19."""
    with served_process(tmp_path, **WHOLE) as served:
        served.wait_ready()
        with clients(served, 4 if phase == "stream" else 0) as load:
            began_s = time.monotonic()
            connection = served.connect()
            for _ in range(200):
                assert connection.request("GET", "/metrics").status == 200
            assert time.monotonic() - began_s < 10
        assert set(load.ends) <= {"answered"}
