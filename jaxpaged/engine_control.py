"""What operators may ask of an engine: pause, sleep, and a prefix cache that starts anew.

A pause has two halves, because it may have to wait for steps: `begin_pause`, then steps until `is_settled`, then
`finish_pause`; `sleep` ends with `fall_asleep` after that. Whoever drives the engine does the steps in between. While paused,
requests are taken and queued, may be aborted and reach their time limits; nothing is computed.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

from jaxpaged.engine_events import EngineEvents
from jaxpaged.errors import EngineDeadError, EnginePausedError, InvalidRequestError, JaxpagedError
from jaxpaged.request import RequestOutput

if TYPE_CHECKING:
    from jaxpaged.engine import Engine

type PauseMode = Literal["abort", "wait", "keep"]
"""abort: end all requests; wait: let those that run come to their ends; keep: stop them where they are, to go on later."""

type WakeTag = Literal["weights", "kv_cache", "scheduling"]

SLEEP_LEVELS = (0, 1, 2)


class EngineControl:
    """Pauses an engine and puts it to sleep. Every call raises EngineDeadError when the engine has failed or was closed.

    Args:
        engine: called by the same thread.
        emit: is told what was done.
    """

    def __init__(self, engine: "Engine", emit: EngineEvents) -> None:
        self._engine, self._emit = engine, emit
        self._level: int | None = None

    @property
    def is_paused(self) -> bool:
        """Whether no request is let in: paused, on the way to it, or asleep."""
        return self._engine.scheduler.is_paused or self._engine.scheduler.is_draining

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called and `wake_up` has not ended it."""
        return self._level is not None

    @property
    def is_settled(self) -> bool:
        """Whether a pause has no step left to wait for, or somebody has resumed."""
        engine = self._engine
        return not self.is_paused or (not engine.num_in_flight and (not engine.scheduler.is_draining or engine.scheduler.num_running == 0))

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> list[RequestOutput]:
        """Stops, and returns the outputs made on the way: `begin_pause`, the steps and `finish_pause` in one call."""
        outputs = self.begin_pause(mode)
        while not self.is_settled:
            outputs += self._engine.step()
        self.finish_pause(clear_cache=clear_cache)
        return outputs

    def begin_pause(self, mode: PauseMode) -> list[RequestOutput]:
        """Lets no request in any more.

        Args:
            mode: "abort" ends all requests, whose last outputs are returned; "wait" lets those that run come to their ends;
                "keep" stops them where they are. Requests that wait, and those that come later, wait for `resume`.

        Raises:
            InvalidRequestError: another mode.
        """
        if mode not in (known := get_args(PauseMode.__value__)):
            raise InvalidRequestError(f"mode is one of {list(known)}, got {mode!r:.40}", param="mode")
        engine = self._engine
        engine.check_alive()
        if self._level is None and mode == "wait":
            engine.scheduler.drain()
            self._emit.health("draining")
        else:
            engine.scheduler.pause()
        ids = engine.unfinished_ids if mode == "abort" else []
        return [output for request_id in ids if (output := engine.abort(request_id)) is not None]

    def finish_pause(self, *, clear_cache: bool) -> None:
        """Ends what `begin_pause` began; does nothing if somebody has resumed meanwhile.

        Args:
            clear_cache: forget all cached pages; requests that were kept on their way are computed again.
        """
        self._engine.check_alive()
        if not self.is_paused:
            return
        self._engine.scheduler.pause()
        if self._level is None:
            self._emit.health("paused")
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def resume(self) -> None:
        """Goes on after a pause; nothing happens without one. Raises EnginePausedError while asleep."""
        self._engine.check_alive()
        if self._level is not None:
            raise EnginePausedError("the engine is asleep: call wake_up()")
        self._engine.scheduler.resume()
        self._emit.health("ready", "resumed")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> list[RequestOutput]:
        """Pauses and falls asleep; returns the outputs made on the way."""
        check_level(level)
        outputs = self.pause(mode, clear_cache=level > 0)
        self.fall_asleep(level)
        return outputs

    def fall_asleep(self, level: int) -> None:
        """The last part of `sleep`, once the engine is paused and, from level 1 on, without cached pages.

        Args:
            level: 0 keeps everything where it is; 1 moves the weights to host memory and drops the pool; 2 drops both, and the
                weights are read from their files again.

        Raises:
            EnginePausedError: somebody has resumed meanwhile.
        """
        self._engine.check_alive()
        if not self.is_paused:
            raise EnginePausedError("the engine was resumed before it could go to sleep")
        if level > 0:
            with self._fatal_unless_said():
                assert self._engine.pages.num_in_use == 0, "somebody holds pages of a pool that is to be dropped"
                self._engine.runner.sleep(keeps_weights=level == 1)
        self._level = max(level, self._level or 0)
        self._emit.health("sleeping", f"level {self._level}")

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Brings back what `tags` name ("weights", "kv_cache", "scheduling"; None: all), and goes on once everything is there.

        Raises:
            InvalidRequestError: an unknown tag.
            EnginePausedError: scheduling is asked for, and something is still away.
            MemoryBudgetError: there is no room now; what is not back sleeps on.
        """
        known = get_args(WakeTag.__value__)
        wanted = set(known) if tags is None else {tags} if isinstance(tags, str) else set(tags)
        if unknown := sorted(map(str, wanted - set(known))):
            raise InvalidRequestError(f"tags are among {list(known)}, got {unknown}", param="tags")
        self._engine.check_alive()
        if self._level is not None and self._level > 0:
            runner = self._engine.runner
            with self._fatal_unless_said():
                if "weights" in wanted:
                    runner.wake_weights()
                if "kv_cache" in wanted:
                    runner.wake_pool()
            if not runner.is_awake:
                if "scheduling" in wanted:
                    raise EnginePausedError("weights and kv_cache must be woken up before scheduling, or together with it")
                return
        self._level = None
        self.resume()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        """Forgets all cached pages; what unfinished requests have computed so far is never shared either.

        Args:
            reset_running_requests: those that run give their pages back and are computed again.
        """
        engine = self._engine
        if reset_running_requests:
            for sequence in engine.scheduler.evict_running():
                self._emit.preempted(sequence)
        engine.scheduler.reset_prefix_cache()
        self._emit.load_changed(engine.scheduler, engine.pages)

    @contextlib.contextmanager
    def _fatal_unless_said(self) -> Iterator[None]:
        """An error that is no sentence for the caller leaves a device of which nothing is known."""
        try:
            yield
        except JaxpagedError:
            raise
        except Exception as error:
            self._engine.die(error)
            raise EngineDeadError(f"the engine stopped: {error}") from error


def check_level(level: int) -> None:
    """Raises InvalidRequestError for what is no level of a sleep."""
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise InvalidRequestError(f"level is one of {list(SLEEP_LEVELS)}, got {level!r:.40}", param="level")
