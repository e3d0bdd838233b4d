"""Traces of what the process and its devices do, by JAX's profiler; one at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpaged.errors import BadRequestError, ConfigError


class Profiler:
    """Starts and stops a trace; any thread may call it, and waits while another one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None

    def start(self, folder: Path) -> None:
        """Begins a trace, which `stop` writes into a folder of its own below `folder`.

        Raises:
            BadRequestError: one is being made.
            ConfigError: the folder cannot be made.
        """
        import jax

        with self._lock:
            if self._folder is not None:
                raise BadRequestError("a trace is being made already: stop it first")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"cannot make the folder {folder}: {error.strerror or error}", param="server.profile_dir") from error
            options = jax.profiler.ProfileOptions()
            # Every Python call as an event would make a step's host part several times longer, and the trace as well.
            options.python_tracer_level = 0
            jax.profiler.start_trace(folder, profiler_options=options)
            self._folder = folder

    def stop(self) -> None:
        """Ends the trace and writes it.

        Raises:
            BadRequestError: there is none.
            ConfigError: it cannot be written; it is lost.
        """
        import jax

        with self._lock:
            folder, self._folder = self._folder, None
            if folder is None:
                raise BadRequestError("no trace is being made")
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"the trace could not be written into {folder}", param="server.profile_dir") from error

    def close(self) -> None:
        """Ends a trace that nobody has stopped, and writes it."""
        if self._folder is not None:
            self.stop()


@contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """Makes a trace of what runs inside, written below `folder`; None: makes none.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    if folder is None:
        yield
        return
    profiler = Profiler()
    profiler.start(folder)
    try:
        yield
    finally:
        profiler.close()
