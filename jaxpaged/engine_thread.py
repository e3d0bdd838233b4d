"""The engine thread of `AsyncLLM`: takes the turns of an `EngineDriver` until it is closed."""

import threading
from typing import TYPE_CHECKING

from jaxpaged.engine_driver import EngineDriver
from jaxpaged.errors import EngineDeadError

if TYPE_CHECKING:
    from jaxpaged.engine import Engine


class EngineThread(EngineDriver):
    """A driver with a thread of its own.

    Args:
        engine: closed by the thread at its end.
    """

    def __init__(self, engine: "Engine") -> None:
        super().__init__(engine)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has not been closed."""
        return not self._ended.is_set()

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine no longer serves."""
        super().check_health()
        if not self.is_alive:
            raise EngineDeadError("the engine is closed")

    def close(self) -> None:
        """Aborts what is unfinished and stops; returns when the engine is closed."""
        self.begin_close()
        # A `join` that Ctrl-C interrupts takes the thread for ended (Python 3.12), and would not wait when it is called again.
        self._ended.wait()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self.is_closing:
                self.turn()
            self.end()
        finally:
            self._ended.set()
