"""The life of a process that follows: join process 0, load, replay, end with it. Its exit status says how it ended.

0: process 0 has stopped in order; 70: process 0, or a process that it waited for, is dead; 128 + n: a second signal n, or the first
while the model is loaded; 2 or 1, by an error that is raised: it could not start, or failed.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from jaxpaged import events
from jaxpaged.config import Config
from jaxpaged.distributed.company import sentence_of
from jaxpaged.distributed.follower import Follower
from jaxpaged.distributed.settings import Processes
from jaxpaged.distributed.terms import terms_of
from jaxpaged.host_limits import prepare_process
from jaxpaged.sinks import FanOut, open_log
from jaxpaged.start import start_follower

FLUSH_S = 0.5


def follow(config: Config, processes: Processes, leave: Callable[[int], None] = os._exit) -> int:
    """Follows process 0 to its end; returns the exit status.

    Args:
        config: as process 0 has it.
        processes: which this one is.
        leave: ends the process at once.

    Raises:
        JaxpagedError: it cannot start, or its device failed.
    """
    terms = terms_of(config)
    prepare_process(config)
    log = open_log(config.log)
    emit = FanOut([log])

    def say(state: str, message: str = "") -> None:
        emit(events.HealthChanged(time_s=time.time(), state=state, message=message))

    def leave_at_once(status: int) -> None:
        emit.flush(FLUSH_S)
        leave(status)

    signals = _Signals(say, leave_at_once)
    follower = Follower(processes, terms, on_death=lambda reason: say("dead", reason), leave=leave_at_once)
    before = {number: signal.signal(number, signals) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        say("starting", f"joining process 0 at port {processes.steps_port} of {processes.host}")
        follower.join()
        runner = start_follower(config, [emit], follower)
        # Late: they need the device's libraries.
        from jaxpaged.distributed.jax_processes import stop_jax
        from jaxpaged.distributed.runners import replay

        signals.is_following = True
        replay(runner, follower)
        follower.close()
        stop_jax()
        emit(events.EngineStopped(time_s=time.time()))
        return 0
    except BaseException as error:
        follower.fail(f"process {processes.index}: {sentence_of(error)}")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        log.close()


class _Signals:
    """Process 0 decides when all stop: a supervisor tells all at once, and open requests need all of them to come to their ends."""

    def __init__(self, say: Callable[[str, str], None], leave: Callable[[int], None]) -> None:
        self._say, self._leave = say, leave
        self._num_signals = 0
        self.is_following = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1 or not self.is_following:
            self._leave(128 + number)
        self._say("draining", "told to stop: process 0 says when")
