"""One engine, driven by whichever thread has its turn: `LLM`'s lock, and the outputs that wait for others than who made the step."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxpaged.errors import EngineDeadError
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
        for output in outputs:
            if (mail := self.mail.get(output.request_id)) is not None:
                mail.append(output)

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
