"""What operators may ask of an `LLM`: to stand still, to sleep, to forget its cached pages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpaged.engine_control import Pause, PauseMode, check_flag

if TYPE_CHECKING:
    from jaxpaged.engine import Engine
    from jaxpaged.engine_turns import EngineTurns


class OperatorCalls:
    """A part of `LLM`, whose engine and turns it uses."""

    _engine: "Engine"
    _turns: "EngineTurns"

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forgets all cached pages; `reset_running_requests`: open streams give theirs back, too, and are computed again. True: done."""
        check_flag("reset_running_requests", reset_running_requests)
        with self._turns.turn():
            self._engine.control.reset_prefix_cache(reset_running_requests=reset_running_requests)
        return True

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Computes nothing until `resume`. Raises InvalidRequestError for an unknown mode.

        Args:
            mode: what becomes of open streams: "abort" ends them, "wait" computes them to their ends, "keep" stops them.
            clear_cache: forget all cached pages; streams that were kept are computed again.
        """
        self._pause(Pause(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        """Goes on after `pause`; nothing happens without one. Raises EnginePausedError while asleep."""
        with self._turns.change():
            self._engine.control.resume()

    def is_paused(self) -> bool:
        """Whether requests are refused, because of a pause or a sleep."""
        return self._engine.control.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, and gives memory back until `wake_up`. Raises InvalidRequestError for an unknown level or mode.

        Args:
            level: 0 only pauses; 1 moves the weights to host memory and drops the page pool; 2 drops both, and the weights are
                read from their files again.
            mode: as for `pause`.
        """
        self._pause(Pause.to_sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings back what `tags` name ("weights", "kv_cache", "scheduling"; None: all); goes on once all is there.

        An engine that was paused apart from the sleep stays paused. Nothing happens when it is awake, or without tags.

        Raises:
            InvalidRequestError: an unknown tag.
            MemoryBudgetError: there is no room now; the engine sleeps on.
        """
        with self._turns.change():
            self._engine.control.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether `sleep` was called and `wake_up` has not ended it."""
        return self._engine.control.is_sleeping

    def _pause(self, pause: Pause) -> None:
        control = self._engine.control
        with self._turns.change():
            try:
                self._turns.deliver(control.begin_pause(pause))
                while not control.is_settled(pause):
                    self._turns.step()
                control.finish_pause(pause)
            except BaseException:
                control.withdraw(pause)
                raise
