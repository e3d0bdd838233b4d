"""Silence of a server is counted in ticks of who listens, and a stopped server is not silent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import lock_watch
from server.lock_watch import Silence, is_stopped, watch
from tests.server.door_server import wait_until

pytestmark = pytest.mark.jax

LIMIT = 5


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_silence_is_so_many_ticks_in_a_row_without_a_stop(ticks: list[tuple[bool, bool]]) -> None:
    silence = Silence(LIMIT)
    verdicts = [silence.tick(was_heard=was_heard, is_stopped=is_stopped) for was_heard, is_stopped in ticks]
    heard = [-1, *(index for index, (was_heard, _) in enumerate(ticks) if was_heard), len(ticks)]
    for begin, end in pairwise(heard):
        counted = 0
        for index in range(max(begin, 0), end):
            counted += ticks[index] == (False, False)
            assert verdicts[index] == (counted >= LIMIT)


class World:
    """A pipe and a process as `watch` sees them, tick by tick: a beat, silence, a stop, or the end."""

    def __init__(self, script: str) -> None:
        self.script, self.index = script, -1

    def hear(self, *_: object) -> bytes | None:
        """A beat comes, or the tick passes, or it is the pipe's end."""
        self.index += 1
        return {"b": b".", "e": b""}.get(self.script[self.index])

    def is_stopped(self, _: int) -> bool:
        """Now."""
        return self.script[self.index] == "T"


@pytest.mark.parametrize(
    ("script", "is_ended", "num_ticks"),
    [
        ("bbbbe", False, 5),
        ("b....b....be", False, 12),
        ("b.....e", True, 6),
        ("b" + "T" * 200 + "b" + "e", False, 203),
        ("b..TTTTTTTT..b....e", False, 19),
        ("b..TTTTTTTT...e", True, 14),
        ("e", False, 1),
    ],
)
def test_a_stop_adds_nothing_and_an_end_is_the_end(monkeypatch: pytest.MonkeyPatch, script: str, is_ended: bool, num_ticks: int) -> None:
    world = World(script)
    monkeypatch.setattr(lock_watch, "hear", world.hear)
    monkeypatch.setattr(lock_watch, "is_stopped", world.is_stopped)
    assert watch(0, 1, 0.5, Silence(LIMIT)) is is_ended
    assert world.index + 1 == num_ticks


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, under a name that tries to look stopped."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_who_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid))
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: not is_stopped(sleeper.pid))
    sleeper.kill()
    sleeper.wait()
    assert not is_stopped(sleeper.pid)


def test_the_program_ends_with_the_pipe_and_not_with_signals() -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", lock_watch.__file__, str(os.getpid()), "0.5", "1000000", "1"]
    with subprocess.Popen(command, stdin=reader, stderr=subprocess.PIPE) as process:
        os.close(reader)

        def ignores(number: int) -> bool:
            with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
                (mask,) = [int(line.split()[1], 16) for line in file if line.startswith("SigIgn:")]
            return bool(mask >> (number - 1) & 1)

        wait_until(lambda: all(map(ignores, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))))
        os.close(writer)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
