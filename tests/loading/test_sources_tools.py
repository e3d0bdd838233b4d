"""How pip and uv are run: followed, stopped, and what they say turned into one sentence."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpaged.errors import DownloadError
from jaxpaged.loading import package_index
from jaxpaged.loading.package_index import Requirement, ToolRun, find_uv
from jaxpaged.loading.progress import Meter, SilentProgress


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that neither accepts nor refuses: its queue of connections is full."""
    with socket.socket() as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.1", port))
        time.sleep(0.05)
        yield port


def test_tool_that_waits_for_an_index_that_never_answers_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "REACH_AFTER_S", 0.2)
    monkeypatch.setattr(package_index, "REACH_TIMEOUT_S", 0.2)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with black_hole() as port:
        tool = f"import time; print('* http://user:secret@127.0.0.1:{port}/simple/tiny/', flush=True); time.sleep(60)"
        started = time.monotonic()
        with pytest.raises(DownloadError, match="no network") as caught:
            ToolRun(Meter.silent()).wait([sys.executable, "-c", tool], os.environ)
    assert time.monotonic() - started < 30, "the tool itself sleeps for 60"
    assert "secret" not in str(caught.value)


def test_tool_that_may_find_it_on_this_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "REACH_AFTER_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}/"
    tool = (
        f"import time; print('Looking in indexes: {closed}, file:///wheels', flush=True); print('* {closed}', flush=True); time.sleep(0.4)"
    )
    assert ToolRun(Meter.silent()).wait([sys.executable, "-c", tool], os.environ) == 0


def test_tool_that_is_slow_to_find_a_reachable_index_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "REACH_AFTER_S", 0.05)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        tool = f"import time; print('* http://127.0.0.1:{server.getsockname()[1]}/', flush=True); time.sleep(0.6)"
        assert ToolRun(Meter.silent()).wait([sys.executable, "-c", tool], os.environ) == 0


def test_raw_progress_of_pip_moves_our_meter() -> None:
    meter = Meter.silent()
    tool = "print('Progress 0 of 200\\nnoise\\nProgress 150 of 200')"
    assert ToolRun(meter).wait([sys.executable, "-c", tool], os.environ) == 0
    assert (meter.done_bytes, meter.total_bytes) == (150, 200)


def test_tool_and_its_children_end_with_an_interrupted_wait(tmp_path: Path) -> None:
    class Interrupting(Meter):
        def update(self, done_bytes: int, total_bytes: int | None = None) -> None:
            raise KeyboardInterrupt

    beat = tmp_path / "beat"
    child = f"import pathlib, time\nwhile True: pathlib.Path({str(beat)!r}).write_text(str(time.time())); time.sleep(0.01)"
    tool = f"""
import subprocess, sys, time, pathlib
subprocess.Popen([sys.executable, "-c", {child!r}])
while not pathlib.Path({str(beat)!r}).exists(): time.sleep(0.01)
print("Progress 1 of 2", flush=True)
time.sleep(60)
"""
    with pytest.raises(KeyboardInterrupt):
        ToolRun(Interrupting(SilentProgress(), "")).wait([sys.executable, "-c", tool], os.environ)
    time.sleep(0.1)
    last = beat.read_text()
    time.sleep(0.2)
    assert beat.read_text() == last


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no disk space"),
        ("ERROR: No matching distribution found for tiny-model==1.0", "has no wheel for tiny-model==1.0"),
        ("Could not fetch URL http://x/: 403 Client Error: Forbidden - skipping\nERROR: No matching distribution", "it answered 403"),
        ("error: Request failed after 3 retries\n  cause: error sending request for url (http://x.example/simple/)", "no network"),
        ("Progress 1 of 2\nERROR: connection broken by IncompleteRead", "broke while downloading tiny-model==1.0; try again"),
        ("ERROR: something else went wrong", "could not download tiny-model==1.0: something else went wrong"),
        ("", "failed without a reason"),
    ],
)
def test_what_the_tool_says_becomes_one_sentence(line: str, told: str) -> None:
    run = ToolRun(Meter.silent())
    assert run.wait([sys.executable, "-c", f"print({line!r}); raise SystemExit(1)"], os.environ) == 1
    sentence = str(run.failure(Requirement(package="tiny-model", version="1.0")))
    assert told in sentence
    assert "\n" not in sentence


def test_shim_that_answers_command_not_found_is_no_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "uv"
    shim.write_text("#!/bin/sh\necho 'uv: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    assert find_uv() is None
