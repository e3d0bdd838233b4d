"""The compiled step programs: one per bucket, compiled in parallel, fetched from the persistent cache when it has them."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.batch import BatchLayout
from jaxpaged.loading.disk import make_private_folder

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class Compiled(NamedTuple):
    """A program and how it came about."""

    layout: BatchLayout
    run: Any
    seconds: float
    from_cache: bool


def use_persistent_cache(folder: Path | None) -> None:
    """Points JAX's compilation cache of this process at `folder` (None switches it off); keeps programs however small or quick.

    A folder that cannot be made or written does not stop anything: the programs are then compiled each time.
    """
    if folder is not None and not make_private_folder(folder):
        folder = None
    # JAX settles on a folder at its first compilation; this makes it look again.
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_raise_persistent_cache_errors", False)


class CompilationWatch:
    """Counts what the backend compiles on threads that have entered `watching`, so that engines in one process do not mix."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self._watched = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT and getattr(self._watched, "is_on", False):
            self.num_compiled += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, compilations on this thread are counted."""
        self._watched.is_on = True
        try:
            yield
        finally:
            self._watched.is_on = False

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._on_duration)


def compile_all(
    lower: Callable[[BatchLayout], jax.stages.Lowered],
    layouts: Sequence[BatchLayout],
    *,
    max_parallel: int,
    on_compiled: Callable[[Compiled], None],
) -> dict[BatchLayout, Any]:
    """Compiles the step for every layout and returns the programs.

    Args:
        lower: traces and lowers the step for one layout.
        layouts: the buckets.
        max_parallel: programs compiled at the same time (XLA lets go of the interpreter lock).
        on_compiled: called on this thread as each program gets ready.
    """
    hits: set[int] = set()

    def on_event(event: str, **_: Any) -> None:
        if event == CACHE_HIT_EVENT:
            hits.add(threading.get_ident())

    def compile_one(layout: BatchLayout) -> Compiled:
        start = time.monotonic()
        hits.discard(threading.get_ident())
        program = lower(layout).compile()
        return Compiled(layout, program, time.monotonic() - start, threading.get_ident() in hits)

    programs = {}
    jax.monitoring.register_event_listener(on_event)
    try:
        with concurrent.futures.ThreadPoolExecutor(max_parallel, "jaxpaged-compile") as pool:
            pending = [pool.submit(compile_one, layout) for layout in layouts]
            try:
                for done in concurrent.futures.as_completed(pending):
                    compiled = done.result()
                    programs[compiled.layout] = compiled.run
                    on_compiled(compiled)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        jax.monitoring.unregister_event_listener(on_event)
    return programs
