"""Ctrl-C that ends an answer and leaves the engine whole: the signal is noted, and looked at between two steps.

Raised in the middle of a step it could lose the page pool, which the step program has taken and not given back yet.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed since the block began."""

    def __init__(self) -> None:
        self.is_set = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler. A second Ctrl-C does not wait for the step."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self.is_set:
            raise KeyboardInterrupt


@contextmanager
def noted_interrupts() -> Iterator[Interrupt]:
    """Within the block the first Ctrl-C is only noted. Outside the main thread nothing changes."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_interrupts() -> Iterator[Interrupt]:
    """As `noted_interrupts`, and raised at the end of the block if not before; where Ctrl-C means something else, nothing changes."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield Interrupt()
        return
    with noted_interrupts() as interrupt:
        yield interrupt
    interrupt.check()
