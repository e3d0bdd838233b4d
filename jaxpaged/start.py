"""Starting an engine from the options. What can be refused without JAX is refused before the seconds that importing it takes."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxpaged import events
from jaxpaged.clocks import Clocks
from jaxpaged.config import Config
from jaxpaged.distributed.company import sentence_of
from jaxpaged.errors import ConfigError
from jaxpaged.loading.progress import Progress, TransferReport, figures, progress_on
from jaxpaged.loading.sources import resolve
from jaxpaged.sinks import FanOut
from jaxpaged.tokenizer_files import require_tokenizer

if TYPE_CHECKING:
    from jaxpaged.distributed.follower import Follower
    from jaxpaged.distributed.leader import Leader
    from jaxpaged.engine import Engine
    from jaxpaged.intake import Intake
    from jaxpaged.loading.sources import ModelFiles
    from jaxpaged.model_runner import Runner

SAID_EVERY_S = 1.0


@dataclass(frozen=True)
class StartReport:
    """Who is told how the start goes.

    Attributes:
        begun_s: monotonic time at which it began.
    """

    emit: events.Sink
    clocks: Clocks
    begun_s: float

    def phase(self, name: str, message: str, done: int = 0, total: int = 0) -> None:
        """Says what is done now, and how much of it is done."""
        self.emit(events.PhaseChanged(time_s=self.clocks.wall(), phase=name, message=message, done=done, total=total))

    def die(self, reason: str) -> None:
        """Says that the engine is dead; any thread may call it."""
        self.emit(events.HealthChanged(time_s=self.clocks.wall(), state="dead", message=reason))


class DownloadPhase:
    """What is fetched, drawn as ever, and said as the phase `download` once a second: bytes done and in all.

    Args:
        report: who is told.
        drawn: draws it; None: on standard error, once there is something to draw.
    """

    def __init__(self, report: StartReport, drawn: Progress | None = None) -> None:
        self._report, self._drawn = report, drawn
        self._said_s = float("-inf")

    def show(self, report: TransferReport) -> None:
        """See `Progress`."""
        self._target().show(report)
        now_s = self._report.clocks.monotonic()
        if report.is_finished or now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            done = report.done_bytes
            total = done if report.is_finished else report.total_bytes or 0
            self._report.phase("download", f"{report.label}: {figures(report)}", done, total)

    def note(self, message: str) -> None:
        """See `Progress`."""
        self._target().note(message)

    def close(self) -> None:
        """See `Progress`."""
        if self._drawn is not None:
            self._drawn.close()

    def _target(self) -> Progress:
        if self._drawn is None:
            self._drawn = progress_on()
        return self._drawn


class Started(NamedTuple):
    """A ready engine and its door."""

    engine: "Engine"
    intake: "Intake"


def start_engine(config: Config, sinks: Sequence[events.Sink], leader: "Leader | None" = None) -> Started:
    """Does everything up to "ready"; nothing is left behind when it fails.

    Args:
        leader: of the other processes of `config.distributed`, which has taken its port.

    Raises:
        JaxpagedError: what is wrong with the options, the model or the memory, in one sentence.
    """
    if leader is None and config.distributed.num_processes not in (None, 1):
        raise ConfigError(
            f"distributed.num_processes {config.distributed.num_processes}: several processes are started with `jaxpaged serve` alone",
            param="distributed.num_processes",
        )
    with _no_garbage_collection():
        report = _begin(FanOut(sinks))
        if leader is None:
            return _start_engine(config, report, None)
        try:
            leader.join(lambda message: report.phase("join", message), report.die)
            return _start_engine(config, report, leader)
        except BaseException as error:
            leader.fail(sentence_of(error))
            raise


def start_follower(config: Config, sinks: Sequence[events.Sink], follower: "Follower") -> "Runner":
    """The same in a process that replays what process 0 does, which it has joined. Raises JaxpagedError."""
    with _no_garbage_collection():
        report = _begin(FanOut(sinks))
        files = _find(config, report)
        from jaxpaged.build import build_follower

        return build_follower(config, files, report, follower)


def _begin(emit: events.Sink) -> StartReport:
    clocks = Clocks()
    emit(events.HealthChanged(time_s=clocks.wall(), state="starting"))
    return StartReport(emit, clocks, clocks.monotonic())


def _start_engine(config: Config, report: StartReport, leader: "Leader | None") -> Started:
    files = _find(config, report)
    from jaxpaged.build import build_engine

    return Started(*build_engine(config, files, report, leader))


def _find(config: Config, report: StartReport) -> "ModelFiles":
    report.phase("find", f"finding {config.model.model}")
    files = resolve(config.model, progress=DownloadPhase(report))
    path = files.path if files.tokenizer_path is None else files.tokenizer_path
    if path.is_dir() and config.model.load_format != "dummy":
        require_tokenizer(path)
    return files


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Imports and traces make millions of objects that stay: looking through them again and again takes a tenth of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
