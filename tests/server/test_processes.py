"""How server processes start and end: signals, drains, deaths; nothing is left behind, and the exit status says why."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.lock_watch import SIGNAL
from tests.server.door_server import request_bytes
from tests.server.served_process import PROGRAM, ServedProcess, completion, served_process
from tests.tiny_model import write_tiny_llama

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.jax, pytest.mark.tier("system")]

SLOW = {"SCRIPTED_STEP_S": "0.03"}


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_clean(served: ServedProcess) -> None:
    """No process is left, and no traceback was written."""
    assert served.members() == []
    assert "Traceback" not in served.err


def test_told_to_stop_it_ends_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    admin = tmp_path / "admin.sock"
    with served_process(tmp_path, "--server.admin-socket", str(admin), **SLOW) as served:
        served.wait_ready()
        streams = [served.stream(60) for _ in range(8)]
        assert admin.exists()
        told_s = served.signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = served.ask("POST", "/v1/completions", completion())
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "server_draining", "5")
        assert [served.ask("GET", path).status for path in ("/livez", "/readyz", "/health")] == [200, 503, 503]
        for stream in streams:
            answer = stream.read()
            assert answer.body.endswith(b"data: [DONE]\n\n")
        assert served.status(5) == 0
        assert time.monotonic() - told_s < 15
        assert not admin.exists()
        assert "told to stop: 8 requests are open and have 30 s" in served.err
        check_clean(served)


def test_those_that_take_too_long_are_told(tmp_path: Path) -> None:
    with served_process(tmp_path, "--server.drain-timeout-s", "0.5", **SLOW) as served:
        served.wait_ready()
        stream = served.stream(500)
        whole = served.connect()
        whole.send(request_bytes("POST", "/v1/completions", completion(500)))
        time.sleep(0.2)
        told_s = served.signal(signal.SIGTERM)
        answer = whole.read()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "server_draining", "5")
        assert b'"code":"server_draining"' in stream.read().body
        assert served.status(5) == 0
        assert 0.5 <= time.monotonic() - told_s < 5
        check_clean(served)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(tmp_path: Path, number: signal.Signals) -> None:
    admin = tmp_path / "admin.sock"
    with served_process(tmp_path, "--server.admin-socket", str(admin), **SLOW) as served:
        served.wait_ready()
        stream = served.stream(500)
        served.signal(number)
        time.sleep(0.3)
        assert served.process.poll() is None
        again_s = served.signal(number)
        assert served.status(5) == 128 + number
        assert time.monotonic() - again_s < 2
        assert not admin.exists()
        stream.seconds_to_end()
        check_clean(served)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_it_loads_it_answers_and_can_be_stopped(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    with served_process(tmp_path, "--port", str(port), SCRIPTED_LOAD_S="60") as served:
        served.wait_listening(port)
        while served.ask("GET", "/readyz").json.get("phase") != "load":
            time.sleep(0.02)
        answer = served.ask("GET", "/readyz")
        assert (answer.status, answer.json["status"], answer.json["phase"], answer.json["total"]) == (503, "starting", "load", 10)
        assert served.ask("GET", "/livez").status == 200
        refused = served.ask("POST", "/v1/completions", completion())
        assert (refused.status, refused.code) == (503, "server_starting")
        told_s = served.signal(number)
        assert served.status(5) == 0
        assert time.monotonic() - told_s < 3
        check_clean(served)


def test_a_dead_engine_ends_the_process(tmp_path: Path) -> None:
    admin = tmp_path / "admin.sock"
    arguments, places = ("--server.admin-socket", "~/admin.sock"), {"HOME": str(tmp_path)}
    with served_process(tmp_path, *arguments, SCRIPTED_FAULT="raise", SCRIPTED_FAULT_STEP="20", **SLOW, **places) as served:
        served.wait_ready()
        assert admin.exists()
        streams = [served.stream(400) for _ in range(3)]
        began_s = time.monotonic()
        for stream in streams:
            assert b'"code":"engine_dead"' in stream.read().body
        assert time.monotonic() - began_s < 3
        assert [served.ask("GET", path).status for path in ("/livez", "/health")] == [503, 503]
        assert served.status(5) == 70
        assert "the device is on fire" in served.err
        assert not admin.exists()
        assert served.members() == []


def test_a_stuck_engine_ends_the_process(tmp_path: Path) -> None:
    with served_process(tmp_path, "--server.watchdog-s", "2", SCRIPTED_FAULT="hang", SCRIPTED_FAULT_STEP="10", **SLOW) as served:
        served.wait_ready()
        stream = served.stream(400)
        began_s = time.monotonic()
        while served.ask("GET", "/livez").status == 200:
            time.sleep(0.05)
        assert 1.5 < time.monotonic() - began_s < 2 + 1.5
        answer = served.ask("GET", "/health")
        assert (answer.status, answer.json["reason"]) == (503, "there is work, and no step was finished in 2 s")
        assert b'"code":"engine_dead"' in stream.read().body
        assert served.status(5) == 70
        assert "scripted_program.py" in served.err, "the stack of the step that hangs"
        assert served.members() == []


def test_a_step_that_hangs_does_not_hold_the_end_up(tmp_path: Path) -> None:
    """Told to stop while it is stuck and nobody knows yet: the client is told, and the process ends before a supervisor would kill it."""
    arguments = ("--server.drain-timeout-s", "0.2")
    with served_process(tmp_path, *arguments, SCRIPTED_FAULT="hang", SCRIPTED_FAULT_STEP="10", **SLOW) as served:
        served.wait_ready()
        stream = served.stream(400)
        served.signal(signal.SIGTERM)
        assert b'"code":"server_draining"' in stream.read().body
        assert served.status(30) == 0, "the watchdog would end it with 70 after a minute"
        assert served.err.rstrip().endswith("stopped")
        check_clean(served)


def test_a_step_that_holds_the_interpreter_lock_ends_the_process(tmp_path: Path) -> None:
    arguments = ("--server.watchdog-s", "1")
    with served_process(tmp_path, *arguments, SCRIPTED_FAULT="lock", SCRIPTED_FAULT_STEP="10", SCRIPTED_LOCK_GRACE_S="1", **SLOW) as served:
        served.wait_ready()
        served.stream(400)
        assert served.status(30) == SIGNAL, "as documented: nothing of ours can run then"
        assert "jaxpaged: the interpreter lock was held for 2 s" in served.err
        assert "scripted_program.py" in served.err, "the stack of the step that holds it"
        assert served.members() == []


def test_a_stopped_process_is_not_taken_for_a_stuck_one(tmp_path: Path) -> None:
    """Stopped for far longer than the watchdog's time and the lock's: the server alone, both as a shell does it, the watcher alone."""
    with served_process(tmp_path, "--server.watchdog-s", "1", SCRIPTED_LOCK_GRACE_S="0.5", **SLOW) as served:
        served.wait_ready()
        stream = served.stream(100)
        server, watcher = served.pids()
        for pids in ((server,), (server, watcher), (watcher,)):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    os.kill(pid, number)
                time.sleep(3 if number == signal.SIGSTOP else 0)
        os.kill(watcher, signal.SIGKILL)
        assert stream.read().body.endswith(b"data: [DONE]\n\n")
        assert served.ask("GET", "/livez").status == 200, "without its watcher it goes on"
        served.signal(signal.SIGTERM)
        assert served.status(30) == 0
        check_clean(served)


def test_killed_it_leaves_nothing_and_its_port_is_free_at_once(tmp_path: Path) -> None:
    port, admin = free_port(), tmp_path / "admin.sock"
    arguments = ("--port", str(port), "--server.admin-socket", str(admin))
    for round_ in range(2):
        with served_process(tmp_path, *arguments, **SLOW) as served:
            served.wait_ready()
            stream = served.stream(400)
            if round_ == 0:
                served.signal(signal.SIGKILL)
                assert served.status(5) == -signal.SIGKILL
                stream.seconds_to_end()
                assert served.members() == []
                assert admin.exists()


def test_out_of_descriptors_it_serves_again_when_there_are_some(tmp_path: Path) -> None:
    command = ("bash", "-c", 'ulimit -n 64; exec "$@"', "x", sys.executable, str(PROGRAM))
    with served_process(tmp_path, command=command) as served:
        served.wait_ready()
        held = [served.connect() for _ in range(100)]
        held[0].send(request_bytes("GET", "/livez"))
        assert held[0].read().status == 200
        time.sleep(1.5)
        for connection in held:
            connection.close()
        assert served.ask("POST", "/v1/completions", completion()).status == 200
        assert "no file descriptor is left for new connections" in served.err
        served.signal(signal.SIGTERM)
        assert served.status(5) == 0
        check_clean(served)


def test_a_log_that_nobody_reads_does_not_matter(tmp_path: Path) -> None:
    command = ("bash", "-c", '"$@" 2> >(sleep 0.01)', "x", sys.executable, str(PROGRAM))
    with served_process(tmp_path, command=command) as served:
        served.wait_ready()
        for _ in range(20):
            assert served.ask("POST", "/v1/completions", completion()).status == 200


def test_a_taken_port_is_one_sentence_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, str(PROGRAM), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"jaxpaged: cannot listen on port {port} of 127.0.0.1: it is taken by another program; choose another one with --port\n"
    )


def test_a_real_model_from_the_command_line(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Nothing scripted: load, pool, programs; two samples of a text; the report's figures; an end in the middle of a stream.

    It is reached by what it was told to open, and by nothing else.
    """
    model = tmp_path / "tiny"
    model.mkdir()
    write_tiny_llama(model)
    options = ("--model", str(model), "--served-model-name", "tiny", "--enable-prefix-caching", "--max-num-seqs", "8")
    small = ("--max-num-batched-tokens", "16", "--compilation.token-buckets", "16", "--cache.memory", "1MiB")
    command, cache = (sys.executable, "-m", "server"), pytestconfig.cache
    assert cache is not None
    programs = ("--compilation.cache-dir", str(cache.mkdir("programs")))
    admin_port, admin = free_port(), tmp_path / "admin.sock"
    doors = ("--server.admin-port", str(admin_port), "--server.admin-socket", "~/admin.sock")
    places = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    with served_process(tmp_path, *options, *small, *programs, *doors, command=command, **places) as served:
        served.wait_ready()
        assert stat.S_IMODE(admin.stat().st_mode) == 0o600
        assert re.search(
            r"^tiny: ready in [0-9.]+ s \(find [0-9.]+, load [0-9.]+, pool [0-9.]+, compile [0-9.]+, warm up [0-9.]+\)$",
            served.out,
            re.MULTILINE,
        )
        assert re.search(r"^  page pool +[0-9.]+ MiB$", served.out, re.MULTILINE)
        first, again = (served.ask("POST", "/v1/completions", completion(8, model="tiny")) for _ in range(2))
        assert first.status == again.status == 200
        assert first.json["choices"] == again.json["choices"]
        assert served.ask("GET", "/health").json == {"status": "ready"}
        assert served.sockets() == ({served.port, admin_port}, {str(admin)})
        stream = served.stream(300)
        served.signal(signal.SIGTERM)
        assert stream.read().body.endswith(b"data: [DONE]\n\n")
        assert served.status(15) == 0
        assert not admin.exists()
        check_clean(served)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "/no/such/model"), "no/such/model"),
        (("--model", "org/name", "--offline"), "org/name"),
        (("--port", "70000"), "server.port must be an integer from 0 to 65535"),
        (("--tensor-parallel-size", "0"), "parallel.tensor_parallel_size must be an integer from 1 to 4096"),
        (("--ssl-certfile", "/no/cert.pem"), "cannot read ssl_certfile /no/cert.pem"),
        (("--server.api-key-file", "/no/keys"), "cannot read the key file /no/keys"),
        (("--host", "no.such.host.invalid"), "the name is not known"),
        (("--unknown-flag",), "unknown option --unknown-flag"),
        (("--quantization", "awq"), "quantization 'awq' is not served yet"),
    ],
)
def test_bad_starts_are_one_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAXPAGED_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "server", *(() if "--port" in arguments else ("--port", "0")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("jaxpaged: ")]
    assert sentence in line
    assert "Traceback" not in done.stderr


def test_the_benchmark_of_the_http_layer_runs(tmp_path: Path) -> None:
    """It stands in for an engine, and has to take what the server gives one."""
    arguments = ("--streams", "4", "--step-ms", "20", "--seconds", "0.5")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_http.py"), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["streams"], told["step_ms"]) == (4, 20)
    assert told["events_per_s"] > 0
