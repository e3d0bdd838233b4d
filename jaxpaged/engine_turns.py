"""One engine, driven by whichever thread has its turn: `LLM`'s lock, and the outputs that wait for others than who made the step."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxpaged.errors import EngineDeadError, EnginePausedError
from jaxpaged.interrupts import Interrupt, held_interrupts
from jaxpaged.request import RequestOutput

if TYPE_CHECKING:
    from jaxpaged.engine import Engine


class EngineTurns:
    """Serves one thread after the other.

    Args:
        engine: nobody else calls it.

    Attributes:
        mail: request id -> where its outputs go. A step serves every open request, not only those of the call that makes it.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self.mail: dict[str, list[RequestOutput]] = {}
        self._changed = threading.Condition()
        self._num_changes = 0
        self._left: deque[str] = deque()  # requests of streams that were closed

    @contextmanager
    def turn(self) -> Iterator[Interrupt]:
        """The engine to oneself; Ctrl-C waits for the end of the block."""
        try:
            with self._lock, held_interrupts() as interrupt:
                yield interrupt
        finally:
            self._abort_left()  # those that left meanwhile

    def step(self) -> None:
        """One step, within a turn. Raises EngineDeadError; everybody's requests have ended then."""
        self._abort_those_left()
        try:
            outputs = self._engine.step()
        except EngineDeadError:
            self._engine.drain_failed()
            raise
        self.deliver(outputs)

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Puts outputs where they are waited for."""
        for output in outputs:
            if (mail := self.mail.get(output.request_id)) is not None:
                mail.append(output)

    def check_takes_requests(self) -> None:
        """Raises EnginePausedError when a request would wait for a `resume` that its own caller keeps from coming; EngineDeadError."""
        self._engine.check_alive()
        if self._engine.control.is_sleeping:
            raise EnginePausedError("the engine is asleep: call wake_up()")
        if self._engine.control.is_paused:
            raise EnginePausedError("the engine is paused: call resume()")

    @contextmanager
    def change(self) -> Iterator[None]:
        """A turn in which something is done that those who wait for a paused engine have to hear of."""
        try:
            with self.turn():
                yield
        finally:
            with self._changed:
                self._num_changes += 1
                self._changed.notify_all()

    def wait_for_step(self, num_changes: int) -> None:
        """Outside of a turn: returns when the engine may have a step again.

        Args:
            num_changes: those that were seen in the turn in which it had none.
        """
        deadline_s = self._engine.next_deadline_s
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._engine.clocks.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: self._num_changes != num_changes, timeout_s)

    @property
    def num_changes(self) -> int:
        """Calls of `change` so far."""
        return self._num_changes

    def leave(self, request_id: str) -> None:
        """Aborts a request whose reader is gone, or leaves that to whoever has the engine.

        The garbage collector may come here on a thread that is in the middle of a step.
        """
        self._left.append(request_id)
        self._abort_left()

    def _abort_left(self) -> None:
        """Between two steps, or at the end of the turn."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                with held_interrupts():
                    self._abort_those_left()
            finally:
                self._lock.release()

    def _abort_those_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self.mail.pop(request_id, None)
            self._engine.abort(request_id)
