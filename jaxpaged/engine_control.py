"""What operators may ask of an engine: pause, sleep, and a prefix cache that starts anew.

A pause has two halves, because it may have to wait for steps: `begin_pause`, then steps until `is_settled`, then
`finish_pause`. Whoever drives the engine does the steps in between, and gives a pause up with `withdraw` when its caller has
left. While paused, requests are taken and queued, may be aborted and reach their time limits; nothing is computed.

A pause holds until somebody resumes, over a sleep as well: an engine that was paused and then slept wakes up paused.
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
"""abort: end all requests; wait: let those that have begun come to their ends; keep: stop them where they are, to go on later."""

type WakeTag = Literal["weights", "kv_cache", "scheduling"]

PAUSE_MODES: tuple[str, ...] = get_args(PauseMode.__value__)
WAKE_TAGS: tuple[str, ...] = get_args(WakeTag.__value__)
SLEEP_LEVELS = (0, 1, 2)


class Pause:
    """One call of `pause` or `sleep`, on its way or done.

    Args:
        mode: what becomes of the requests that are there.
        clear_cache: forget all cached pages; requests that were kept on their way are computed again.

    Raises:
        InvalidRequestError: another mode, or no bool.
    """

    def __init__(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        if not isinstance(mode, str) or mode not in PAUSE_MODES:
            raise InvalidRequestError(f"mode is one of {list(PAUSE_MODES)}, got {mode!r:.40}", param="mode")
        check_flag("clear_cache", clear_cache)
        self.mode, self.clear_cache = mode, clear_cache
        self.level: int | None = None

    @classmethod
    def to_sleep(cls, level: int = 1, mode: PauseMode = "abort") -> "Pause":
        """The pause that a sleep begins with; from level 1 on the cached pages go. Raises InvalidRequestError: unknown level or mode."""
        if not isinstance(level, int) or isinstance(level, bool) or level not in SLEEP_LEVELS:
            raise InvalidRequestError(f"level is one of {list(SLEEP_LEVELS)}, got {level!r:.40}", param="level")
        pause = cls(mode, clear_cache=level > 0)
        pause.level = level
        return pause


class EngineControl:
    """Pauses an engine and puts it to sleep. Every call raises EngineDeadError when the engine has failed or was closed.

    Args:
        engine: called by the same thread.
        emit: is told what was done.
    """

    def __init__(self, engine: "Engine", emit: EngineEvents) -> None:
        self._engine, self._emit = engine, emit
        self._level: int | None = None
        self._pending: list[Pause] = []
        """Begun and not finished; the latest decides whether those that have begun go on."""
        self._is_held = False
        """Whether a pause that was no sleep's is done and nobody has resumed."""

    @property
    def is_paused(self) -> bool:
        """Whether no request is let in: paused, on the way to it, or asleep."""
        return self._engine.scheduler.is_paused or self._engine.scheduler.is_draining

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called and `wake_up` has not ended it."""
        return self._level is not None

    def is_settled(self, pause: Pause) -> bool:
        """Whether a pause has no step left to wait for, or somebody has resumed."""
        engine = self._engine
        is_still = not engine.num_in_flight and (engine.scheduler.is_paused or engine.scheduler.is_drained)
        return is_still or pause not in self._pending

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> list[RequestOutput]:
        """Stops, and returns the outputs made on the way: `begin_pause`, the steps and `finish_pause` in one call."""
        return self._pause(Pause(mode, clear_cache=clear_cache))

    def begin_pause(self, pause: Pause) -> list[RequestOutput]:
        """Lets no request in any more.

        Of its modes, "abort" ends all requests, whose last outputs are returned; "wait" lets those that have begun come to their
        ends; "keep" stops them where they are. Requests that wait, and those that come later, wait for `resume`.
        """
        engine = self._engine
        engine.check_alive()
        self._pending.append(pause)
        self._settle_scheduler()
        ids = engine.unfinished_ids if pause.mode == "abort" else []
        return [output for request_id in ids if (output := engine.abort(request_id)) is not None]

    def finish_pause(self, pause: Pause) -> None:
        """Ends what `begin_pause` began, and falls asleep if it is a sleep's. A pause that somebody has resumed since comes to nothing.

        A sleep of level 0 keeps everything where it is; 1 moves the weights to host memory and drops the pool; 2 drops both, and
        the weights are read from their files again.

        Raises:
            EnginePausedError: a sleep, and somebody has resumed meanwhile.
        """
        self._engine.check_alive()
        if pause not in self._pending:
            if pause.level is not None:
                raise EnginePausedError("the engine was resumed before it could go to sleep")
            return
        self._engine.scheduler.pause()
        if self._level is None:
            self._emit.health("paused")
        if pause.clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)
        if pause.level is None:
            self._is_held = True
        else:
            self._fall_asleep(pause.level)
        self._pending.remove(pause)

    def withdraw(self, pause: Pause) -> None:
        """Gives up a pause that is not finished, as if it had never begun; what it has aborted stays aborted. Raises nothing."""
        with contextlib.suppress(EngineDeadError):
            self._engine.check_alive()
            if pause not in self._pending:
                return
            self._pending.remove(pause)
            self._settle_scheduler("a pause was given up")

    def resume(self) -> None:
        """Goes on after a pause; nothing happens without one. Raises EnginePausedError while asleep."""
        self._engine.check_alive()
        if self._level is not None:
            raise EnginePausedError("the engine is asleep: call wake_up()")
        self._pending.clear()
        self._is_held = False
        self._settle_scheduler("resumed")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> list[RequestOutput]:
        """Pauses and falls asleep; returns the outputs made on the way."""
        return self._pause(Pause.to_sleep(level, mode))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Brings back what `tags` name ("weights", "kv_cache", "scheduling"; None: all).

        Once everything is there the engine goes on, unless it was paused apart from the sleep. Nothing happens when it is awake,
        or without tags.

        Raises:
            InvalidRequestError: an unknown tag.
            EnginePausedError: scheduling is asked for, and something is still away.
            MemoryBudgetError: there is no room now; what is not back sleeps on.
        """
        wanted = wake_tags(tags)
        self._engine.check_alive()
        if self._level is None or not wanted:
            return
        if self._level > 0:
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
        self._settle_scheduler("woken up")

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

    def _pause(self, pause: Pause) -> list[RequestOutput]:
        outputs = self.begin_pause(pause)
        while not self.is_settled(pause):
            outputs += self._engine.step()
        self.finish_pause(pause)
        return outputs

    def _fall_asleep(self, level: int) -> None:
        """The engine is paused and, from level 1 on, without cached pages."""
        if level > 0:
            with self._fatal_unless_said():
                assert self._engine.pages.num_in_use == 0, "somebody holds pages of a pool that is to be dropped"
                self._engine.runner.sleep(keeps_weights=level == 1)
        self._level = max(level, self._level or 0)
        self._emit.health("sleeping", f"level {self._level}")

    def _settle_scheduler(self, reason: str = "") -> None:
        """Brings the scheduler into the state that the pauses and the sleep ask for together.

        Args:
            reason: why it may go on, or stand still again.
        """
        scheduler = self._engine.scheduler
        mode = self._pending[-1].mode if self._pending else None
        if self._level is not None:
            scheduler.pause()
        elif mode == "wait":
            scheduler.drain()
            self._emit.health("draining")
        elif mode is not None or self._is_held:
            scheduler.pause()
            if mode is None:
                self._emit.health("paused", reason)
        else:
            scheduler.resume()
            self._emit.health("ready", reason)

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


def check_flag(name: str, value: object) -> None:
    """Raises InvalidRequestError for what is no bool."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is True or False, got {value!r:.40}", param=name)


def wake_tags(tags: Iterable[str] | None) -> frozenset[str]:
    """What `wake_up` is to bring back; one tag may come without a list. Raises InvalidRequestError for an unknown one."""
    if tags is None:
        return frozenset(WAKE_TAGS)
    given = (tags,) if isinstance(tags, str) or not isinstance(tags, Iterable) else tuple(tags)
    if unknown := [tag for tag in given if not isinstance(tag, str) or tag not in WAKE_TAGS]:
        raise InvalidRequestError(f"tags are among {list(WAKE_TAGS)}, got {str(unknown):.80}", param="tags")
    return frozenset(given)
