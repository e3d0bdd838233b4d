"""The start-up line of a terminal: one line that is drawn over, and is gone when the engine is ready."""

import os
import shutil
from collections.abc import Callable

from jaxpaged import events
from jaxpaged.events import Event
from jaxpaged.log_format import LogFormatter, clean
from jaxpaged.log_targets import STDERR_FD, StreamTarget
from jaxpaged.sinks import QueueSink

ERASE_LINE = "\r\x1b[K"


def startup_renderer(columns: int) -> Callable[[Event], bytes]:
    """Event -> what to send to a terminal of that width: the phase, or `compiling 7/12 (5 from cache)`, over the line before."""
    formatter = LogFormatter()

    def render(event: Event) -> bytes:
        match event:
            case events.PhaseChanged(phase="find" | "download"):
                return b""  # a pull draws its own bar on this terminal
            case events.PhaseChanged():
                text = formatter.lines(event)[0].text
            case events.ProgramCompiled(after_ready=False):
                formatter.lines(event)
                text = formatter.compile_progress()
            case events.EngineStarted() | events.EngineStopped() | events.HealthChanged(state="dead"):
                text = ""
            case _:
                return b""
        return (ERASE_LINE + clean(text, max(8, columns - 1))).encode("utf-8", "backslashreplace")

    return render


def open_startup_progress(fd: int = STDERR_FD) -> QueueSink | None:
    """A sink that draws the start-up on the terminal `fd`; None when that is not a terminal that can erase a line."""
    if not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
        return None
    return QueueSink("progress", StreamTarget(fd), startup_renderer(shutil.get_terminal_size().columns))
