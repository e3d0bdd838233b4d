"""The device of a simulated server, whose steps take time and may fail, and a driver that notes what it hands out."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpaged.batch import BatchLayout
from jaxpaged.engine import Engine
from jaxpaged.engine_driver import EngineDriver
from jaxpaged.logprobs import StepResult
from jaxpaged.request import RequestOutput
from tests.fakes import ScriptRunner, free_talk

VOCAB = 259
TALK = free_talk(VOCAB, avoid=(0, 1, 2))


class DeviceWorld(Protocol):
    """What a device has to know of the world around it."""

    now: float

    def meanwhile(self) -> None:
        """Called while the device is busy."""


class _Ids(NamedTuple):
    """The ids of a step that the device is done with at `done_s`."""

    ids: np.ndarray
    world: "DeviceWorld"
    done_s: float

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Waits for them; the others do not."""
        self.world.meanwhile()
        self.world.now = max(self.world.now, self.done_s)
        return self.ids


class FrontRunner(ScriptRunner):
    """A device of a world: its steps take time, and one of them may fail."""

    def __init__(self, world: "DeviceWorld", **options: Any) -> None:
        super().__init__(TALK, vocab=VOCAB, **options)
        self._world = world
        self._done_s = 0.0
        self.fails_at: int | None = None

    def run(self, layout: BatchLayout, blob: np.ndarray) -> StepResult:
        """See `Runner`."""
        self._world.meanwhile()
        if self.fails_at is not None and len(self.histories) >= self.fails_at:
            raise RuntimeError("the device is lost")
        result = super().run(layout, blob)
        self._done_s = max(self._done_s, self._world.now) + 0.005 + 0.001 * layout.num_tokens
        return result._replace(ids=_Ids(result.ids, self._world, self._done_s))  # type: ignore[arg-type]  # they are still to come


class NotedDriver(EngineDriver):
    """Notes which ids were handed to whose mailbox."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.handed: dict[str, list[int]] = {}

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if (box := self.mailboxes.get(output.request_id)) is not None:
                before = self.handed.get(output.request_id, []) if box._is_delta else []
                self.handed[output.request_id] = before + list(output.outputs[0].token_ids)
        super()._deliver(outputs)
