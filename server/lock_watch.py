"""Ends a server whose interpreter lock is held for ever: a small process of its own, for nothing of Python runs in the server then.

The server's watchdog writes a byte at each of its ticks. This program counts the ticks of its own that pass without one, looks at no
clock, and does not count those in which the server is stopped; so a stop of either, or of both, adds one tick at most. A timer inside
the server cannot do that (`faulthandler.dump_traceback_later`): its deadline passes while the process is stopped, and it fires at SIGCONT.

At the end it sends SIGNAL, for which the server has handlers that need no lock: the stacks of all threads go to the log, and the C
library's `_exit` ends the process. A handler is needed, because the first process of a container ignores signals that it has none for,
SIGKILL among them. When the server is gone the pipe ends, and so does this program.

`python -I -S lock_watch.py PID TICK_S NUM_TICKS SECONDS`: standard input is the pipe, standard error the log. It imports nothing of ours.
"""

import contextlib
import os
import select
import signal
import sys

SIGNAL = signal.SIGUSR2
LAST_WAIT_S = 5.0
"""For the stacks to be written, before SIGKILL."""


class Silence:
    """Counts ticks without a sign of life.

    Args:
        limit: so many of them in a row are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._count = limit, 0

    def tick(self, *, was_heard: bool, is_stopped: bool) -> bool:
        """Whether it has lasted too long, a tick later."""
        if was_heard:
            self._count = 0
        elif not is_stopped:
            self._count += 1
        return self._count >= self._limit


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger; a process that is gone is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def hear(pipe: int, tick_s: float) -> bytes | None:
    """What came within a tick; None: nothing; empty: the server is gone."""
    return os.read(pipe, 65536) if select.select([pipe], [], [], tick_s)[0] else None


def watch(pipe: int, pid: int, tick_s: float, silence: Silence) -> bool:
    """Returns when the server is gone (False), or was silent for too long (True)."""
    while True:
        heard = hear(pipe, tick_s)
        if heard == b"":
            return False
        if silence.tick(was_heard=heard is not None, is_stopped=is_stopped(pid)):
            return True


def main(pid: int, tick_s: float, num_ticks: int, seconds: float) -> None:
    """Watches, and ends the server if it must."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, not with those that are told to stop
    pipe = sys.stdin.fileno()
    if not watch(pipe, pid, tick_s, Silence(num_ticks)):
        return
    with contextlib.suppress(OSError):
        sys.stderr.write(f"jaxpaged: the interpreter lock was held for {seconds:g} s: the process ends, and these are its stacks\n")
        sys.stderr.flush()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)
        while (heard := hear(pipe, LAST_WAIT_S)) is not None:
            if not heard:
                return
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
